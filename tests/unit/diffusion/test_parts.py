"""The layers of diffusion models beside NumPy and SciPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import signal, special

from fornax.config.errors import ConfigError
from fornax.diffusion.models.condition import Condition, require
from fornax.diffusion.models.parts import (
    MLP,
    Conv,
    Dense,
    GatedMLP,
    LayerNorm,
    Make,
    RMSNorm,
    timestep_embedding,
)
from fornax.mesh import MeshConfig, make_mesh, use_mesh

RNG = np.random.default_rng(0)


@functools.cache
def make() -> Make:
    return Make(rngs=nnx.Rngs(0), dtype=jnp.float32, compute_dtype=jnp.float32)


def values(param: nnx.Param) -> np.ndarray:
    return np.asarray(param[...], np.float64)


@pytest.mark.parametrize("padding", [None, 0, 2])
def test_a_convolution_is_scipys_cross_correlation(padding):
    conv = Conv(3, 5, 3, stride=2, padding=padding, **make())
    x = RNG.normal(size=(2, 7, 8, 3)).astype(np.float32)
    around = 1 if padding is None else padding
    wide = np.pad(x.astype(np.float64), ((0, 0), (around, around), (around, around), (0, 0)))
    kernel = values(conv.kernel)
    want = np.stack(
        [
            sum(
                np.stack([signal.correlate2d(image[..., c], kernel[:, :, c, n], "valid")])[0]
                for c in range(3)
            )
            for image in wide
            for n in range(5)
        ]
    ).reshape(2, 5, wide.shape[1] - 2, wide.shape[2] - 2)
    want = want.transpose(0, 2, 3, 1)[:, ::2, ::2]
    np.testing.assert_allclose(conv(jnp.asarray(x)), want, atol=1e-5)


def test_norms_have_zero_mean_and_unit_size():
    x = RNG.normal(2, 3, size=(4, 64)).astype(np.float32)
    y = np.asarray(LayerNorm(64, eps=1e-6, scale=False, bias=False)(jnp.asarray(x)))
    np.testing.assert_allclose(y.mean(-1), 0, atol=1e-6)
    np.testing.assert_allclose(y.std(-1), 1, atol=1e-5)
    y = np.asarray(RMSNorm(64, eps=1e-6)(jnp.asarray(x)))
    np.testing.assert_allclose((y**2).mean(-1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("silu", lambda x: x * special.expit(x)),
        ("gelu", lambda x: x * special.ndtr(x)),
        ("gelu_sigmoid", lambda x: x * special.expit(1.702 * x)),
    ],
)
def test_mlps_are_their_formula(name, formula):
    x = RNG.normal(size=(2, 3, 8)).astype(np.float32)
    mlp = MLP(8, 12, 8, activation=name, **make())
    up, down = values(mlp.up.kernel), values(mlp.down.kernel)
    np.testing.assert_allclose(mlp(jnp.asarray(x)), formula(x @ up) @ down, atol=1e-5)
    gated = GatedMLP(8, 12, 8, activation=name, bias=False, **make())
    gate, up, down = (values(one.kernel) for one in (gated.gate, gated.up, gated.down))
    want = (formula(x @ gate) * (x @ up)) @ down
    np.testing.assert_allclose(gated(jnp.asarray(x)), want, atol=1e-5)


def test_the_embedding_tells_neighbouring_times_apart_at_any_dtype():
    times = jnp.asarray([749.0, 750.0, 751.0])
    found = timestep_embedding(times, 9, frequency_shift=1.0)
    angles = np.asarray(times, np.float64)[:, None] * 10_000.0 ** (-np.arange(4) / 3)
    want = np.concatenate([np.cos(angles), np.sin(angles), np.zeros((3, 1))], -1)
    np.testing.assert_allclose(found, want, atol=1e-4)
    assert found.dtype == jnp.float32
    with pytest.raises(ConfigError, match="width of at least 4"):
        timestep_embedding(times, 2, frequency_shift=1.0)


def test_a_projection_on_a_mesh_gives_what_one_device_gives():
    dense = Dense(16, {"heads": 4, "head_dim": 8}, **make())
    x = jnp.asarray(RNG.normal(size=(4, 6, 16)), jnp.float32)
    with use_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
        found = jax.jit(lambda x: dense(x))(x)
    np.testing.assert_allclose(found, dense(x), atol=1e-6)


def test_a_condition_that_would_be_ignored_is_refused():
    text = jnp.zeros((1, 2, 3))
    require(Condition(text_BSD=text), ["text_BSD"], ["text_BSD"], "a network")
    with pytest.raises(ConfigError, match=r"needs pooled_BD.*has text_BSD"):
        require(Condition(text_BSD=text), ["text_BSD", "pooled_BD"], ["pooled_BD"], "a network")
    with pytest.raises(ConfigError, match="does not take text_BSD; it takes nothing"):
        require(Condition(text_BSD=text), [], [], "a network")
