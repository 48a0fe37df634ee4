"""The closed forms equal what the parameters are and what the compiler counts."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tests.unit.models.conftest import CONFIGS

from fornax.models import (
    DecoderConfig,
    abstract_decoder,
    create_decoder,
    flops_per_token,
    num_parameters,
)


@pytest.mark.parametrize("post", [False, True])
def test_parameters_are_counted_exactly(name: str, post: bool) -> None:
    config = CONFIGS[name]
    if post:
        config = dataclasses.replace(config, norm_placement="post", qk_norm="none")
    state = nnx.state(abstract_decoder(config))
    assert num_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(state))


def test_known_sizes() -> None:
    """Llama 3 8B and its published count."""
    llama = DecoderConfig(
        vocab_size=128_256,
        hidden_size=4_096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
    )
    assert num_parameters(llama) == 8_030_261_248


def test_forward_flops_are_those_the_compiler_counts() -> None:
    """Of the plain attention, whose products are over all keys; elementwise work is the rest."""
    config = DecoderConfig(
        vocab_size=256, hidden_size=128, intermediate_size=384, num_layers=2, num_heads=2
    )
    graphdef, state = nnx.split(create_decoder(config))
    length = 64

    def forward(state: nnx.State, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, state)
        return model.logits(model.hidden(tokens, unroll=True, implementation="xla"))

    tokens = jnp.zeros((1, length), jnp.int32)
    counted = jax.jit(forward).lower(state, tokens).compile().cost_analysis()["flops"]
    closed = flops_per_token(config, length, training=False) * length
    assert closed <= counted < 1.1 * closed


def test_a_window_bounds_the_keys() -> None:
    config = CONFIGS["windowed"]  # window 4 in two of four layers
    per_key = 3 * 4 * config.num_heads * config.head_width
    longer = flops_per_token(config, 40) - flops_per_token(config, 20)
    assert longer == 2 * 20 * per_key
    assert flops_per_token(config, 9) == 3 * flops_per_token(config, 9, training=False)
