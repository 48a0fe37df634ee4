"""Inputs of products, rounded: beside a plain loop in float64 that tries every number."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fornax.quant.inputs import RoundedInputs
from fornax.quant.schemes import SCHEMES

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FLOAT8 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
FLOAT8 = np.unique(FLOAT8[np.isfinite(FLOAT8)])
NAMES = ["w8a8", "w4a4", "fp8", "fp8-block", "mxfp4", "nvfp4"]
DIVISORS = (30.0, 200.0)
"""Of two experts."""


def plain(x: np.ndarray, name: str, divisor: float) -> np.ndarray:
    """One group of a row."""
    most = np.abs(x).max()
    if name == "w8a8":
        scale, numbers = most / 127, np.arange(-128, 128)
    elif name == "w4a4":
        scale, numbers = most / 7, np.arange(-8, 8)
    elif name.startswith("fp8"):
        scale, numbers = most / 448, FLOAT8
    else:
        numbers = np.concatenate([E2M1, -E2M1])
        if name == "mxfp4":
            power = np.floor(np.log2(most))
            scale = 2.0 ** (power - 2 + (most / 2**power >= 1.75))
        else:
            scale = min(divisor * most / 6, 448)
            scale = float(np.float32(scale).astype(ml_dtypes.float8_e4m3fn)) / divisor
    return scale * numbers[np.argmin(np.abs(x[:, None] / scale - numbers), axis=1)]


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_the_nearest_numbers(name: str) -> None:
    rule = SCHEMES[name].inputs
    assert rule is not None
    x = np.random.default_rng(2).standard_t(3, (12, 256)).astype(np.float32)
    experts = np.arange(12) % 2
    divisors = jnp.array(DIVISORS) if rule.scales == "e4m3" else None
    rounded = RoundedInputs(rule=rule, divisor_E=divisors)(jnp.asarray(x), jnp.asarray(experts))
    size = rule.group or 256
    for row, start in np.ndindex(12, 256 // size):
        at = np.s_[row, start * size : (start + 1) * size]
        wanted = plain(x[at].astype(np.float64), name, DIVISORS[row % 2])
        np.testing.assert_allclose(rounded[at], wanted, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["w8a8", "mxfp4", "nvfp4"])
def test_rows_of_zeros_stay_zeros(name: str) -> None:
    rule = SCHEMES[name].inputs
    assert rule is not None
    divisors = jnp.ones(1) if rule.scales == "e4m3" else None
    rounded = RoundedInputs(rule=rule, divisor_E=divisors)(jnp.zeros((2, 64), jnp.bfloat16))
    assert rounded.dtype == jnp.bfloat16
    assert not np.asarray(rounded).any()
