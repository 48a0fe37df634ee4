"""Training in bfloat16, three families: the losses follow float32's on the processor, and fall."""

from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
import pytest
from tests.device.machine import ON_GPU, as_on_gpu, cpu, lowers, on_cpu

from fornax.mesh import DtypePolicy
from fornax.models import DecoderConfig
from fornax.optim import AdamW, Constant, OptimConfig
from fornax.train import Ledger, TrainConfig, pretrain_task
from fornax.train.session import first_state, prepare
from fornax.train.step import make_train_step
from fornax.train.tasks.pretrain import row_shapes

BATCH, LENGTH, STEPS = (8, 1024, 12) if ON_GPU else (2, 64, 6)
SIZES: dict[str, Any] = (
    {"hidden_size": 1024, "intermediate_size": 4096, "num_layers": 4, "num_heads": 8}
    if ON_GPU
    else {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4}
)
FAMILIES = {
    "llama": DecoderConfig(**SIZES, num_kv_heads=2, vocab_size=512),
    "qwen3": DecoderConfig(**SIZES, num_kv_heads=2, vocab_size=512, qk_norm="head"),
    "gemma3": DecoderConfig(
        **SIZES,
        num_kv_heads=1,
        vocab_size=512,
        qk_norm="head",
        sliding_window=LENGTH // 4,
        attention_pattern=("sliding", "full"),
        norm_placement="sandwich",
        norm_unit_offset=True,
        activation="gelu_tanh",
        scale_embeddings=True,
        tie_embeddings=True,
    ),
}


def _config(family: str, compute: Any) -> TrainConfig:
    return TrainConfig(
        model=FAMILIES[family],
        steps=STEPS,
        batch_size=BATCH,
        seq_len=LENGTH,
        remat="save_attention",
        dtypes=DtypePolicy(compute=compute),
        optim=OptimConfig(
            optimizer=AdamW(weight_decay=0.0), learning_rate=2e-3, schedule=Constant()
        ),
    )


def _rows() -> dict[str, np.ndarray]:
    """Two documents a row, each counting up from a number of its own: easy to learn."""
    half = LENGTH // 2
    first = np.random.default_rng(0).integers(0, 100, (BATCH, 2, 1))
    positions = np.broadcast_to(np.arange(half), (BATCH, 2, half)).reshape(BATCH, LENGTH)
    tokens = ((first + np.arange(half)) % 500).reshape(BATCH, LENGTH)
    return {
        "tokens": tokens.astype(np.int32),
        "targets": ((tokens + 1) % 500).astype(np.int32),
        "segment_ids": np.repeat([[1, 2]], half, axis=1).repeat(BATCH, 0).astype(np.int32),
        "positions": positions.astype(np.int32),
        "loss_weights": np.ones((BATCH, LENGTH), np.float32),
    }


def _losses(
    config: TrainConfig, device: jax.Device, where: AbstractContextManager[Any], steps: int
) -> list[float]:
    with where:
        programs = prepare(config, pretrain_task(config, read_data=False), Ledger(), [device])
        state, losses = first_state(config, programs), []
        for _ in range(steps):
            state, metrics = programs.step(state, _rows())
            losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_follows_float32_and_learns(
    family: str, device: jax.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(family, "bfloat16")
    losses = _losses(config, device, as_on_gpu(), STEPS)
    expected = _losses(_config(family, "float32"), cpu(), on_cpu(), 3)
    np.testing.assert_allclose(losses[:3], expected, rtol=1e-2)
    assert losses[-1] < losses[0] - 0.3
    programs = prepare(config, pretrain_task(config, read_data=False), Ledger(), [device])
    batch = programs.shapes_of(row_shapes(config, programs.hosts))
    arguments = (programs.abstract, batch, programs.abstract_frozen)
    text = lowers(monkeypatch, make_train_step(programs.parts), *arguments)
    assert "__cudnn$fmhaScaleBiasSoftmaxBackward" in text
