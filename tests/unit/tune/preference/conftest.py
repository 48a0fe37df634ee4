"""A tiny decoder and rows of pairs, shared by the tests of preference and distillation.

Legend: P pairs, T tokens of a row.
"""

from typing import Any

import numpy as np
import pytest

from fornax.models import Decoder, DecoderConfig, create_decoder

V = 48
CONFIG = DecoderConfig(
    vocab_size=V, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2
)


def draw_rows(shape: tuple[int, ...], *, seed: int = 0, length: int = 16) -> dict[str, np.ndarray]:
    """Sequences of unlike length, prompts of a third of them; int32 and float32 [*shape, T]."""
    rng = np.random.default_rng(seed)
    whole = (*shape, length)
    lengths = rng.integers(length // 2, length + 1, shape)[..., None]
    prompts = lengths // 3
    place = np.broadcast_to(np.arange(length), whole)
    tokens = rng.integers(1, V, whole)
    tokens = np.where(place < lengths, tokens, 0)
    targets = np.concatenate([tokens[..., 1:], np.zeros((*shape, 1), int)], axis=-1)
    trained = (place >= prompts - 1) & (place < lengths - 1)
    return {
        "tokens": tokens.astype(np.int32),
        "targets": np.where(trained, targets, 0).astype(np.int32),
        "loss_weights": trained.astype(np.float32),
        "segment_ids": (place < lengths).astype(np.int32),
        "positions": np.where(place < lengths, place, 0).astype(np.int32),
    }


@pytest.fixture(scope="session")
def rows() -> Any:
    return draw_rows


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    return create_decoder(CONFIG, seed=1)
