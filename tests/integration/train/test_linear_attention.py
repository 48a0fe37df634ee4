"""A hybrid of linear and gated attention trains on eight devices as on one, and goes to files."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from fornax.config import from_mapping
from fornax.config.errors import ConfigError
from fornax.mesh import MeshConfig
from fornax.models import generate, load_pretrained, save_pretrained
from fornax.train import Hosts, Ledger, TrainConfig, pretrain_task, train
from fornax.train.session import first_state, prepare
from fornax.train.weights import load_decoder

MODEL = {
    "num_layers": 4,
    "attention_pattern": ["linear", "linear", "linear", "full"],
    "gated_delta": {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 16, "value_dim": 16},
    "attention_gate": True,
    "qk_norm": "head",
    "norm_unit_offset": True,
    "rope": {"fraction": 0.5},
    "head_dim": 16,
}


MAMBA = {
    "num_layers": 4,
    "attention_pattern": ["linear", "linear", "linear", "full"],
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_dim": 16, "bias": True},
    "rope_pattern": [False],
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
"""As Granite 4 has it, with one B and C for all heads."""


@pytest.fixture(scope="module")
def config(settings: dict[str, Any]) -> TrainConfig:
    """Rows of two chunks, each layer's activations computed again."""
    return _config(settings, MODEL)


@pytest.fixture(scope="module")
def mamba(settings: dict[str, Any]) -> TrainConfig:
    """The same of Mamba-2."""
    return _config(settings, MAMBA)


def _config(settings: dict[str, Any], changed: dict[str, Any]) -> TrainConfig:
    model = {**settings["model"], **changed}
    changes = {"model": model, "steps": 3, "seq_len": 96, "remat": "full", "eval": {}}
    return from_mapping(TrainConfig, {**settings, **changes})


def run(config: TrainConfig, devices: Any) -> list[float]:
    """The losses of three steps."""
    task = pretrain_task(config)
    programs = prepare(config, task, Ledger(), devices)
    state, batches = first_state(config, programs), task.batches("train", Hosts())
    losses = []
    for _ in range(3):
        state, metrics = programs.step(state, next(batches))
        losses.append(float(metrics["loss"]))
    batches.close()
    return losses


@pytest.mark.exhaustive
def test_three_steps_on_eight_devices_are_those_of_one(config: TrainConfig) -> None:
    spread = dataclasses.replace(config, mesh=MeshConfig(fsdp=4, tensor=2))
    expected = run(config, jax.devices()[:1])
    np.testing.assert_allclose(run(spread, None), expected, rtol=1e-5)
    assert len(set(expected)) == 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes", [{"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 4}], ids=str)
def test_three_steps_of_mamba_on_eight_devices_are_those_of_one(
    mamba: TrainConfig, sizes: dict[str, int]
) -> None:
    spread = dataclasses.replace(mamba, mesh=MeshConfig(**sizes))
    expected = run(mamba, jax.devices()[:1])
    np.testing.assert_allclose(run(spread, None), expected, rtol=1e-5)
    assert len(set(expected)) == 3


@pytest.mark.exhaustive
def test_a_trained_mamba_is_saved_and_loaded(mamba: TrainConfig, tmp_path: Path) -> None:
    train(mamba, tmp_path / "run", progress="none")
    trained = load_decoder(str(tmp_path / "run"))
    save_pretrained(trained, tmp_path / "files")
    loaded = load_pretrained(tmp_path / "files")
    assert loaded.config.family == "granitemoehybrid"
    prompts = [[5, 6, 7], list(range(8, 80))]
    tokens = generate(loaded, prompts, max_tokens=4, stop_tokens=())
    assert tokens == generate(trained, prompts, max_tokens=4, stop_tokens=())


@pytest.mark.exhaustive
def test_what_was_trained_is_saved_loaded_and_completes_prompts(
    config: TrainConfig, tmp_path: Path
) -> None:
    train(config, tmp_path / "run", progress="none")
    trained = load_decoder(str(tmp_path / "run"))
    save_pretrained(trained, tmp_path / "files")
    loaded = load_pretrained(tmp_path / "files")
    assert loaded.config.family == "qwen3_5_text"
    prompts = [[5, 6, 7], list(range(8, 80))]
    tokens = generate(loaded, prompts, max_tokens=4, stop_tokens=())
    assert tokens == generate(trained, prompts, max_tokens=4, stop_tokens=())
    alone = [generate(loaded, [prompt], max_tokens=4, stop_tokens=())[0] for prompt in prompts]
    assert tokens == alone


@pytest.mark.exhaustive
def test_rows_divided_over_devices_are_refused(config: TrainConfig) -> None:
    divided = dataclasses.replace(config, mesh=MeshConfig(fsdp=4, context=2))
    with pytest.raises(ConfigError, match=r"linear attention.*\(context axis\); give its devices"):
        run(divided, None)
