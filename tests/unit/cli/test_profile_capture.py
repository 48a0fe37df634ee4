"""`fornax profile train`, `tune` and `serve`: what they refuse before anything is started."""

from pathlib import Path

import pytest

from fornax.cli.main import main

CONFIG = "model: {vocab_size: 64, hidden_size: 8, intermediate_size: 16, num_heads: 2}\nsteps: 30\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name its config with --config FILE"),
        (["--config", "none.yaml"], "none.yaml"),
        (["--config", "run.yaml", "--steps", "25..20"], "steps=25..20 must be the first and"),
        (["--config", "run.yaml", "--steps", "many"], "such as 20..25"),
        (["--config", "run.yaml", "--steps", "20..40"], "reaches beyond steps=30"),
        (["--config", "run.yaml", "--step", "2..3"], "--steps"),
        (["--config", "run.yaml", "--out", "run.yaml"], "cannot write to run.yaml"),
        (["--config", "run.yaml", "--processes.num-processes", "2"], "num_processes is 2"),
    ],
)
def test_a_run_that_cannot_be_captured_is_refused(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG)
    assert main(["profile", "train", *words]) == 2
    assert said in capsys.readouterr().err
    assert not Path("prof").exists()


def test_runs_of_diffusion_are_captured_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("model: {type: dit}\ndata: {type: letters}\nsteps: 30\n")
    assert main(["profile", "train", "--config", "run.yaml", "--steps", "20..40"]) == 2
    assert "reaches beyond steps=30" in capsys.readouterr().err
    assert main(["preflight", "--config", "run.yaml", "--mesh.expert", "2"]) == 2
    assert "mesh.expert=2" in capsys.readouterr().err


def test_methods_of_tuning_have_the_command_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        main(["profile", "tune", "sft", "--model", "none", "--data", "none", "--steps", "x"]) == 2
    )
    assert "such as 20..25" in capsys.readouterr().err
    assert main(["profile", "tune", "dpo"]) == 2
    assert "--model DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seconds", "0"], "seconds=0 must be above 0"),
        (["--url", "nowhere"], "names no server"),
        (["--url", "http://127.0.0.1:1"], "start one with fornax serve or fornax host"),
        (["--url", "https://127.0.0.1:1", "--ca", "a.pem"], "ca=a.pem is not a file"),
    ],
)
def test_a_server_that_cannot_be_asked_is_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "serve", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train", "serve", "tune sft"])
def test_help_fits_a_screen(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *name.split(), "--help"]) == 0
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
