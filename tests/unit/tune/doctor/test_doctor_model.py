"""Faults of model and loss, planted: exactly the check that is for them speaks up.

One trial run is compiled once; a fault is put into its weights, its rows or its loss.
"""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.unit.tune.tiny import COLOURS, save_chats, save_model

from fornax.adapters import LoRA
from fornax.config import ConfigError
from fornax.train.config import LogConfig
from fornax.train.task import Loss, Task
from fornax.tune import SFTConfig, TuneConfig, read_origin, tune
from fornax.tune.config import (
    DistillConfig,
    KTOConfig,
    PPOConfig,
    PreferenceConfig,
    RewardModelConfig,
    RolloutConfig,
)
from fornax.tune.doctor import CheckResult, model_checks, paragraphs, run_checks
from fornax.tune.doctor.model_checks import Gradients
from fornax.tune.doctor.results import Outcome, failed
from fornax.tune.doctor.trial_run import TrialRun, small_config
from fornax.tune.methods import method_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and data of every kind."""
    found = tmp_path_factory.mktemp("doctor")
    save_model(found)
    save_model(found / "other", seed=1)
    save_chats(found / "chats.jsonl")
    asked = [f"What follows {a}?" for a in COLOURS for _ in range(3)]
    answers = [(f"{COLOURS[n % 6]} follows", f"{COLOURS[n % 5]}!") for n in range(len(asked))]
    records = {
        "pairs": [
            {"prompt": prompt, "chosen": good, "rejected": bad}
            for prompt, (good, bad) in zip(asked, answers, strict=True)
        ],
        "labelled": [
            {"prompt": prompt, "completion": both[n % 2], "label": n % 2 == 0}
            for n, (prompt, both) in enumerate(zip(asked, answers, strict=True))
        ],
        "prompts": [{"prompt": prompt} for prompt in asked],
    }
    for name, lines in records.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (found / f"{name}.jsonl").write_text(text)
    (found / "mine.py").write_text(
        "def score(prompt, completion):\n    return completion.count('e') / 4 + len(completion) / 9"
    )
    return found


def config_of(folder: Path, cls: type[TuneConfig], data: str, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": str(folder / f"{data}.jsonl"),
        "max_length": 64,
        "batch_size": 8,
        "steps": 2,
        "remat": "none",
        "log": LogConfig(tensorboard=False),
    }
    return cls(**{**given, **changes})


def trial_of(config: TuneConfig, out: Path) -> TrialRun:
    return TrialRun(
        run=config,
        config=small_config(config, out),
        origin=read_origin(config),
        make=method_of(config).make(),
        folder=out,
    )


@pytest.fixture(scope="module")
def packed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TrialRun:
    """Packed chats and adapters."""
    config = config_of(folder, SFTConfig, "chats", max_length=96, lora=LoRA(rank=2))
    return trial_of(config, tmp_path_factory.mktemp("packed"))


@pytest.fixture(scope="module")
def gradients(packed: TrialRun) -> Gradients:
    return Gradients(trial=packed, rows=packed.rows)


def test_sound_foundations_pass(packed: TrialRun, gradients: Gradients) -> None:
    found = {
        "adapters": model_checks.adapters_at_start(packed, packed.rows),
        "packing": model_checks.packing(packed, packed.rows),
        "gradients": model_checks.every_gradient(gradients),
    }
    assert {name: outcome.verdict for name, outcome in found.items()} == dict.fromkeys(
        found, "pass"
    )


def with_task(trial: TrialRun, loss: Any, out: Path) -> Gradients:
    """The gradients of a trial run whose loss is another; programs and weights are shared."""
    task: Task = dataclasses.replace(trial.task, loss=loss)
    other = dataclasses.replace(trial, folder=out)
    other.__dict__["task"] = task
    for name in ("state", "rows"):
        other.__dict__[name] = getattr(trial, name)
    other.__dict__["programs"] = trial.programs
    return Gradients(trial=other, rows=trial.rows)


def test_adapters_that_begin_elsewhere(packed: TrialRun, tmp_path: Path) -> None:
    other = dataclasses.replace(packed, folder=tmp_path)
    moved = jax.tree.map(lambda x: x + 0.05, packed.state.params)
    other.__dict__.update(
        task=packed.task,
        rows=packed.rows,
        programs=packed.programs,
        state=dataclasses.replace(packed.state, params=moved),
    )
    assert model_checks.packing(other, other.rows).verdict == "pass"
    outcome = model_checks.adapters_at_start(other, other.rows)
    assert outcome.verdict == "fail"
    assert "fresh adapters already change the model" in outcome.text
    assert "must begin at zero" in outcome.text


def test_attention_that_ignores_segments(packed: TrialRun, tmp_path: Path) -> None:
    class Blind(TrialRun):
        """Its rows reach the model as one segment each."""

        def logprobs(self, rows: Any, *, base: bool = False) -> np.ndarray:
            return packed.logprobs(
                {**rows, "segment_ids": (rows["segment_ids"] > 0).astype(np.int32)}, base=base
            )

    names = ("run", "config", "origin", "make")
    blind = Blind(**{name: getattr(packed, name) for name in names}, folder=tmp_path)
    blind.__dict__["rows"] = packed.rows
    outcome = model_checks.packing(blind, blind.rows)
    assert outcome.verdict == "fail"
    assert "examples see each other" in outcome.text
    assert "--packing none" in outcome.text
    assert model_checks.adapters_at_start(blind, blind.rows).verdict == "pass"


def test_a_packer_that_gives_all_examples_one_segment(packed: TrialRun) -> None:
    crossed = {"segment_ids": (packed.rows["segment_ids"] > 0).astype(np.int32)}
    assert model_checks.packing(packed, packed.rows | crossed).verdict == "fail"


@pytest.mark.slow
def test_means_inside_micro_batches(packed: TrialRun, tmp_path: Path) -> None:
    def mean(model: Any, batch: Any, key: jax.Array) -> Loss:
        found = packed.task.loss(model, batch, key)
        return Loss(total=found.total / found.weight, weight=jnp.float32(1), metrics={})

    gradients = with_task(packed, mean, tmp_path)
    outcome = model_checks.accumulation(gradients)
    assert outcome.verdict == "fail"
    assert "a mean inside each micro-batch" in outcome.text
    assert "PostTraining.measure" in outcome.text
    assert model_checks.every_gradient(gradients).verdict == "pass"


def test_a_parameter_that_the_loss_does_not_read(gradients: Gradients) -> None:
    other = Gradients(trial=gradients.trial, rows=gradients.rows)
    loss, found = gradients.of(1)
    stopped = jax.tree_util.tree_map_with_path(
        lambda path, x: x * ("mlp" not in jax.tree_util.keystr(path)), found
    )
    other._found = {1: (loss, stopped)}
    outcome = model_checks.every_gradient(other)
    assert outcome.verdict == "fail"
    assert "layers/mlp/" in outcome.text
    assert "gets no gradient" in outcome.text
    other._found = {1: (loss, jax.tree.map(lambda x: x / 0, found))}
    assert "not a finite number" in model_checks.every_gradient(other).text


def reference(trial: TrialRun) -> Outcome:
    return model_checks.reference(trial, trial.rows, {})


def test_a_reference_that_is_not_the_policy(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fornax.tune.tasks import pairs

    trial = trial_of(config_of(folder, PreferenceConfig, "pairs"), tmp_path)
    outcome = reference(trial)
    assert outcome.verdict == "pass"
    assert "the loss starts at 0.6931" in outcome.text
    made = pairs.for_each_example
    monkeypatch.setattr(pairs, "for_each_example", lambda *a, **k: made(*a, **k) - 4)
    out = tmp_path / "other"
    out.mkdir()
    rows = trial_of(trial.run, out).rows
    outcome = model_checks.reference(trial, rows, {})
    assert outcome.verdict == "fail"
    assert "not the policy before the first step" in outcome.text
    assert "reference/ folder" in outcome.text


def test_a_run_that_the_doctor_refuses_does_not_begin(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[TuneConfig] = []

    def found(config: TuneConfig, origin: Any) -> list[CheckResult]:
        seen.append(config)
        return [CheckResult(check="ratio", outcome=failed("cause and cure"), seconds=0.1)]

    monkeypatch.setattr("fornax.tune.doctor.checks.run_checks", found)
    config = config_of(folder, SFTConfig, "chats", steps=None)
    with pytest.raises(ConfigError, match=r"ratio: cause and cure(.|\n)*--no-doctor"):
        tune(config, tmp_path / "run", progress="none")
    assert seen[0].steps == 5
    assert not (tmp_path / "run" / "checkpoints").exists()
    monkeypatch.setattr("fornax.tune.run.train", lambda *given, **named: "trained")
    off = dataclasses.replace(config, doctor=False)
    assert tune(off, tmp_path / "run", progress="none") == "trained"
    begun = SimpleNamespace(latest_step=lambda: 3)
    monkeypatch.setattr("fornax.tune.run.Checkpointer", lambda path: begun)
    assert tune(config, tmp_path / "run", progress="none") == "trained", "it continues"
    assert len(seen) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "kto",
        *(
            pytest.param(n, marks=pytest.mark.exhaustive)
            for n in ("dpo", "reward", "ppo", "distill")
        ),
    ],
)
def test_sound_runs_of_every_family_pass(folder: Path, name: str) -> None:
    made = {
        "dpo": (PreferenceConfig, "pairs", {"lora": LoRA(rank=2), "reference": "adapter"}),
        "kto": (KTOConfig, "labelled", {}),
        "reward": (RewardModelConfig, "pairs", {}),
        "ppo": (
            PPOConfig,
            "prompts",
            {
                "reward": (f"{folder / 'mine.py'}:score",),
                "reward_workers": 1,
                "rollout": RolloutConfig(max_tokens=24, max_num_seqs=16),
            },
        ),
        "distill": (
            DistillConfig,
            "chats",
            {"teacher": str(folder / "other" / "model"), "max_length": 96},
        ),
    }
    cls, data, changes = made[name]
    config = config_of(folder, cls, data, **changes)
    found = run_checks(config, read_origin(config))
    assert paragraphs(found) == ""
    assert sum(f.outcome.verdict == "pass" for f in found) >= 4
