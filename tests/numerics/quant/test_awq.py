"""Scales of AWQ beside a plain search in float64, and those of SmoothQuant."""

from dataclasses import replace

import numpy as np

from fornax.models import DecoderConfig
from fornax.quant.folds import find_folds
from fornax.quant.rounding import dequantize, round_matrix, spread
from fornax.quant.schemes import Scheme, scheme_named
from fornax.quant.statistics import Statistics

FLOAT32 = np.dtype(np.float32)
AWQ = scheme_named("w4a16-awq")
CONFIG = DecoderConfig(vocab_size=8, hidden_size=256, num_layers=1, num_heads=4)


def problem() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Kernels of a gated MLP, and inputs of which a few are forty times as large."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=(512, 256))
    x[:, rng.permutation(256)[:6]] *= 40
    gate, up = (rng.normal(size=(96, 256)).astype(np.float32) for _ in range(2))
    return {
        "mlp_norm/scale": np.ones(256, np.float32),
        "mlp/gate/kernel": gate,
        "mlp/up/kernel": up,
    }, x.astype(np.float32)


def plain_codes(w: np.ndarray, bits: int, size: int) -> np.ndarray:
    """float64 values that asymmetric codes stand for, cell by cell."""
    found = np.zeros(w.shape)
    steps = 2**bits - 1
    for row, group in np.ndindex(w.shape[0], w.shape[1] // size):
        cell = w[row, group * size : (group + 1) * size]
        low, high = min(cell.min(), 0), max(cell.max(), 0)
        scale = (high - low) / steps
        zero = np.clip(np.round(-low / scale), 0, steps)
        codes = np.clip(np.round(cell / scale) + zero, 0, steps)
        found[row, group * size : (group + 1) * size] = (codes - zero) * scale
    return found


def test_zero_points_are_those_of_the_range_with_zero_in_it() -> None:
    w = np.random.default_rng(1).normal(0.4, 1, (6, 256)).astype(np.float32)
    codes = round_matrix(w, replace(AWQ, clip=False), FLOAT32)
    found = dequantize(codes.values_OI, *spread(codes.grid, AWQ, w.shape))
    np.testing.assert_allclose(found, plain_codes(w.astype(np.float64), 4, 128), atol=1e-5)


def test_the_exponent_is_the_best_of_the_grid() -> None:
    parameters, x = problem()
    h = x.T @ x
    schemes: dict[str, Scheme] = dict.fromkeys(["mlp/gate/kernel", "mlp/up/kernel"], AWQ)
    seen = {(path, None): Statistics(len(x), np.abs(x).max(axis=0), h) for path in schemes}
    folds = find_folds(CONFIG, 0, parameters, seen, schemes)
    size = np.sqrt((x.astype(np.float64) ** 2).mean(axis=0))
    errors = {}
    for exponent in np.linspace(0, 1, 21):
        c = size**exponent
        c /= np.sqrt(c.max() * c.min())
        errors[exponent] = sum(
            (((plain_codes(parameters[path] * c, 4, 128) / c - parameters[path]) @ x.T) ** 2).sum()
            for path in schemes
        )
    best = min(errors, key=lambda exponent: errors[exponent])
    assert errors[best] < 0.5 * errors[0.0]
    c = size**best
    c /= np.sqrt(c.max() * c.min())
    np.testing.assert_allclose(folds.columns["mlp/up/kernel", None], c, rtol=1e-5)
    np.testing.assert_allclose(folds.norms["mlp_norm/scale"], 1 / c, rtol=1e-5)


def test_smoothquant_makes_the_greatest_input_and_weight_equal() -> None:
    parameters, x = problem()
    parameters["mlp_norm/scale"] = np.linspace(0.5, 2, 256).astype(np.float32)
    scheme, paths = scheme_named("smoothquant"), ["mlp/gate/kernel", "mlp/up/kernel"]
    most = np.abs(x).max(axis=0)
    seen = {(path, None): Statistics(len(x), most, np.zeros((0, 0))) for path in paths}
    folds = find_folds(CONFIG, 0, parameters, seen, dict.fromkeys(paths, scheme))
    c = folds.columns["mlp/gate/kernel", None]
    np.testing.assert_array_equal(c, folds.columns["mlp/up/kernel", None])
    w = np.max([np.abs(parameters[path]).max(axis=0) for path in paths], axis=0)
    np.testing.assert_allclose(c.astype(np.float64) * w, most / c, rtol=1e-5)
    np.testing.assert_allclose(
        folds.norms["mlp_norm/scale"] * c, parameters["mlp_norm/scale"], rtol=1e-6
    )
