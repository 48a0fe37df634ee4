"""The whole quickstart at its smallest: every stage, then again from what is there."""

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from fornax.data import BuildConfig, Text, TrainBpe
from fornax.quickstart import SIZES, QuickstartConfig, run, serving
from fornax.quickstart.config import Size


def _few_files(size: Size, output: Path) -> BuildConfig:
    return BuildConfig(
        source=Text(path=str(Path(asyncio.__file__).parent / "*.py")),
        output=output,
        tokenizer=TrainBpe(vocab_size=size.vocab_size),
        holdout=0.3,
    )


@pytest.mark.exhaustive
def test_every_stage_runs_once(tmp_path, monkeypatch) -> None:
    tiny = SIZES["tiny"]
    tuning = dataclasses.replace(
        tiny.tuning,
        sft_steps=2,
        grpo_steps=1,
        batch_size=8,
        group_size=4,
        eval_prompts=3,
        repeats=2,
        rank=2,
    )
    size = dataclasses.replace(
        tiny, hidden_size=32, batch_size=8, steps=2, score_files=1, tuning=tuning
    )
    monkeypatch.setitem(SIZES, "tiny", size)
    # The server has its own tests.
    monkeypatch.setattr(serving, "PACKAGES", ("a_package_that_is_not_installed",))
    monkeypatch.setattr(Size, "build_config", _few_files)
    config = QuickstartConfig(size="tiny", run_dir=tmp_path / "run")
    quiet = Console(quiet=True)
    assert run(config, console=quiet) == 0
    stages = config.run_dir / "stages"
    gain = json.loads((stages / "gain.json").read_text())["result"]
    assert gain["prompts"] == 3
    assert all(len(m["reward"]["repeats"]) == 2 for m in gain["models"].values())
    assert gain["people"]["parses"] == 1.0
    assert (config.run_dir / "adapter/adapter_config.json").is_file()
    assert (config.run_dir / "hf-tuned/model.safetensors").is_file()
    assert (config.run_dir / "hf-tuned/chat_template.jinja").is_file()
    host = json.loads((stages / "host.json").read_text())["result"]
    assert host["exit_code"] == 0
    assert len(host["scores"]) >= 3
    assert host["largest_difference"] < 1e-4 * max(abs(one["direct"]) for one in host["scores"])
    page = config.run_dir / "report.html"
    assert "What the exported scoring function answers" in page.read_text()
    assert "What tuning gained" in page.read_text()

    kept = {path.name: path.stat().st_mtime_ns for path in stages.iterdir()}
    before = page.stat().st_mtime_ns
    assert run(config, console=quiet) == 0
    assert {path.name: path.stat().st_mtime_ns for path in stages.iterdir()} == kept
    assert page.stat().st_mtime_ns > before
