"""Activations beside their formulas in float64: every digit, in the tails too."""

import jax
import numpy as np

from fornax.kernels import ACTIVATIONS


def test_gelu_tanh_keeps_its_digits_in_the_tails() -> None:
    x = np.linspace(-6, 6, 4001).astype(np.float32)
    x64 = x.astype(np.float64)
    u = np.sqrt(8 / np.pi) * (x64 + 0.044715 * x64**3)
    sigmoid = 1 / (1 + np.exp(-u))
    gelu = jax.jit(ACTIVATIONS["gelu_tanh"])
    np.testing.assert_allclose(np.asarray(gelu(x)), x64 * sigmoid, rtol=1e-5)
    slope = jax.jit(jax.vmap(jax.grad(ACTIVATIONS["gelu_tanh"])))(x)
    du = np.sqrt(8 / np.pi) * (1 + 3 * 0.044715 * x64**2)
    expected = sigmoid * (1 + x64 * (1 - sigmoid) * du)
    np.testing.assert_allclose(np.asarray(slope), expected, rtol=1e-5, atol=1e-6)


def test_gelu_tanh_is_that_of_jax_where_nothing_cancels() -> None:
    x = np.linspace(-2, 6, 801).astype(np.float32)
    theirs = jax.nn.gelu(x, approximate=True)
    np.testing.assert_allclose(np.asarray(ACTIVATIONS["gelu_tanh"](x)), theirs, rtol=1e-5)
