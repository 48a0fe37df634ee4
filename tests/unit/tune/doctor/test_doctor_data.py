"""Faults of data and template, planted: exactly the check that is for them speaks up."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.tune.tiny import TEMPLATE, save_chats, save_model

from fornax.adapters import LoRA
from fornax.tune import SFTConfig, read_origin
from fornax.tune.data import Codec, Encoded
from fornax.tune.doctor import CheckResult, run_checks

DATA = ("template", "one beginning", "end is learned")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> SFTConfig:
    folder = tmp_path_factory.mktemp("doctor")
    return SFTConfig(
        model=str(save_model(folder)),
        data=str(save_chats(folder / "chats.jsonl")),
        max_length=96,
        batch_size=4,
        steps=2,
        lora=LoRA(rank=2),
    )


def look(config: SFTConfig) -> dict[str, CheckResult]:
    origin = read_origin(config)
    return {f.check: f for f in run_checks(config, origin, only=DATA)}


def failing(found: dict[str, CheckResult]) -> list[str]:
    return [name for name, result in found.items() if result.outcome.verdict == "fail"]


def test_sound_conversations_pass(config: SFTConfig) -> None:
    found = look(config)
    assert failing(found) == []
    assert "36 sequences" in found["one beginning"].outcome.text
    assert found["template"].outcome.verdict == "pass"


def test_an_end_that_is_not_learned(config: SFTConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Codec.chat

    def cut(self: Codec, record: Any) -> list[Encoded]:
        return [
            dataclasses.replace(
                found, mask=found.mask & ~np.isin(found.tokens, np.array(self.eos_ids))
            )
            for found in chat(self, record)
        ]

    monkeypatch.setattr(Codec, "chat", cut)
    found = look(config)
    # The template's own check learns of it too: it asks whether an answer's end is learned.
    assert failing(found) == ["template", "end is learned"]
    text = found["end is learned"].outcome.text
    assert "never to stop" in text
    assert "eos_token_id" in text


def test_ends_lost_in_the_rows(config: SFTConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from fornax.tune.doctor.trial_run import TrialRun

    rows = TrialRun.rows.func

    def cut(self: TrialRun) -> dict[str, np.ndarray]:
        made = dict(rows(self))
        learned = ~np.isin(made["targets"], np.array(self.origin.eos_ids))
        return made | {"loss_weights": made["loss_weights"] * learned}

    monkeypatch.setattr(TrialRun, "rows", property(cut))
    assert failing(look(config)) == ["end is learned"]


def test_a_beginning_written_twice(config: SFTConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Codec.chat

    def doubled(self: Codec, record: Any) -> list[Encoded]:
        return [
            Encoded(
                tokens=np.append(np.int32([self.bos_id]), found.tokens).astype(np.int32),
                mask=np.append(False, found.mask),
                prompt=found.prompt + 1,
            )
            for found in chat(self, record)
        ]

    monkeypatch.setattr(Codec, "chat", doubled)
    found = look(config)
    assert "one beginning" in failing(found)
    assert "36 of the first 36 sequences hold" in found["one beginning"].outcome.text
    assert "add_bos_token" in found["one beginning"].outcome.text


def test_a_template_that_loses_text(config: SFTConfig, tmp_path: Path) -> None:
    file = tmp_path / "lossy.jinja"
    file.write_text(TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'][:4] }}"))
    found = look(dataclasses.replace(config, template=str(file)))
    assert failing(found) == ["template"]
    assert "is not in what the tokenizer makes" in found["template"].outcome.text
    assert "--template FILE" in found["template"].outcome.text


@pytest.mark.slow
def test_text_needs_no_template(config: SFTConfig, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "red follows blue"}\n' * 8)
    found = look(dataclasses.replace(config, data=str(file)))
    assert failing(found) == []
    assert found["template"].outcome.verdict == "skip"
