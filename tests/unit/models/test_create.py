"""Fresh parameters: drawn as the config says, in the dtype asked for, or only described."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.unit.models.conftest import CONFIGS, tokens_of

from fornax.models import Decoder, DecoderConfig, abstract_decoder, create_decoder

CONFIG = DecoderConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_layers=4,
    num_heads=4,
    initializer_range=0.05,
)


def test_weights_are_a_cut_normal_of_the_deviation_asked_for() -> None:
    model = create_decoder(CONFIG)
    within = {
        "embed": model.embed.embedding,
        "q": model.layers.attention.q.kernel,
        "up": model.layers.mlp.up.kernel,
        "head": model.lm_head.kernel,
    }
    for name, variable in within.items():
        values = np.asarray(variable[...])
        # A normal cut at three deviations has a deviation of 0.9866 of the uncut one.
        assert values.std() == pytest.approx(0.05 * 0.9866, rel=0.01), name
        assert np.abs(values).max() <= 0.05 * 3, name


@pytest.mark.parametrize("shrink", [True, False])
def test_projections_into_the_residual_stream_start_smaller(shrink: bool) -> None:
    model = create_decoder(dataclasses.replace(CONFIG, scale_residual_init=shrink))
    expected = 0.05 * 0.9866 / (np.sqrt(8) if shrink else 1)
    for kernel in (model.layers.attention.o.kernel, model.layers.mlp.down.kernel):
        assert np.asarray(kernel[...]).std() == pytest.approx(expected, rel=0.01)


def test_layers_and_seeds_are_drawn_apart() -> None:
    kernel = np.asarray(create_decoder(CONFIG).layers.mlp.up.kernel[...])
    assert all(np.abs(kernel[0] - other).max() > 0.05 for other in kernel[1:])
    other = np.asarray(create_decoder(CONFIG, seed=1).layers.mlp.up.kernel[...])
    assert np.abs(kernel - other).max() > 0.05


@pytest.mark.parametrize("offset", [False, True])
def test_norms_start_as_one(offset: bool) -> None:
    model = create_decoder(dataclasses.replace(CONFIG, norm_unit_offset=offset))
    x = jax.random.normal(jax.random.key(0), (1, 2, 128)) * 7
    np.testing.assert_allclose(
        jnp.mean(jnp.square(model.final_norm(x)), axis=-1), np.ones((1, 2)), rtol=1e-4
    )


def test_an_abstract_decoder_allocates_nothing_and_has_the_same_shape() -> None:
    huge = dataclasses.replace(CONFIG, hidden_size=2**17, num_layers=500, head_dim=2**15)
    leaves = jax.tree.leaves(nnx.state(abstract_decoder(huge)))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    small, real = abstract_decoder(CONFIG), create_decoder(CONFIG)
    assert jax.tree.map(jnp.shape, nnx.state(small)) == jax.tree.map(jnp.shape, nnx.state(real))


def _hidden_and_logits(model: Decoder, tokens: np.ndarray) -> tuple[jax.Array, jax.Array]:
    x_BTD = model.hidden(tokens)
    return x_BTD, model.logits(x_BTD)


@pytest.mark.slow
def test_parameter_and_compute_dtypes_are_apart() -> None:
    config, tokens = CONFIGS["windowed"], tokens_of(1, 6)
    model = create_decoder(config, dtype=jnp.float32, compute_dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))} == {jnp.dtype("float32")}
    run = nnx.jit(_hidden_and_logits)
    hidden, logits = run(model, tokens)
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    _, exact = run(create_decoder(config), tokens)
    assert np.abs(logits - exact).max() < 0.1 * np.abs(exact).max()


def test_the_constructor_draws_the_same_kind_of_values() -> None:
    model = Decoder(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    kernel = np.asarray(model.layers.mlp.gate.kernel[...]).astype(np.float32)
    assert model.layers.mlp.gate.kernel.dtype == jnp.bfloat16
    assert kernel.std() == pytest.approx(0.05 * 0.9866, rel=0.01)
