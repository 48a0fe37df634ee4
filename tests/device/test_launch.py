"""A launch on the device: hosts that divide its GPUs make the losses of one process."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.device.machine import ON_GPU, exact_products

from fornax.cluster import read_events
from fornax.config import load
from fornax.config.environment import visible_gpus
from fornax.config.jsonl import read_json_lines
from fornax.data import BuildConfig, Jsonl, TrainBpe, build
from fornax.train import TrainConfig, train

COMMAND = "import sys; from fornax.cli.main import main; sys.exit(main(sys.argv[1:]))"
HOSTS = 1 if ON_GPU and len(visible_gpus()) % 2 else 2


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 7))) for _ in range(200)]
    lines = [json.dumps({"text": " ".join(draw.choices(words, k=40))}) for _ in range(200)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    source = Jsonl(path=str(folder / "text.jsonl"))
    tokenizer = TrainBpe(vocab_size=320)
    built = build(BuildConfig(source=source, output=folder / "built", tokenizer=tokenizer))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4}
    settings: dict[str, Any] = {
        "steps": 4,
        "batch_size": 8,
        "seq_len": 32,
        "mesh": {"data": -1, "fsdp": 1},
        "dtypes": {"compute": "float32"},
        "model": {"vocab_size": 320, "num_kv_heads": 2, **sizes},
        "data": {"source": {"type": "dataset", "path": str(built.path)}},
        "log": {"tensorboard": False, "every": 1},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return folder / "run.yaml"


def _losses(run_dir: Path) -> list[float]:
    return [record["loss"] for record in read_json_lines(run_dir / "metrics.jsonl")]


def test_a_launch_makes_the_losses_of_one_process(config: Path, tmp_path: Path):
    with exact_products():
        train(load(TrainConfig, file=config), tmp_path / "alone", progress="none")
    kept = {key: each for key, each in os.environ.items() if key not in ("XLA_FLAGS", "NPROC")}
    kept |= {"JAX_PLATFORMS": "cuda,cpu" if ON_GPU else "cpu"}
    kept |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    words = ["launch", "--hosts", str(HOSTS), "--no-spares", "--", "train", "--config", str(config)]
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND, *words, "--run-dir", str(tmp_path / "launched")],
        env=kept,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert ended.returncode == 0, ended.stderr
    expected, found = _losses(tmp_path / "alone"), _losses(tmp_path / "launched")
    assert len(found) == 4
    assert found == pytest.approx(expected, rel=1e-5)
    assert [e["hosts"] for e in read_events(tmp_path / "launched") if "free" in e] == [HOSTS]
