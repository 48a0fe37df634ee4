"""Decoding with the key/value cache gives the logits of one pass over everything."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.cases import one_in
from tests.unit.models.conftest import CONFIGS, compiled, decoder_of, logits_of, tokens_of

from fornax.config.errors import ConfigError
from fornax.models import Cache, init_cache

LENGTH = 16


@functools.cache
def _step(name: str) -> Callable[..., tuple[jax.Array, Cache]]:
    graphdef, state = nnx.split(decoder_of(name))
    run = jax.jit(lambda s, tokens, ids, cache: nnx.merge(graphdef, s)(tokens, None, ids, cache))
    return functools.partial(run, state)


def _in_chunks(name: str, tokens: np.ndarray, ids: np.ndarray, chunks: list[int]) -> np.ndarray:
    cache = init_cache(CONFIGS[name], tokens.shape[0], LENGTH + 3)
    found, start = [], 0
    for count in chunks:
        piece = slice(start, start + count)
        logits, cache = _step(name)(
            jnp.asarray(tokens[:, piece]), jnp.asarray(ids[:, piece]), cache
        )
        found.append(logits)
        start += count
    assert int(cache.used) == start == LENGTH
    return np.concatenate(found, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [[6, 6, 1, 1, 1, 1], [1, 6, 6, 1, 1, 1]], ids=str)
def test_chunks_equal_one_pass(name: str, chunks: list[int]) -> None:
    tokens, ids = tokens_of(2, LENGTH), np.ones((2, LENGTH), np.int32)
    expected = logits_of(name, tokens, ids)
    np.testing.assert_allclose(_in_chunks(name, tokens, ids, chunks), expected, atol=2e-5)


@pytest.mark.slow
def test_left_padded_rows_equal_one_pass(name: str) -> None:
    """Rows of unlike length, padded on the left, as a batch of prompts is."""
    tokens, ids = tokens_of(2, LENGTH), np.ones((2, LENGTH), np.int32)
    ids[0, :4] = 0
    expected = logits_of(name, tokens, ids)
    found = _in_chunks(name, tokens, ids, [6, 6, 1, 1, 1, 1])
    np.testing.assert_allclose(found[ids > 0], expected[ids > 0], atol=2e-5)


@pytest.mark.parametrize("name", one_in(3, sorted(CONFIGS)))
def test_padding_between_chunks_is_skipped(name: str) -> None:
    """A row that had nothing to say for a while continues where it was."""
    tokens, ids = tokens_of(2, LENGTH), np.ones((2, LENGTH), np.int32)
    ids[1, 4:7] = 0
    found = _in_chunks(name, tokens, ids, [6, 6, 1, 1, 1, 1])
    real = tokens[1, ids[1] > 0]
    alone = np.zeros((2, LENGTH), np.int32)
    alone[:, : len(real)] = real
    expected = logits_of(name, alone, (np.arange(LENGTH) < len(real)) * np.ones((2, 1), np.int32))
    np.testing.assert_allclose(found[1, ids[1] > 0], expected[0, : len(real)], atol=2e-5)


@pytest.mark.parametrize("name", one_in(3, sorted(CONFIGS, reverse=True)))
def test_a_document_goes_on_over_chunks_beside_another(name: str) -> None:
    tokens = tokens_of(2, LENGTH)
    ids = np.array([[1] * 8 + [2] * 8, [1] * 3 + [2] * 13], np.int32)
    expected = logits_of(name, tokens, ids)
    found = _in_chunks(name, tokens, ids, [6, 6, 1, 1, 1, 1])
    atol = max(2e-5, _last_bits(name, tokens, ids, expected))
    np.testing.assert_allclose(found, expected, atol=atol)


def _last_bits(name: str, tokens: np.ndarray, ids: np.ndarray, logits: np.ndarray) -> float:
    """How far logits move when the last bit of each weight does: two orders of the same sums may
    differ by as much. Gated delta layers make 4e-5 of it, others 1e-5."""
    run = compiled(name)
    rng = np.random.default_rng(0)

    def moved(weight: jax.Array) -> jax.Array:
        bits = np.float32(2.0**-23) * rng.choice(np.float32([-1, 1]), weight.shape)
        return weight * (1 + bits)

    state = jax.tree.map(moved, run.args[0])
    return float(np.abs(np.asarray(run.func(state, tokens, ids)) - logits).max())


def test_more_tokens_than_slots_is_an_error() -> None:
    cache = init_cache(CONFIGS["biased"], 1, 4)
    with pytest.raises(ConfigError, match="5 tokens do not fit in a cache of 4 slots"):
        decoder_of("biased")(tokens_of(1, 5), cache=cache)
