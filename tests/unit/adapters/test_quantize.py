"""Quantized weights against a reference in float64, code by code."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from fornax.adapters.quantize import NF4, Blocks, block_size, dequantize, quantize
from fornax.config.errors import ConfigError


def grid(bits):
    return {
        "nf4": NF4.astype(np.float64),
        "int8": np.arange(-127, 128) / 127,
        "int4": np.arange(-7, 8) / 7,
    }[bits]


def reference(kernel, axis, size, bits):
    """Each entry becomes the nearest point of the grid, stretched to its block's largest."""
    moved = np.moveaxis(kernel.astype(np.float64), axis, -1)
    parts = moved.reshape(*moved.shape[:-1], -1, size)
    levels = {"nf4": 1.0, "int8": 127.0, "int4": 7.0}[bits]
    largest = np.abs(parts).max(-1, keepdims=True)
    scale = np.asarray(jnp.asarray(largest / levels, jnp.float32).astype(jnp.bfloat16), np.float64)
    unit = np.divide(parts, scale * levels, out=np.zeros_like(parts), where=scale > 0)
    points = grid(bits)
    nearest = points[np.abs(unit[..., None] - points).argmin(-1)] * scale * levels
    return np.moveaxis(nearest.reshape(moved.shape), -1, axis)


@functools.partial(jax.jit, static_argnums=1)
def there_and_back(kernel, blocks):
    codes, scale = quantize(kernel, blocks)
    return codes, scale, dequantize(codes, scale, blocks)


@pytest.mark.parametrize("bits", ["nf4", "int8", "int4"])
@pytest.mark.parametrize(("shape", "axis"), [((2, 64, 5), -2), ((3, 2, 32, 4), -2), ((16, 6), -2)])
def test_every_entry_is_the_nearest_code(bits, shape, axis):
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=shape).astype(np.float32)
    kernel[0] *= 100  # blocks have scales of their own
    kernel[..., 0] = 0  # a block of zeros stays zeros
    blocks = Blocks(bits, axis, 16, "float32")
    codes, scale, found = there_and_back(kernel, blocks)
    assert codes.nbytes == kernel.size // (1 if bits == "int8" else 2)
    assert scale.dtype == jnp.bfloat16
    assert scale.size == kernel.size // 16
    expected = reference(kernel, axis, 16, bits)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_nf4_values_are_the_quantiles_of_a_normal_distribution():
    """Appendix E of the paper: quantiles of the two halves, zero once, stretched to one."""
    offset = 0.9677083
    upper = scipy.stats.norm.ppf(np.linspace(offset, 0.5, 9)[:-1])
    lower = -scipy.stats.norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
    values = np.sort(np.concatenate([upper, lower, [0.0]]))
    np.testing.assert_allclose(NF4, values / values.max(), atol=1e-6)


def test_blocks_divide_the_axis():
    assert block_size(96, 64, "nf4", "q") == 48
    assert block_size(64, 64, "nf4", "q") == 64
    assert block_size(7, 64, "int8", "q") == 7
    with pytest.raises(ConfigError, match="q has 7 inputs, an odd number"):
        block_size(7, 64, "nf4", "q")
