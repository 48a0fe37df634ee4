"""GPTQ beside a plain loop in float64 that updates the inverse itself, and beside rounding."""

import numpy as np
import pytest

from fornax.quant.gptq import DAMPING, gptq
from fornax.quant.rounding import Codes, dequantize, find_grid, round_matrix, spread
from fornax.quant.schemes import SCHEMES, Scheme

GPTQ = [scheme for scheme in SCHEMES.values() if scheme.method == "gptq"]
FLOAT32 = np.dtype(np.float32)


def problem(outputs: int, inputs: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights, and rows whose inputs differ in size and are correlated."""
    rng = np.random.default_rng(3)
    mixing = rng.normal(size=(inputs, inputs)) / inputs**0.5 + np.eye(inputs)
    x = rng.normal(size=(rows, inputs)) @ mixing * np.exp(rng.normal(size=inputs))
    return rng.standard_t(4, (outputs, inputs)).astype(np.float32), x.astype(np.float32)


def plain(w: np.ndarray, h: np.ndarray, scheme: Scheme) -> np.ndarray:
    """Optimal brain surgeon, one input after the other: rows and columns of the inverse go as
    inputs are fixed (Frantar and Alistarh 2022, equation 3)."""
    scales, _ = spread(find_grid(w, scheme, FLOAT32, diagonal(h)), scheme, w.shape)
    rest, codes = w.astype(np.float64), np.zeros(w.shape, np.int64)
    inverse = np.linalg.inv(h + np.diag(diagonal(h) - np.diag(h)))
    half = 2 ** (scheme.bits - 1)
    for i in np.argsort(-np.diag(h), kind="stable"):
        scale = scales[:, i].astype(np.float64)
        codes[:, i] = np.clip(np.round(rest[:, i] / scale), -half, half - 1)
        error = rest[:, i] - codes[:, i] * scale
        rest -= np.outer(error / inverse[i, i], inverse[i])
        rest[:, i] = codes[:, i] * scale
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return codes


def diagonal(h: np.ndarray) -> np.ndarray:
    return np.diag(h) + DAMPING * np.diag(h).mean()


def output_error(w: np.ndarray, codes: Codes, scheme: Scheme, x: np.ndarray) -> float:
    found = dequantize(codes.values_OI, *spread(codes.grid, scheme, w.shape))
    return float((((w - found).astype(np.float64) @ x.T) ** 2).sum())


@pytest.mark.parametrize("scheme", GPTQ, ids=lambda scheme: scheme.name)
def test_codes_are_those_of_a_plain_loop(scheme: Scheme) -> None:
    w, x = problem(12, 384, 640)
    h = x.astype(np.float64).T @ x
    found = gptq(w, h.astype(np.float32), scheme, FLOAT32)
    np.testing.assert_array_equal(found.values_OI, plain(w, h, scheme))


@pytest.mark.parametrize("scheme", GPTQ, ids=lambda scheme: scheme.name)
def test_outputs_have_less_error_than_with_rounding(scheme: Scheme) -> None:
    w, x = problem(64, 256, 1024)
    h = x.T @ x
    nearest = round_matrix(w, scheme, FLOAT32)
    found = gptq(w, h, scheme, FLOAT32)
    assert output_error(w, found, scheme, x) < 0.5 * output_error(w, nearest, scheme, x)


def test_inputs_that_were_never_seen_are_rounded_to_the_nearest() -> None:
    (scheme, *_), (w, x) = GPTQ, problem(8, 256, 512)
    x[:, 7] = 0
    found = gptq(w, x.T @ x, scheme, FLOAT32)
    scale = found.grid.scales_PG[:, 0]
    np.testing.assert_array_equal(found.values_OI[:, 7], np.clip(np.round(w[:, 7] / scale), -8, 7))
    nothing = gptq(w, np.zeros((256, 256), np.float32), scheme, FLOAT32)
    np.testing.assert_array_equal(nothing.values_OI, round_matrix(w, scheme, FLOAT32).values_OI)
