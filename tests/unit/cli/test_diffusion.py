"""`fornax diffusion train` and `tune`: flags to a config, and what they refuse."""

from pathlib import Path

import pytest
import yaml

from fornax.cli.commands.diffusion_train import with_images
from fornax.cli.configured import is_diffusion_config
from fornax.cli.main import main


@pytest.mark.parametrize("words", [["--data", "photos"], ["--data=photos"]])
def test_data_names_a_folder_of_images(words, capsys) -> None:
    flags = ["--model.patch", "4", *words, "--print-config"]
    assert main(["diffusion", "train", "--run-dir", "nowhere", *flags]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["data"]["type"] == "images"
    assert config["data"]["path"] == "photos"
    assert config["model"]["patch"] == 4
    assert with_images(["--data.type", "letters"]) == ["--data.type", "letters"]
    kind = ["--data.type=encoded"]
    assert with_images([*kind, *words])[:2] == [*kind, words[0].replace("--data", "--data.path")]


@pytest.mark.parametrize(
    ("command", "flags", "said"),
    [
        ("train", [], "name images with --data DIR"),
        ("tune", [], "begin one with --model DIR"),
        ("tune", ["--lora.rank", "4"], "model is empty"),
        ("tune", ["--model", "none", "--lora.rank", "0"], "adapts nothing"),
        ("train", ["--data", "none"], "does not exist"),
        ("tune", ["--data", "none", "--caption-dropout", "0"], "model is empty"),
        ("train", ["--data", "none", "--sample.guidance", "inf"], "from 0 to 100"),
        ("train", ["--data", "none", "--sample.seed", "-1"], "sample.seed=-1 must lie in"),
        ("train", ["--data", "none", "--objective.shift", "inf"], "shift=inf"),
        ("train", ["--data", "none", "--objective.bias", "inf"], "bias=inf; both must be finite"),
        ("train", ["--data", "none", "--optim.learning-rate", "inf"], "rate=inf must be finite"),
        ("train", ["--data.type", "letters", "--data.seed", "-1"], "seed=-1 must be 0 or more"),
        ("tune", ["--model", "none", "--encode.tile", "0"], "encode.tile=0 must be 1 or more"),
        ("tune", ["--model", "none", "--encode.guidance", "-1"], "encode.guidance=-1 must be"),
        ("tune", ["--data", "none", "--data.type", "encoded"], "lacks data.shape"),
    ],
)
def test_what_is_missing_is_said(command, flags, said, capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["diffusion", command, *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_config_is_told_by_its_data(tmp_path: Path, capsys) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("data: {type: letters}\n")
    assert is_diffusion_config(config)
    config.write_text("data: {path: a.jsonl}\n")
    assert not is_diffusion_config(config)
    config.write_text("model: sdxl/\ndata: {type: images, path: photos}\n")
    for command in ("preflight", "plan"):
        assert main([command, "--config", str(config)]) == 2
        assert "is a config of fornax diffusion tune" in capsys.readouterr().err
