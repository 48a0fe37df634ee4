"""`kill -9`, then the same command: the adapters are those of a run that nobody killed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from fornax.adapters import LoRAParam
from fornax.checkpoint import Checkpointer
from fornax.config import from_yaml
from fornax.train import read_metrics
from fornax.tune import SFTConfig, read_origin
from fornax.tune.policy import policy

pytestmark = [pytest.mark.fault, pytest.mark.slow]

STEPS = 100


def final_state(run_dir: Path) -> dict[str, Any]:
    """Parameters, counts and data position of the last checkpoint."""
    config = from_yaml(SFTConfig, (run_dir / "config.yaml").read_text())
    made = policy(config, read_origin(config))
    model = nnx.eval_shape(lambda: made.build(nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(model, LoRAParam))
    restored = Checkpointer(run_dir / "checkpoints").restore({"params": params}, partial=True)
    return {"params": restored.state["params"], "data": restored.data, "step": restored.step}


@pytest.mark.exhaustive
def test_a_killed_run_ends_with_the_same_parameters(
    tiny: Path, start: Any, finish: Any, kill_after: Callable[..., bool], tmp_path: Path
):
    """Dropout and noise are on, so that random keys must stand where they stood."""
    words = [
        "tune", "sft", "--model", tiny / "model", "--data", tiny / "chats.jsonl",
        "--lora.rank", "4", "--lora.dropout", "0.2", "--neftune-alpha", "3", "--max-length", "96",
        "--batch-size", "4", "--steps", str(STEPS), "--save-every", "10",
        "--log.tensorboard=false", "--no-doctor",
    ]  # fmt: skip
    finish(*words, "--out", tmp_path / "whole")
    cut_short = start(*words, "--out", tmp_path / "cut")
    assert kill_after(cut_short, tmp_path / "cut", 25)
    assert "is at step" in finish(*words, "--out", tmp_path / "cut")
    whole, cut = (final_state(tmp_path / name) for name in ("whole", "cut"))
    assert whole["step"] == cut["step"] == STEPS
    assert whole["data"] == cut["data"]
    for x, y in zip(*(jax.tree.leaves(end["params"]) for end in (whole, cut)), strict=True):
        np.testing.assert_array_equal(x, y)
    told = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut")]
    for name in ("step", "loss", "grad_norm", "trained_tokens"):
        assert [r.get(name) for r in told[0]] == [r.get(name) for r in told[1]], name
