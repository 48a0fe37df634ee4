"""`fornax tune`: which config and which run directory reach `tune`."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import fornax.tune
from fornax.cli.main import main
from fornax.config import dump_yaml
from fornax.tune import METHODS, SFTConfig


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Runs that the command asked for, instead of running them."""
    made = []

    def tune(config, out, *, accept_changes, progress, prices):
        made.append(
            SimpleNamespace(config=config, out=out, accept=accept_changes, progress=progress)
        )
        return SimpleNamespace(exit_code=143, goodput=None)

    monkeypatch.setattr(fornax.tune, "tune", tune, raising=False)
    monkeypatch.chdir(tmp_path)
    return made


@pytest.fixture
def saved():
    """A run directory of two epochs that came to fourteen steps."""
    Path("mine").mkdir()
    config = SFTConfig(model="m", data="d", steps=14, epochs=2.0, seed=7)
    Path("mine/config.yaml").write_text(dump_yaml(config), encoding="utf-8")


def test_the_flags_of_the_guide_reach_the_run(calls):
    words = ["--model", "DIR", "--data", "chats.jsonl", "--lora.rank", "16", "--out", "runs/mine"]
    assert main(["tune", "sft", *words]) == 143
    [call] = calls
    assert isinstance(call.config, SFTConfig)
    assert (call.config.model, call.config.data) == ("DIR", "chats.jsonl")
    assert call.config.lora is not None
    assert call.config.lora.rank == 16
    assert call.out == Path("runs/mine")


def test_the_default_directory_has_the_methods_name(calls):
    assert main(["tune", "sft", "--model=m", "--data=d"]) == 143
    assert calls[0].out == Path("runs/sft")


def test_a_student_is_the_model_and_lists_may_be_repeated(calls):
    assert main(["tune", "distill", "--teacher", "T", "--student=S", "--data", "d"]) == 143
    rewards = ["--reward", "mine.py:score", "--reward", "python_parses"]
    assert main(["tune", "grpo", "--model=m", "--data=d", *rewards]) == 143
    assert (calls[0].config.teacher, calls[0].config.model) == ("T", "S")
    assert calls[1].config.reward == ("mine.py:score", "python_parses")


@pytest.mark.parametrize(
    ("words", "length"),
    [
        ([], (None, 2.0)),
        (["--epochs", "3"], (None, 3.0)),
        (["--steps=20"], (20, None)),
        (["--steps=20", "--epochs=3"], (20, 3.0)),
    ],
)
def test_the_same_command_goes_on_and_a_length_given_now_counts(calls, saved, words, length):
    assert main(["tune", "sft", "--out", "mine", "--accept-changes", "steps", *words]) == 143
    [call] = calls
    assert (call.config.seed, call.accept) == (7, ("steps",))
    assert (call.config.steps, call.config.epochs) == length


def test_a_run_of_another_method_is_not_gone_on_with(calls, saved, capsys):
    assert main(["tune", "dpo", "--model=m", "--data=d", "--out", "mine"]) == 2
    error = capsys.readouterr().err
    assert "mine holds a run of fornax tune sft (its config.yaml has loss_on)" in error
    Path("mine/config.yaml").write_text("train_steps: 5\n", encoding="utf-8")
    assert main(["tune", "dpo", "--model=m", "--data=d", "--out", "mine"]) == 2
    assert "a run of another kind (its config.yaml has train_steps)" in capsys.readouterr().err
    assert not calls


def test_a_run_into_its_own_model_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    assert main(["tune", "sft", "--model", "model", "--data", "d", "--out", "./model/"]) == 2
    assert "model is the model to start from" in capsys.readouterr().err
    assert list(Path("model").iterdir()) == []


def test_what_is_missing_is_named(calls, capsys):
    assert main(["tune", "sft", "--out", "none"]) == 2
    assert "--model DIR --data FILE" in capsys.readouterr().err
    assert main(["tune", "sft", "--model", "m"]) == 2
    assert "data" in capsys.readouterr().err
    assert main(["tune", "sff"]) == 2
    assert "did you mean sft" in capsys.readouterr().err
    assert not calls


@pytest.mark.parametrize("name", METHODS)
def test_the_help_of_each_method_is_a_screen_with_its_example(name, capsys):
    assert main(["tune", name, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"fornax tune {METHODS[name].example}" in out
    assert len(out.splitlines()) <= 40
