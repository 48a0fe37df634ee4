"""A run that stopped resumes as if it had not, its reference and drawn answers included."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from fornax.adapters import LoRA
from fornax.config.errors import ConfigError
from fornax.mesh import MeshConfig
from fornax.models import create_decoder, load_pretrained, save_pretrained
from fornax.optim import Constant, OptimConfig
from fornax.train import LogConfig, load_decoder, read_metrics
from fornax.tune import tune
from fornax.tune.config import DistillConfig, OnPolicy, PreferenceConfig, TuneConfig

pytestmark = pytest.mark.exhaustive

COMMON: dict[str, Any] = {
    "max_length": 24,
    "batch_size": 8,
    "remat": "none",
    "lora": LoRA(rank=4),
    "mesh": MeshConfig(),
    "optim": OptimConfig(learning_rate=1e-2, schedule=Constant()),
    "log": LogConfig(tensorboard=False),
    "doctor": False,
}


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(out / "metrics.jsonl")]


def weights(out: Path) -> Any:
    """The parameters of a run, adapters merged."""
    return jax.device_get(nnx.to_pure_dict(nnx.state(load_decoder(out), nnx.Param)))


def goes_on(config: TuneConfig, folder: Path, steps: int) -> tuple[Path, Path]:
    """Run `steps` steps at once, and again in two halves; both run directories."""
    whole, halves = folder / "whole", folder / "halves"
    tune(dataclasses.replace(config, steps=steps), whole, progress="none")
    for until in (steps // 2, steps):
        again = dataclasses.replace(config, steps=until)
        tune(again, halves, progress="none", accept_changes=["steps"])
    assert losses(halves) == losses(whole)
    jax.tree.map(np.testing.assert_array_equal, *(weights(out) for out in (whole, halves)))
    return whole, halves


def test_dpo_goes_on_against_its_stored_reference(model_dir: Path, pairs_file: str, tmp_path: Path):
    base = tmp_path / "model"
    save_pretrained(load_pretrained(model_dir), base, model_dir)
    config = PreferenceConfig(model=str(base), data=pairs_file, **COMMON)
    _, halves = goes_on(config, tmp_path, 4)
    other = create_decoder(load_pretrained(base).config, seed=9)
    save_pretrained(other, base, model_dir, overwrite=True)
    with pytest.raises(ConfigError, match="reference's weights changed"):
        tune(
            dataclasses.replace(config, steps=6), halves, progress="none", accept_changes=["steps"]
        )


def test_on_policy_distillation_draws_what_it_would_have_drawn(
    model_dir: Path, pairs_file: str, tmp_path: Path
):
    teacher = create_decoder(load_pretrained(model_dir).config, seed=7)
    save_pretrained(teacher, tmp_path / "teacher", model_dir)
    config = DistillConfig(
        model=str(model_dir),
        teacher=str(tmp_path / "teacher"),
        data=pairs_file,
        columns={"completion": "chosen"},
        on_policy=OnPolicy(share=0.7, max_tokens=6),
        **COMMON,
    )
    whole, _ = goes_on(config, tmp_path, 4)
    drawn = [record["on_policy"] for record in read_metrics(whole / "metrics.jsonl")]
    assert sum(drawn[2:]) > 0
