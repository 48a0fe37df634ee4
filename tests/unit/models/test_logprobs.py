"""The log-prob function agrees with whole logits, through softcaps, packing and temperatures.

Legend: B batch, T tokens of a row.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fornax.models import Decoder, DecoderConfig, logits_logprobs, token_logprobs

CONFIG = DecoderConfig(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    final_logit_softcap=3.0,
    tie_embeddings=True,
)


def test_agrees_with_the_logits_of_a_packed_batch_in_value_and_gradient() -> None:
    decoder = Decoder(CONFIG, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    tokens_BT = jnp.asarray(rng.integers(0, 48, (2, 8)), jnp.int32)
    targets_BT = jnp.asarray(rng.integers(0, 48, (2, 8)), jnp.int32).at[0, 7].set(-100)
    segments_BT = jnp.asarray([[1] * 5 + [2] * 3, [1] * 8], jnp.int32)
    graph, state = nnx.split(decoder)
    pull_BT = jnp.asarray(rng.normal(size=(2, 2, 8)), jnp.float32)

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

    found = [jax.jit(jax.grad(f, has_aux=True))(state) for f in (direct, by_logits)]
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5, rtol=1e-4)
    assert found[0][1].logprobs[0, 7] == 0


def test_tokens_kept_have_the_values_of_all_tokens() -> None:
    decoder = Decoder(CONFIG, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    tokens_BT, targets_BT = jnp.asarray(rng.integers(0, 48, (2, 2, 6)), jnp.int32)
    keep_BK = jnp.asarray([[3, 4, 5], [0, 5, 5]], jnp.int32)
    temperature_BT = jnp.asarray(rng.uniform(0.5, 2.0, (2, 6)), jnp.float32)
    step = jax.jit(
        lambda keep: (
            token_logprobs(
                decoder, tokens_BT, targets_BT, temperature=temperature_BT, keep_BK=keep
            ).logprobs
        )
    )
    expected = jnp.take_along_axis(step(None), keep_BK, axis=1)
    np.testing.assert_allclose(step(keep_BK), expected, rtol=1e-6)
