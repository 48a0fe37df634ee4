"""Rotary embeddings: what rotation preserves, and where each scaling leaves or divides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax.kernels import rotary_embedding, target_platform
from fornax.models import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)
from fornax.models.rope import Rotation, attention_factor, inverse_frequencies
from fornax.models.rope_config import RopeScaling

WIDTH, LIMIT = 16, 64


def _frequencies(scaling: RopeScaling | None, longest: int = 1) -> np.ndarray:
    rope = RopeConfig(theta=10_000.0, scaling=scaling)
    return np.asarray(inverse_frequencies(rope, WIDTH, LIMIT, jnp.int32(longest)))


BASE = 10_000.0 ** (-np.arange(0, WIDTH, 2) / WIDTH)


def _rotation(positions: list[int], *, interleaved: bool = False) -> Rotation:
    angles = jnp.array([positions], jnp.float32)[..., None] * BASE
    return Rotation(jnp.cos(angles), jnp.sin(angles), interleaved)


def test_scores_depend_on_distance_only() -> None:
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 3, WIDTH))

    def score(at_q: int, at_k: int) -> jax.Array:
        return jnp.sum(
            rotary_embedding(q, *_rotation([at_q])) * rotary_embedding(k, *_rotation([at_k])), -1
        )

    np.testing.assert_allclose(score(9, 4), score(35, 30), atol=1e-4)
    assert np.abs(score(9, 4) - score(9, 5)).max() > 1e-2


def test_rotation_keeps_lengths_and_what_it_does_not_rotate() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, WIDTH + 6))
    y = rotary_embedding(x, *_rotation([0, 1, 7, 40]))
    np.testing.assert_array_equal(y[..., WIDTH:], x[..., WIDTH:])
    np.testing.assert_allclose(y[:, 0], x[:, 0], atol=1e-6)
    np.testing.assert_allclose(jnp.linalg.norm(y, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)


def test_interleaved_pairs_are_halves_in_another_order() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 2, 3, WIDTH + 4))
    halves = jnp.concatenate([x[..., :WIDTH:2], x[..., 1:WIDTH:2], x[..., WIDTH:]], axis=-1)
    y = rotary_embedding(x, *_rotation([3, 8], interleaved=True))
    np.testing.assert_array_equal(y, rotary_embedding(halves, *_rotation([3, 8])))


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_gradient_is_that_of_the_rotations_matrix(interleaved: bool) -> None:
    x, dy = jax.random.normal(jax.random.key(0), (2, 2, 3, 2, WIDTH + 4))
    rotation = _rotation([3, 8, 900], interleaved=interleaved)
    rotation = rotation._replace(
        cos_BTr=jnp.tile(rotation.cos_BTr, (2, 1, 1)), sin_BTr=jnp.tile(rotation.sin_BTr, (2, 1, 1))
    )
    found = jax.vjp(lambda x: rotary_embedding(x, *rotation), x)[1](dy)[0]
    # Linear: the rows of its matrix are what it makes of the axes.
    axes = jnp.broadcast_to(jnp.eye(WIDTH + 4)[:, None, None, None], (WIDTH + 4, *x.shape))
    rows = np.asarray(jax.vmap(lambda e: rotary_embedding(e, *rotation))(axes), np.float64)
    np.testing.assert_allclose(found, np.einsum("ibtnh,btnh->btni", rows, dy), atol=1e-6)
    half = jax.vjp(lambda x: rotary_embedding(x, *rotation), x.astype(jnp.bfloat16))[1]
    assert half(dy.astype(jnp.bfloat16))[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("rest", [0, 6])
def test_a_tpu_rotates_by_a_product_with_the_same_results(rest: int) -> None:
    x, dy = jax.random.normal(jax.random.key(0), (2, 1, 4, 3, WIDTH + rest), jnp.bfloat16)

    def run() -> tuple[jax.Array, ...]:
        y, back = jax.vjp(lambda x: rotary_embedding(x, *_rotation([0, 3, 8, 900])), x)
        return y, *back(dy)

    plain = run()
    with target_platform("tpu"):
        assert "dot_general" in str(jax.make_jaxpr(run)())
        found = run()
    for a, b in zip(found, plain, strict=True):  # to the last bit of a bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=2**-7)


def test_half_precision_is_rotated_in_float32() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 1, 2, WIDTH)).astype(jnp.bfloat16)
    y = rotary_embedding(x, *_rotation([1000]))
    exact = rotary_embedding(x.astype(jnp.float32), *_rotation([1000]))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))


def test_linear_divides_all_frequencies() -> None:
    np.testing.assert_allclose(_frequencies(LinearScaling(factor=4)), BASE / 4, rtol=1e-6)


def test_dynamic_begins_beyond_the_limit() -> None:
    scaling = DynamicNTKScaling(factor=2)
    np.testing.assert_allclose(_frequencies(scaling, LIMIT), BASE, rtol=1e-6)
    grown = _frequencies(scaling, 2 * LIMIT)
    np.testing.assert_allclose(grown[0], 1.0)
    # The lowest frequency is divided by exactly factor * length / limit - (factor - 1) = 3.
    np.testing.assert_allclose(grown[-1], BASE[-1] / 3, rtol=1e-5)


def test_longrope_takes_its_longer_set_beyond_the_original_length() -> None:
    short, long = tuple(np.arange(1.0, 9.0)), tuple(np.arange(11.0, 19.0))
    scaling = LongRopeScaling(
        short_factor=short, long_factor=long, original_max_position_embeddings=16
    )
    np.testing.assert_allclose(_frequencies(scaling, 16), BASE / short, rtol=1e-6)
    np.testing.assert_allclose(_frequencies(scaling, 17), BASE / long, rtol=1e-6)
    expected = np.sqrt(1 + np.log(LIMIT / 16) / np.log(16))
    assert attention_factor(RopeConfig(scaling=scaling), LIMIT) == pytest.approx(expected)


def test_llama3_keeps_high_and_divides_low() -> None:
    scaling = Llama3Scaling(
        factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=256
    )
    found, wavelength = _frequencies(scaling), 2 * np.pi / BASE
    high, low = wavelength < 256 / 4, wavelength > 256
    np.testing.assert_allclose(found[high], BASE[high], rtol=1e-6)
    np.testing.assert_allclose(found[low], BASE[low] / 8, rtol=1e-6)
    between = ~high & ~low
    assert between.any()
    assert ((found < BASE) & (found > BASE / 8))[between].all()


def test_yarn_keeps_fast_and_divides_slow() -> None:
    scaling = YarnScaling(factor=4, original_max_position_embeddings=1024)
    found, turns = _frequencies(scaling), 1024 * BASE / (2 * np.pi)
    np.testing.assert_allclose(found[turns > 64], BASE[turns > 64], rtol=1e-6)
    np.testing.assert_allclose(found[turns < 0.5], BASE[turns < 0.5] / 4, rtol=1e-6)
    assert attention_factor(RopeConfig(scaling=scaling), LIMIT) == pytest.approx(
        0.1 * np.log(4) + 1
    )
