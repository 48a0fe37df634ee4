"""The order of the stages, and a signal in the middle of tuning."""

import dataclasses
import signal
from types import SimpleNamespace

import pytest
from rich.console import Console

from fornax.config.errors import ConfigError
from fornax.quickstart import SIZES, QuickstartConfig, pipeline, post_training
from fornax.quickstart.job import Job
from fornax.quickstart.stages import Interrupted, Stage


@pytest.mark.parametrize("stage", [post_training._sft, post_training._grpo])
def test_a_signal_while_tuning_stops_the_quickstart(stage, tmp_path, monkeypatch) -> None:
    stopped = SimpleNamespace(reason="signal", exit_code=128 + signal.SIGTERM)
    seen = []
    monkeypatch.setattr(
        post_training, "tune", lambda config, out: seen.append((config, out)) or stopped
    )
    job = Job(QuickstartConfig(run_dir=tmp_path), SIZES["small"], Console())
    with pytest.raises(Interrupted) as caught:
        stage(job)
    assert caught.value.exit_code == 143
    [(config, out)] = seen
    assert out.parent == tmp_path
    assert config.model == str(tmp_path / ("hf" if out.name == "sft" else "sft"))


def test_a_stopped_stage_ends_the_run_without_a_report(tmp_path, monkeypatch) -> None:
    def stop() -> dict:
        raise Interrupted(130)

    monkeypatch.setattr(pipeline, "_stages", lambda job: [Stage("sft", "Tuning", stop, str)])
    config = QuickstartConfig(run_dir=tmp_path)
    assert pipeline.run(config, console=Console(quiet=True)) == 130
    assert not (tmp_path / "report.html").exists()
    assert not (tmp_path / "stages/sft.json").exists()


def test_other_tuning_is_another_quickstart(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "_stages", lambda job: [])
    monkeypatch.setattr(pipeline, "write_report", lambda *_: tmp_path)
    config = QuickstartConfig(run_dir=tmp_path)
    assert pipeline.run(config, console=Console(quiet=True)) == 0
    small = SIZES["small"]
    other = dataclasses.replace(small.tuning, grpo_steps=small.tuning.grpo_steps + 1)
    monkeypatch.setitem(SIZES, "small", dataclasses.replace(small, tuning=other))
    with pytest.raises(ConfigError, match="grpo_steps"):
        pipeline.run(config, console=Console(quiet=True))
