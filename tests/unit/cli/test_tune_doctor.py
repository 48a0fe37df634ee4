"""`fornax tune doctor METHOD`: a line a check, a paragraph a failure, exit code 2 then."""

import pytest

import fornax.tune.doctor
from fornax.cli.main import main
from fornax.tune import SFTConfig, TuneConfig
from fornax.tune.doctor import CheckResult
from fornax.tune.doctor.results import Outcome, failed, passed, skipped
from fornax.tune.methods import METHODS


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    """What the doctor is to find; the configs it was asked about are kept on it."""
    outcomes: list[Outcome] = [passed("36 sequences end"), skipped("no adapters")]

    def check_config(config: TuneConfig) -> list[CheckResult]:
        assert isinstance(config, SFTConfig)
        assert (config.model, config.batch_size) == ("DIR", 16)
        return [
            CheckResult(check=f"check {n}", outcome=o, seconds=n) for n, o in enumerate(outcomes)
        ]

    monkeypatch.setattr(fornax.tune.doctor, "check_config", check_config)
    return outcomes


WORDS = ["tune", "doctor", "sft", "--model", "DIR", "--data", "chats.jsonl", "--batch-size", "16"]


def test_a_sound_run_is_a_table_and_exit_0(found: list[Outcome], capsys):
    assert main(WORDS) == 0
    out = capsys.readouterr().out
    assert "check 0  pass    0.0 s  36 sequences end\n" in out
    assert "check 1  skip    1.0 s  no adapters\n" in out
    assert "2 checks in 1.0 s" in out
    assert "Nothing is wrong." in out


def test_a_failure_is_a_paragraph_and_exit_2(found: list[Outcome], capsys):
    found.append(failed("the cause. The cure"))
    assert main(WORDS) == 2
    out = capsys.readouterr().out
    assert "check 2  fail    2.0 s  see below\n" in out
    assert out.endswith("\ncheck 2: the cause. The cure\n")


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_its_doctor(name, capsys):
    assert main(["tune", "doctor", name, "--help"]) == 0
    example = METHODS[name].example.rpartition(" --out")[0]
    assert f"fornax tune doctor {example}" in " ".join(capsys.readouterr().out.split())
