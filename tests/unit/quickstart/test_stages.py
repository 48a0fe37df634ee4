"""Stages run once, resume after a failure, and never mix two runs."""

import pytest

from fornax.config.errors import ConfigError
from fornax.quickstart.stages import Stage, Stages


def _stage(name, calls, *, fails=False):
    def run():
        calls.append(name)
        if fails:
            raise RuntimeError("died")
        return {"made": name}

    return Stage(name, name, run, str)


def test_a_finished_stage_is_kept_and_a_failed_one_runs_again(tmp_path):
    calls: list[str] = []
    stages = Stages(tmp_path / "stages", {"size": "tiny"})
    assert not stages.run(_stage("corpus", calls)).reused
    with pytest.raises(RuntimeError):
        stages.run(_stage("train", calls, fails=True))
    again = Stages(tmp_path / "stages", {"size": "tiny"})
    kept = again.run(_stage("corpus", calls))
    assert kept.reused
    assert kept.result == {"made": "corpus"}
    assert again.run(_stage("train", calls)).result == {"made": "train"}
    assert calls == ["corpus", "train", "train"]


def test_other_settings_are_refused_and_named(tmp_path):
    Stages(tmp_path / "run/stages", {"size": "tiny", "seed": 0})
    with pytest.raises(ConfigError, match=r"seed 0 -> 1, size tiny -> small.*--run-dir"):
        Stages(tmp_path / "run/stages", {"size": "small", "seed": 1})


def test_a_damaged_result_is_named(tmp_path):
    calls: list[str] = []
    stages = Stages(tmp_path, {})
    stages.run(_stage("corpus", calls))
    (tmp_path / "corpus.json").write_text("{")
    with pytest.raises(ConfigError, match=r"corpus\.json cannot be read.*delete it"):
        stages.run(_stage("corpus", calls))


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--run-dir"):
        Stages(tmp_path / "file" / "stages", {})
