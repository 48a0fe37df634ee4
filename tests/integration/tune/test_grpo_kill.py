"""`kill -9` in the middle of a round, then the same command: same samples, same parameters."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from tests.unit.tune.tiny import save_grpo
from tests.xla_flags import xla_flags

from fornax.train import load_decoder

pytestmark = [pytest.mark.fault, pytest.mark.slow]

EXACT = ("step", "loss", "grad_norm", "reward", "kl", "entropy", "ratio_max", "completion_tokens")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, prompts and a reward."""
    return save_grpo(tmp_path_factory.mktemp("grpo"))


def start(folder: Path, out: Path) -> Any:
    """The command, in a process of its own; compiled programs are shared between them."""
    words = [sys.executable, "-m", "fornax", "tune", "grpo", "--model", str(folder / "model")]
    words += ["--data", str(folder / "prompts.jsonl"), "--out", str(out), "--progress", "lines"]
    words += ["--reward", f"{folder / 'my_rewards.py'}:score", "--reward-workers", "1"]
    words += ["--steps", "9", "--save-every", "2", "--batch-size", "4", "--group-size", "4"]
    words += ["--rollout-epochs", "3", "--rollout.max-tokens", "8", "--max-length", "32"]
    words += [
        "--lora.rank",
        "2",
        "--optim.learning-rate",
        "1e-2",
        "--log.no-tensorboard",
        "--no-doctor",
    ]
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1", "XLA_FLAGS": xla_flags()}
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def params(out: Path) -> Any:
    return nnx.to_pure_dict(nnx.state(load_decoder(out), nnx.Param))


@pytest.mark.exhaustive  # CI kills a sampler and a trainer of a launch
def test_a_kill_changes_no_sample_and_no_parameter(folder: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = start(folder, whole)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output

    process = start(folder, killed)
    deadline = time.monotonic() + 300
    metrics = killed / "metrics.jsonl"
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= 5:
            break
        time.sleep(0.001)
    assert process.poll() is None, "it ended before it could be killed"
    process.kill()
    process.communicate()

    process = start(folder, killed)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "the run is at step" in output
    exact = [[tuple(r.get(n) for n in EXACT) for r in records(out)] for out in (whole, killed)]
    assert len(exact[0]) == 9
    assert exact[0] == exact[1]
    samples = [(out / "samples.jsonl").read_bytes() for out in (whole, killed)]
    assert samples[0] == samples[1]
    assert samples[0].count(b"\n") == 12
    jax.tree.map(np.testing.assert_array_equal, params(whole), params(killed))
