"""`fornax diffusion train` is killed, and resumes as if it had not been."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from tests.caches import fresh_cache
from tests.xla_flags import xla_flags

from fornax.diffusion.load import load_run
from fornax.diffusion.pipelines.clips import encode_video

WORDS = [
    *("--model.num-layers", "1", "--model.num-heads", "1", "--model.head-dim", "16"),
    *("--model.patch", "8", "--text.width", "16", "--batch-size", "4", "--steps", "300"),
    *("--data.resolution", "32", "--data.multiple", "16", "--data.max-aspect", "4"),
    *("--save-every", "25", "--sample.every", "100", "--sample.steps", "2", "--sample.count", "4"),
    *("--log.tensorboard", "false", "--progress", "none"),
]


def _start(images: Path, run: Path, cache: str, more: Sequence[str]) -> subprocess.Popen:
    kept = {k: v for k, v in os.environ.items() if k != "NPROC"} | {"XLA_FLAGS": xla_flags()}
    words = ["diffusion", "train", "--data", str(images), "--run-dir", str(run), *WORDS, *more]
    return subprocess.Popen(
        [sys.executable, "-m", "fornax", *words],
        env={**kept, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "FORNAX_CACHE_DIR": cache},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _records(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    names = ("step", "loss", "grad_norm", "images")
    return [{name: json.loads(line)[name] for name in names} for line in lines]


def _steps(run: Path) -> list[int]:
    folder = run / "checkpoints"
    if not folder.is_dir():
        return []
    return [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "frames", [(), pytest.param(("--data.frames", "3", "2"), marks=pytest.mark.exhaustive)]
)
def test_a_killed_run_goes_on_to_the_bit(
    frames: tuple[str, ...], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In buckets of three aspects, of videos of two lengths too, which the kill leaves half
    full."""
    images = tmp_path / "images"
    images.mkdir()
    random = np.random.default_rng(0)
    for number in range(11):
        size = [(32, 32, 3), (16, 64, 3), (64, 16, 3)][number % 3]
        count = 2 + number % 2 if frames else 1
        video = random.integers(0, 256, (count, *size), np.uint8)
        (images / f"{number}.png").write_bytes(encode_video(video, "png", 8))
        (images / f"{number}.txt").write_text(f"noise {number}")
    cache = fresh_cache(tmp_path_factory.mktemp("cache"))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = _start(images, whole, cache, frames)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output

    process = _start(images, killed, cache, frames)
    while process.poll() is None and not any(step >= 25 for step in _steps(killed)):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert max(_steps(killed)) < 300
    process = _start(images, killed, cache, frames)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output

    assert _records(killed) == _records(whole)
    one, other = (nnx.state(load_run(run).network, nnx.Param) for run in (whole, killed))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    last = "images/step-0000300.png"
    assert (whole / last).read_bytes() == (killed / last).read_bytes()
