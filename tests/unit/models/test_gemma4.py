"""Layers that differ in heads, share keys and have their own inputs: counts, memory, gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fornax.config.errors import ConfigError
from fornax.models import (
    DecoderConfig,
    ExpertsConfig,
    GlobalHeads,
    LayerInputConfig,
    check_model,
    create_decoder,
    num_parameters,
    page_bytes,
)

DENSE = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    initializer_range=0.3,
    sliding_window=4,
    attention_pattern=("sliding", "full"),
    global_heads=GlobalHeads(head_dim=16, num_kv_heads=1, keys_as_values=True),
    shared_kv_layers=2,
    wide_shared_mlp=True,
    layer_inputs=LayerInputConfig(vocab_size=40, width=4),
    layer_scale=True,
    value_norm=True,
    qk_norm="head",
    qkv_bias=True,
    attention_output_bias=True,
    norm_placement="sandwich",
    tie_embeddings=True,
)
EXPERTS = dataclasses.replace(
    DENSE,
    shared_kv_layers=0,
    wide_shared_mlp=False,
    layer_inputs=None,
    experts=ExpertsConfig(
        num_experts=4,
        experts_per_token=2,
        intermediate_size=8,
        shared_intermediate_size=24,
        separate_norms=True,
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_closed_form_counts_every_parameter(config: DecoderConfig) -> None:
    state = nnx.state(create_decoder(config, seed=0))
    assert num_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(state))


@pytest.mark.exhaustive
def test_recomputation_changes_no_gradient() -> None:
    graphdef, state = nnx.split(create_decoder(DENSE, seed=0))
    tokens_BT = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 12), np.int32))

    def loss(state: nnx.State, remat: str) -> jax.Array:
        model = nnx.merge(graphdef, state)
        logits_BTV = model.logits(model.hidden(tokens_BT, remat=remat))
        return -jnp.mean(jax.nn.log_softmax(logits_BTV)[..., 3])

    find = jax.jit(jax.grad(loss), static_argnums=1)
    plain, again = find(state, "none"), find(state, "full")
    for kept, made in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(kept, made, rtol=2e-4, atol=1e-6)
    assert all(jnp.any(kept != 0) for kept in jax.tree.leaves(plain["layers"]["layer_input"]))


def test_pages_are_counted_for_layers_that_keep_keys_only() -> None:
    """Two layers of each window keep keys: 2 x 2 heads x 8, and 2 x 1 head x 16, of four bytes."""
    assert page_bytes(DENSE, 4, jnp.float32) == (4 * 2 * 2 * 2 * 8 * 4, 4 * 2 * 2 * 16 * 4)


@pytest.mark.parametrize("use", ["stage axis", "serve adapters", "serve quantized"])
def test_what_does_not_take_it_refuses_it(use: str) -> None:
    with pytest.raises(ConfigError, match=rf"(heads of their own|share keys).*\({use}\)"):
        check_model(DENSE, use)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shared_kv_layers": 5}, "share fewer"),
        ({"shared_kv_layers": 6}, "less than num_layers=6"),
        ({"shared_kv_layers": 0}, "wide_shared_mlp widens"),
        ({"layer_inputs": LayerInputConfig(vocab_size=31, width=4)}, "every token needs a row"),
        ({"global_heads": GlobalHeads(head_dim=16, num_kv_heads=3)}, "not a multiple"),
    ],
)
def test_bad_combinations_are_refused(changes: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(DENSE, **changes)
