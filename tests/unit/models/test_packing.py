"""Packed documents and padding: a token's logits depend on its own document, nothing else."""

import dataclasses

import numpy as np
import pytest
from flax import nnx
from tests.unit.models.conftest import CONFIGS, logits_of, tokens_of

from fornax.models import DecoderConfig, LongRopeScaling, RopeConfig, create_decoder

LENGTH = 16
PACKED = np.array([[1] * 5 + [2] * 7 + [3] * 2 + [0] * 2, [0] * 4 + [1] * 1 + [2] * 11], np.int32)


def _documents() -> list[tuple[int, int]]:
    return [(row, doc) for row in range(2) for doc in np.unique(PACKED[row]) if doc]


@pytest.mark.parametrize(("row", "document"), _documents())
def test_a_packed_document_is_as_if_alone(name: str, row: int, document: int) -> None:
    tokens = tokens_of(2, LENGTH)
    inside = PACKED[row] == document
    count = inside.sum()
    alone = np.zeros((2, LENGTH), np.int32)
    alone[:, :count] = tokens[row, inside]
    ids = np.zeros((2, LENGTH), np.int32)
    ids[:, :count] = 1
    expected = logits_of(name, alone, ids)[0, :count]
    found = logits_of(name, tokens, PACKED)[row, inside]
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("document", [0, 1, 2, 3])
def test_changing_a_document_or_padding_changes_no_other(name: str, document: int) -> None:
    """To the last bit: nothing leaks, however small its weight."""
    tokens = tokens_of(2, LENGTH)
    inside = document == PACKED
    changed = np.where(inside, (tokens + 7) % 32, tokens)
    before, after = logits_of(name, tokens, PACKED), logits_of(name, changed, PACKED)
    others = ~inside & (PACKED != 0)
    np.testing.assert_array_equal(after[others], before[others])
    if document:
        assert np.abs(after[inside] - before[inside]).max() > 0.1


def test_later_tokens_change_no_earlier_ones(name: str) -> None:
    tokens, ids = tokens_of(2, LENGTH), np.ones((2, LENGTH), np.int32)
    changed = tokens.copy()
    changed[:, 9:] = (changed[:, 9:] + 1) % 32
    before, after = logits_of(name, tokens, ids), logits_of(name, changed, ids)
    np.testing.assert_array_equal(after[:, :9], before[:, :9])
    assert np.abs(after[:, 9:] - before[:, 9:]).max() > 0.1


def test_padding_alone_is_finite(name: str) -> None:
    """A row of nothing but padding must not poison a loss by NaN."""
    ids = np.zeros((2, LENGTH), np.int32)
    assert np.isfinite(logits_of(name, tokens_of(2, LENGTH), ids)).all()


@pytest.mark.parametrize("left", [False, True])
def test_padding_does_not_lengthen_a_context(left: bool) -> None:
    """Scalings that look at the longest position must not see that of padding."""
    scaling = LongRopeScaling(
        short_factor=(1.0,) * 4, long_factor=(9.0,) * 4, original_max_position_embeddings=6
    )
    config = dataclasses.replace(
        CONFIGS["biased"], num_layers=1, rope_pattern=(True,), rope=RopeConfig(scaling=scaling)
    )
    run = nnx.jit(create_decoder(config))
    tokens = tokens_of(1, LENGTH)
    inside = slice(LENGTH - 5, LENGTH) if left else slice(0, 5)
    ids = np.zeros((1, LENGTH), np.int32)
    ids[:, inside] = 1
    found = run(tokens, None, ids)[:, inside]
    np.testing.assert_allclose(found, run(tokens[:, inside]), atol=2e-5)


def test_a_window_is_no_wider_than_it_says() -> None:
    """One sliding layer: the token that leaves the window no longer counts."""
    config = DecoderConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        sliding_window=3,
        attention_pattern=("sliding",),
        initializer_range=0.3,
    )
    model = create_decoder(config)
    run = nnx.jit(model)
    tokens = tokens_of(1, 8)
    changed = tokens.copy()
    changed[0, 2] = (changed[0, 2] + 1) % 32
    moved = np.abs(np.asarray(run(changed) - run(tokens))).max(axis=-1)[0] > 1e-4
    assert moved.tolist() == [False, False, True, True, True, False, False, False]
