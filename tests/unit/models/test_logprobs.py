"""The log-prob function agrees with whole logits, through softcaps, packing and temperatures.

Legend: B batch, T tokens of a row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.models import DecoderConfig, create_decoder, logits_logprobs, token_logprobs

CONFIG = DecoderConfig(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    final_logit_softcap=3.0,
    tie_embeddings=True,
)


@functools.cache
def drawn() -> tuple[Any, nnx.State]:
    return nnx.split(create_decoder(CONFIG, seed=0))


@pytest.mark.slow
def test_agrees_with_the_logits_of_a_packed_batch_in_value_and_gradient() -> None:
    rng = np.random.default_rng(0)
    tokens_BT = rng.integers(0, 48, (2, 8), dtype=np.int32)
    targets_BT = rng.integers(0, 48, (2, 8), dtype=np.int32)
    targets_BT[0, 7] = -100
    segments_BT = np.array([[1] * 5 + [2] * 3, [1] * 8], np.int32)
    graph, state = drawn()
    pull_BT = rng.normal(size=(2, 2, 8)).astype(np.float32)

    def direct(state: nnx.State):
        found = token_logprobs(
            nnx.merge(graph, state),
            tokens_BT,
            targets_BT,
            segment_ids_BT=segments_BT,
            temperature=0.7,
            entropy=True,
            chunk=4,
        )
        return jnp.sum(pull_BT[0] * found.logprobs + pull_BT[1] * found.entropy), found

    def by_logits(state: nnx.State):
        logits_BTV = nnx.merge(graph, state)(tokens_BT, segment_ids_BT=segments_BT)
        found = logits_logprobs(logits_BTV, targets_BT, temperature=0.7, entropy=True)
        return jnp.sum(pull_BT[0] * found.logprobs + pull_BT[1] * found.entropy), found

    ways = [jax.grad(f, has_aux=True) for f in (direct, by_logits)]
    found = jax.jit(lambda state: [way(state) for way in ways])(state)
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-4)
    assert found[0][1].logprobs[0, 7] == 0


def test_tokens_kept_have_the_values_of_all_tokens() -> None:
    rng = np.random.default_rng(1)
    tokens_BT, targets_BT = rng.integers(0, 48, (2, 2, 6), dtype=np.int32)
    keep_BK = np.array([[3, 4, 5], [0, 5, 5]], np.int32)
    options = {"temperature": rng.uniform(0.5, 2.0, (2, 6)).astype(np.float32)}
    graph, state = drawn()

    @jax.jit
    def both(state: nnx.State) -> list[jax.Array]:
        decoder = nnx.merge(graph, state)
        return [
            token_logprobs(decoder, tokens_BT, targets_BT, keep_BK=keep, **options).logprobs
            for keep in (None, keep_BK)
        ]

    whole, kept = map(np.asarray, both(state))
    np.testing.assert_allclose(kept, np.take_along_axis(whole, keep_BK, axis=1), rtol=1e-6)
