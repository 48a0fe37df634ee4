"""The first divergence is named in model order; tolerances come from noise."""

import math

import numpy as np
import pytest

from fornax.preflight.tolerance import (
    Tolerance,
    allowance,
    compare,
    compare_number,
    measure_noise,
    model_order,
    unit,
)

EXACT = Tolerance(rms=0.0, largest=0.0)
LOOSE = Tolerance(rms=1.0, largest=1.0)


def test_model_order_is_that_of_a_forward_pass():
    paths = [
        "final_norm/scale",
        "layers/mlp/down/kernel",
        "layers/attention/o/kernel",
        "layers/attention/q/kernel",
        "lm_head/kernel",
        "embed/embedding",
    ]
    assert model_order(paths) == [
        "embed/embedding",
        "layers/attention/q/kernel",
        "layers/attention/o/kernel",
        "layers/mlp/down/kernel",
        "final_norm/scale",
        "lm_head/kernel",
    ]


def test_the_first_that_diverges_is_named_with_its_layer():
    want = {"layers/mlp/up/kernel": np.zeros((3, 2)), "embed/embedding": np.zeros(2)}
    got = {
        "layers/mlp/up/kernel": np.array([[0, 0], [0, 0.5], [0, 0]]),
        "embed/embedding": want["embed/embedding"],
    }
    found = compare("gradient", got, want, dict.fromkeys(want, EXACT)).divergence
    assert found is not None
    assert found.what == "gradient of layers/mlp/up/kernel (layer 1)"
    assert (found.difference, found.count, found.of) == (0.5, 1, 2)


def test_one_wrong_element_among_many_is_found():
    """It hides in a root mean square; it does not in the largest difference."""
    want = {"x": np.zeros(10_000)}
    got = {"x": np.where(np.arange(10_000) == 7, 0.1, 0.0)}
    tolerance = Tolerance(rms=0.01, largest=0.02)
    assert compare("gradient", got, want, {"x": tolerance}).divergence is not None


def test_a_small_error_everywhere_is_found():
    want = {"x": np.zeros(100)}
    got = {"x": np.full(100, 0.015)}
    tolerance = Tolerance(rms=0.01, largest=0.02)
    assert compare("gradient", got, want, {"x": tolerance}).divergence is not None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_diverges(bad: float):
    want = {"x": np.zeros(2)}
    assert compare("gradient", {"x": np.array([0, bad])}, want, {"x": LOOSE}).divergence
    assert compare_number("loss", bad, 0.0, LOOSE).divergence


def test_noise_is_what_moving_the_parameters_does():
    """A sum that cancels is noisier than its value; one that does not is not."""
    params = {"x": np.float32([1e4, 1.0])}

    def compute(moved: dict) -> tuple[float, dict]:
        big, small = moved["x"]
        return float(small), {"cancels": np.float32([(big - np.float32(1e4)) + small])}

    noise = measure_noise(compute, params, compute(params), u=unit("bfloat16"), seed=0)
    assert noise.rms["cancels"] > 10 * unit("bfloat16")
    assert noise.loss <= unit("bfloat16")


def test_allowances():
    assert allowance("bfloat16", 10**6) == 3
    assert allowance("float32", 1024) == pytest.approx(3 * math.sqrt(1024 / 10))
