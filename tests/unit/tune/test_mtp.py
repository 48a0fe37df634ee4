"""Tuning a model that has modules for multi-token prediction: trained with it, or left out."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from tests.unit.tune.tiny import save_chats, save_model

from fornax.adapters import LoRA
from fornax.config.errors import ConfigError
from fornax.models import ExpertsConfig
from fornax.optim.tree import flatten
from fornax.train import convert, count_modules, load_decoder
from fornax.train.config import EvalConfig, LogConfig
from fornax.tune import SFTConfig, read_origin, tune
from fornax.tune.config import DPO, PreferenceConfig
from fornax.tune.policy import policy

GLM: dict[str, Any] = {
    "family": "glm4_moe",
    "num_mtp_modules": 1,
    "mlp_pattern": ("mlp", "experts"),
    "experts": ExpertsConfig(
        num_experts=4,
        experts_per_token=2,
        intermediate_size=16,
        score="sigmoid",
        normalize_eps=1e-20,
        selection_bias=True,
        shared_intermediate_size=16,
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mtp")
    save_model(made, **GLM)
    save_chats(made / "chats.jsonl")
    return made


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(folder / "model"),
        "data": str(folder / "chats.jsonl"),
        "max_length": 64,
        "batch_size": 8,
        "steps": 2,
        "log": LogConfig(tensorboard=False),
        "doctor": False,
        **more,
    }


def weights(path: Path) -> dict[str, np.ndarray]:
    state = nnx.state(load_decoder(path, mtp=True), nnx.Param)
    return jax.tree.map(np.asarray, flatten(nnx.to_pure_dict(state)))


@pytest.mark.slow
def test_sft_trains_modules_with_the_model(folder: Path, tmp_path: Path) -> None:
    """Their losses are reported, their weights move, and files of the run have them."""
    config = SFTConfig(
        **options(folder, mtp_weight=0.3, eval_share=0.2, eval=EvalConfig(every=1)),
        neftune_alpha=5.0,
    )
    assert "left out" not in policy(config, read_origin(config)).text
    run, out = tmp_path / "run", tmp_path / "files"
    tune(config, run, progress="none")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {name: value for line in lines for name, value in line.items()}
    for prefix in ("", "eval/"):
        assert found[f"{prefix}mtp_loss"] > 0
        assert 0 <= found[f"{prefix}mtp_accuracy"] <= 1
    before, after = weights(folder / "model"), weights(run)
    assert before.keys() == after.keys()
    modules = [path for path in before if path.startswith("mtp/")]
    assert modules
    for path in modules:
        assert np.abs(after[path] - before[path]).max() > 0, path
    assert count_modules(run) == 1
    convert(run, out, mtp=True)
    written = weights(out)
    for path in modules:
        np.testing.assert_array_equal(written[path], after[path])


@pytest.mark.exhaustive
def test_modules_that_are_not_trained_are_left_out_and_the_run_says_so(
    folder: Path, tmp_path: Path
) -> None:
    config = SFTConfig(**options(folder, steps=1))
    text = policy(config, read_origin(config)).text
    assert "module for multi-token prediction will be left out" in text
    assert "fornax tune sft with --mtp-weight 0.1, and without lora, trains them too" in text
    preferences = PreferenceConfig(**options(folder), loss=DPO())
    assert "will be left out" in policy(preferences, read_origin(preferences)).text
    tune(config, tmp_path, progress="none")
    assert count_modules(tmp_path) == 0
    with pytest.raises(ConfigError, match="has no modules that predict further tokens"):
        load_decoder(tmp_path, mtp=True)


def test_weights_that_train_nothing_are_refused(folder: Path, tmp_path: Path) -> None:
    config = SFTConfig(**options(folder, mtp_weight=0.3))
    with pytest.raises(ConfigError, match=r"mtp_weight=0\.3 and lora do not go together.*leave"):
        dataclasses.replace(config, lora=LoRA(rank=4))
    with pytest.raises(ConfigError, match=r"mtp_weight=0\.0 must be above 0, or null"):
        dataclasses.replace(config, mtp_weight=0.0)
    save_model(tmp_path)
    with pytest.raises(ConfigError, match="no modules that predict further"):
        read_origin(dataclasses.replace(config, model=str(tmp_path / "model")))
