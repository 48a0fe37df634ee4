"""The page of troubleshooting quotes what commands say."""

import importlib
import re
from pathlib import Path

import pytest
from tests.unit.tune.tiny import save_chats, save_model

from fornax.cli.main import main
from fornax.cli.registry import extra
from fornax.config import ConfigError, dump_yaml
from fornax.train import TrainConfig
from fornax.train.resume import check_changes
from fornax.tune import SFTConfig
from fornax.tune.doctor import checks
from fornax.tune.doctor.results import CheckResult, failed

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
    "data build --source.type text --source.path one.txt --output d": (
        "left the eval split without records"
    ),
    "convert pickled --out o": "loading it would unpickle",
}
LLAMA = """
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 280, "hidden_size": 32,
 "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "hidden_act": "silu",
 "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
"""
WITH_A_MODEL = {
    "tune sft --model model --data chats.jsonl --out o": "ends an assistant turn with",
}
RAISED = {
    "or accept the change with --accept-changes",
    "the doctor refuses to start this run",
    "is not installed;",
}
ELSEWHERE = {
    "cannot be fetched from": "tests/integration/hub: a Hub that does not answer",
    "needs the TPU compiler": "where libtpu is not installed",
    "loss is `nan`": "what a run does, not a message",
    "out of memory": "a message of the allocator",
    "slow first step": "what a run does, not a message",
    "`/ready` answers 503": "tests of the servers",
    "status 429": "tests of the servers",
}
"""Rows of the page that no command here can show, and why."""


def _rows() -> list[str]:
    """The first cells of the page's tables."""
    found = re.findall(r"^\| (.+?) \| .+ \| .+ \|$", PAGE.read_text(encoding="utf-8"), re.M)
    return [cell for cell in found if cell != "message"]


def test_every_row_is_shown_by_a_test_or_says_why_not():
    rows = [row[1:-1] if re.fullmatch(r"`[^`]*`", row) else row for row in _rows()]
    assert len(rows) >= 30
    assert set(rows) == {*SAID.values(), *WITH_A_MODEL.values(), *RAISED, *ELSEWHERE}


@pytest.mark.parametrize("command", SAID)
def test_the_page_has_what_a_command_says(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("hello world\n")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text(LLAMA)
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text('{"text": 1\n')
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "odd"}')
    assert main(command.split()) == 2
    assert SAID[command] in capsys.readouterr().err
    assert f"`{SAID[command]}`" in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("command", WITH_A_MODEL)
def test_the_page_has_what_a_command_says_of_a_model(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path, template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
    save_chats(tmp_path / "chats.jsonl", count=2)
    assert main(command.split()) == 2
    assert WITH_A_MODEL[command] in capsys.readouterr().err


def test_a_changed_config_is_refused_in_the_words_of_the_page():
    with pytest.raises(ConfigError, match="or accept the change with --accept-changes"):
        check_changes(dump_yaml(TrainConfig(steps=1)), TrainConfig(steps=2))


def test_the_doctor_refuses_in_the_words_of_the_page(monkeypatch):
    found = CheckResult(check="rewards vary", outcome=failed("all are 0"), seconds=0.0)
    monkeypatch.setattr(checks, "run_checks", lambda config, origin: [found])
    with pytest.raises(ConfigError, match="the doctor refuses to start this run"):
        checks.require_sound(SFTConfig(model="m", data="d"), None, print)


def test_a_missing_extra_is_named_in_the_words_of_the_page():
    message = r"is not installed; .* pip install 'fornax-ai\[otel\]'"
    with pytest.raises(ConfigError, match=message), extra("otel", "tracing"):
        importlib.import_module("a_package_that_is_not_there")
