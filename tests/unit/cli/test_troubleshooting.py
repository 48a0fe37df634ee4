"""The page of troubleshooting quotes what commands say."""

from pathlib import Path

import pytest

from fornax.cli.main import main

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "troubleshooting.md"
SAID = {
    "train --model.num-layer 4": "is not a key of",
    "train --steps 1e3": "does not fit: this key takes an integer",
    "trian": "is not a command of",
    "train --config nofile.yaml": "cannot be read: No such file or directory",
    "train --optim.schedule.type cosine --optim.schedule.warmup-steps 100 --steps 10": (
        "fills the whole run of"
    ),
    "train --mesh.tensor 300 --run-dir run": "needs a multiple of",
    "train --batch-size 12 --data.source.type stdlib": "does not divide into 8 virtual shards",
    "train --data.source.type dataset --data.source.path nowhere": "is not a finished dataset",
    "data build --source.type text --source.path nowhere --output d": "matches no file",
    "data build --source.type jsonl --source.path bad.jsonl --output d": "is not valid JSON",
    "diffusion train --data empty --run-dir run": "holds no image",
    "convert nowhere --out o": "is neither a run directory with checkpoints nor",
    "generate odd --prompt x": "is not supported; Fornax loads",
    "quantize odd --scheme w4 --out o": "there is no scheme",
    "diffusion sample nowhere --prompt x --out o.png": (
        "does not exist: name a folder that diffusers saved"
    ),
    "tune sft --out nothing": "has no run to",
    "host empty --http 0.0.0.0:8080": "can be reached from other machines, and without a token",
    "bench serve --port 9": "no server answers at",
    "plan --topology v9:2x2 --model.num-layers 1": "is not known; use one of v4",
}


@pytest.mark.parametrize("command", SAID)
def test_the_page_has_what_a_command_says(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text('{"text": 1\n')
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "odd"}')
    assert main(command.split()) == 2
    assert SAID[command] in capsys.readouterr().err
    assert f"`{SAID[command]}`" in PAGE.read_text(encoding="utf-8")
