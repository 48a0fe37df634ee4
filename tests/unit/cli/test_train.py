"""`fornax train`: which config and which run directory reach the trainer."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import fornax.train
from fornax.cli.main import main
from fornax.cli.training import TrainingArguments, run_to_end
from fornax.config import dump_yaml, from_yaml, load
from fornax.train import TrainConfig

MODEL = """
model: {vocab_size: 64, hidden_size: 8, intermediate_size: 16, num_heads: 2, head_dim: 4}
data: {source: {type: stdlib}, transforms: [], virtual_shards: 2}
batch_size: 4
"""


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Runs that the command asked the trainer for, instead of running them."""
    made = []

    def train(config, run_dir, *, accept_changes, progress, prices):
        made.append(
            SimpleNamespace(
                config=config,
                run_dir=run_dir,
                accept=accept_changes,
                progress=progress,
                prices=prices,
            )
        )
        return SimpleNamespace(exit_code=143, goodput=None)

    monkeypatch.setattr(fornax.train, "train", train)
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(MODEL, encoding="utf-8")
    return made


def test_file_and_flags_reach_the_trainer_and_its_code_comes_back(calls):
    words = ["--model.num-layers", "4", "--accept-changes", "steps", "seed", "--progress", "none"]
    assert main(["train", "--config", "small.yaml", *words]) == 143
    [call] = calls
    assert call.config == load(TrainConfig, file="small.yaml", overrides=["--model.num-layers=4"])
    assert call.run_dir == Path("runs/small")
    assert call.accept == ("steps", "seed")
    assert call.progress == "none"


@pytest.mark.parametrize(
    ("reason", "said"), [("finished", "done at step 3: "), ("signal", "stopped, saved at step 3: ")]
)
def test_the_end_names_the_report(reason, said, tmp_path, capsys):
    (tmp_path / "goodput.jsonl").write_text(
        '{"attempt": 1, "start_step": 0, "time": 0}\n'
        '{"attempt": 1, "step": 3, "time": 0, "seconds": {"step": 2.0}}\n'
    )
    result = fornax.train.TrainResult(
        run_dir=tmp_path,
        step=3,
        reason=reason,
        metrics=None,
        evaluation=None,
        goodput=fornax.train.summarise(tmp_path / "goodput.jsonl"),
        exit_code=0,
    )
    arguments = TrainingArguments(progress="none")
    assert run_to_end(lambda *_, **__: result, None, tmp_path, arguments) == 0
    assert capsys.readouterr().out == f"{said}{tmp_path / 'report.html'}\n"


def test_a_run_directory_goes_on_with_its_own_config(calls):
    before = load(TrainConfig, file="small.yaml", overrides=["--seed=7"])
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text(dump_yaml(before), encoding="utf-8")
    assert main(["train", "--run-dir", "mine", "--steps=2000"]) == 143
    [call] = calls
    assert (call.config.seed, call.config.steps, call.run_dir) == (7, 2000, Path("mine"))


def test_a_config_file_goes_before_that_of_the_run(calls):
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text("seed: 7\n", encoding="utf-8")
    main(["train", "--run-dir", "mine", "--config", "small.yaml"])
    assert calls[0].config.seed == 0


def test_nothing_to_train_is_said(calls, capsys):
    assert main(["train", "--run-dir", "empty"]) == 2
    assert capsys.readouterr().err.startswith("error: empty has no run to resume; name a")
    assert not calls


def test_the_printed_config_loads_back_and_nothing_runs(calls, capsys):
    words = ["--config", "small.yaml", "--steps", "9", "--print-config"]
    assert main(["train", *words]) == 0
    printed = from_yaml(TrainConfig, capsys.readouterr().out)
    assert printed == load(TrainConfig, file="small.yaml", overrides=["--steps=9"])
    assert not calls


def test_every_key_of_a_run_is_documented(capsys):
    assert main(["train", "--help-config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [number for number, line in enumerate(lines) if line.startswith("--")]
    assert "--model.num_layers" in {lines[number].split()[0] for number in heads}
    bare = [lines[n] for n in heads if not lines[n + 1 : n + 2] or lines[n + 1].startswith("--")]
    assert bare == []
