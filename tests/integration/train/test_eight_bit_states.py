"""A run whose moments are kept in 8 bits, on eight devices: resumed bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from fornax.config import from_mapping
from fornax.train import TrainConfig, read_metrics, train

STEPS, SAVED = 6, 3


@pytest.fixture(scope="module")
def config(settings: dict[str, Any]) -> TrainConfig:
    """Of eight devices; each matrix has two blocks of inputs."""
    changes = {
        "steps": STEPS,
        "save_every": SAVED,
        "model": {**settings["model"], "hidden_size": 128, "intermediate_size": 128},
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "optim": {"optimizer": {"type": "adamw8bit"}},
        "eval": {},
    }
    return from_mapping(TrainConfig, {**settings, **changes})


@pytest.fixture(scope="module")
def whole(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("eight") / "whole"
    assert train(config, run_dir, progress="none").step == STEPS
    return run_dir


def losses(config: TrainConfig, whole: Path, run_dir: Path) -> list[tuple[float, float]]:
    """What the steps after the first checkpoint log when it is resumed."""
    shutil.copytree(whole, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / str(STEPS))
    assert train(config, run_dir, progress="none").step == STEPS
    return logged(run_dir)


def logged(run_dir: Path) -> list[tuple[float, float]]:
    records = read_metrics(run_dir / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [(record["loss"], record["grad_norm"]) for record in records]


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(config: TrainConfig, whole: Path, tmp_path: Path):
    assert losses(config, whole, tmp_path / "again") == logged(whole)
