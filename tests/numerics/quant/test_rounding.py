"""Codes and scales beside a plain loop in float64, and what XLA makes of the same functions."""

import jax
import ml_dtypes
import numpy as np
import pytest

from fornax.quant import SCHEMES
from fornax.quant.qat import fake_quantize
from fornax.quant.rounding import dequantize, round_matrix, rounded_to, spread
from fornax.quant.schemes import TRAINED, scheme_named

FLOAT32 = np.dtype(np.float32)


def weights(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(4, shape).astype(np.float32)


def plain(cell: np.ndarray, scale: float, bits: int) -> np.ndarray:
    """Nearest of all codes, by trying each; ties are so rare that none is drawn."""
    codes = np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1))
    return codes[np.argmin(np.abs(cell[:, None] - scale * codes), axis=1)]


@pytest.mark.parametrize("name", ["w8a16", "w8a8"])
def test_integers_are_the_nearest_of_the_whole_range(name: str) -> None:
    w, scheme = weights((6, 256)), scheme_named(name)
    codes = round_matrix(w, scheme, FLOAT32)
    size = scheme.group or 256
    for row, start in np.ndindex(6, 256 // size):
        cell = w[row, start * size : (start + 1) * size].astype(np.float64)
        scale = float(codes.grid.scales_PG[row, start])
        assert scale == pytest.approx(np.abs(cell).max() / 127, rel=1e-6)
        found = codes.values_OI[row, start * size : (start + 1) * size]
        np.testing.assert_array_equal(found, plain(cell, scale, 8))


def test_clipping_takes_the_factor_with_the_least_squared_error() -> None:
    w, scheme = weights((5, 256)), scheme_named("w4a16")
    codes = round_matrix(w, scheme, FLOAT32)
    clipped = 0
    for row, group in np.ndindex(5, 2):
        cell = w[row, group * 128 : (group + 1) * 128].astype(np.float64)
        errors = {}
        for factor in np.linspace(1, 0.6, 9):
            scale = np.abs(cell).max() * factor / 7
            errors[factor] = ((cell - scale * plain(cell, scale, 4)) ** 2).sum()
        best = min(errors, key=lambda factor: errors[factor])
        clipped += best < 1
        scale = float(codes.grid.scales_PG[row, group])
        assert scale == pytest.approx(np.abs(cell).max() * best / 7, rel=1e-6)
    assert clipped > 5


@pytest.mark.parametrize(("name", "cell"), [("fp8", (1, 256)), ("fp8-block", (128, 128))])
def test_float8_by_output_and_by_block(name: str, cell: tuple[int, int]) -> None:
    w, scheme = weights((192, 256)), scheme_named(name)
    codes = round_matrix(w, scheme, FLOAT32)
    numbers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    for i, j in np.ndindex(codes.grid.scales_PG.shape):
        at = np.s_[i * cell[0] : (i + 1) * cell[0], j * cell[1] : (j + 1) * cell[1]]
        own, scale = w[at].astype(np.float64).ravel(), float(codes.grid.scales_PG[i, j])
        assert scale == pytest.approx(np.abs(own).max() / 448, rel=1e-6)
        found = codes.values_OI[at].astype(np.float64).ravel()
        nearest = np.abs(own[:, None] / scale - numbers).min(axis=1)
        np.testing.assert_allclose(np.abs(own / scale - found), nearest, rtol=0, atol=2e-5)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest_e2m1(cell: np.ndarray, scale: float) -> np.ndarray:
    numbers = scale * np.concatenate([E2M1, -E2M1])
    return numbers[np.argmin(np.abs(cell[:, None] - numbers), axis=1)]


@pytest.mark.parametrize("name", ["mxfp4a16", "nvfp4a16"])
def test_scales_of_four_bit_floats_are_the_best_of_those_tried(name: str) -> None:
    w, scheme = weights((8, 128)), scheme_named(name)
    codes = round_matrix(w, scheme, FLOAT32)
    scales, zeros = spread(codes.grid, scheme, w.shape)
    found = dequantize(codes.values_OI, scales, zeros).astype(np.float64)
    divisor, size, others = 448 * 6 / np.abs(w).max(), scheme.group or 0, 0
    for row, start in np.ndindex(8, 128 // size):
        cell = w[row, start * size : (start + 1) * size].astype(np.float64)
        if name == "mxfp4a16":
            low = 2.0 ** (np.floor(np.log2(np.abs(cell).max())) - 2)
            tried = [low, 2 * low]
        else:
            whole = np.abs(cell).max() / 6 * divisor * np.linspace(0.6, 1.5, 10)
            tried = np.minimum(whole, 448).astype(ml_dtypes.float8_e4m3fn).astype(float) / divisor
        errors = [((cell - nearest_e2m1(cell, scale)) ** 2).sum() for scale in tried]
        others += int(np.argmin(errors) != (0 if name == "mxfp4a16" else 4))
        own = ((cell - found[row, start * size : (start + 1) * size]) ** 2).sum()
        assert own == pytest.approx(min(errors), rel=1e-5)
    assert others > 1


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("name", SCHEMES)
def test_codes_are_of_the_scales_that_a_file_holds(name: str, dtype: type) -> None:
    """No weight is further off than half a step of the rounded scale, clipping aside."""
    w, scheme = weights((256, 256), seed=1), SCHEMES[name]
    codes = round_matrix(w, scheme, np.dtype(dtype))
    assert codes.grid.scales_PG.dtype == (scheme.stored_scales or dtype)
    scales, zeros = spread(codes.grid, scheme, w.shape)
    off = np.abs(w - dequantize(codes.values_OI, scales, zeros))
    if scheme.type == "int":
        half, points = 2 ** (scheme.bits - 1), np.float32(0) if zeros is None else zeros
        inside = (w >= (-half - points) * scales) & (w <= (half - 1 - points) * scales)
        assert (off <= scales * 0.50001)[inside].all()
        assert inside.mean() > 0.95
    elif scheme.bits == 4:
        size = np.abs(w) / scales
        inside = size <= 6
        assert (off <= np.select([size < 2, size < 4], [0.251, 0.501], 1.001) * scales)[
            inside
        ].all()
        assert inside.mean() > 0.95
    else:
        assert (off <= np.maximum(np.abs(w) / 15.9, scales * 2**-9)).all()


def awkward(dtype: type) -> np.ndarray:
    """Rows of all sizes, on ties between codes, of zeros, of one number, and too small to count."""
    rng = np.random.default_rng(3)
    w = rng.standard_t(3, (160, 256)) * 10.0 ** rng.integers(-32, 30, (160, 1))
    w[:16] = rng.integers(-14, 15, (16, 256)) / 2
    w[16:20], w[20:24], w[24:28] = 0.0, -0.0, 7.0
    w[28:32] *= 1e-40 / np.abs(w[28:32]).max()
    w[32:36, 1:] = 0
    return w.astype(dtype)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("name", TRAINED)
def test_xla_rounds_to_the_same_bits(name: str, dtype: type) -> None:
    w, scheme = awkward(dtype), SCHEMES[name]
    codes = round_matrix(w, scheme, np.dtype(dtype))
    wanted = dequantize(codes.values_OI, *spread(codes.grid, scheme, w.shape)).astype(dtype)
    p, g = scheme.cell(w.shape)
    compiled = jax.jit(lambda w: fake_quantize(w, scheme, np.dtype(dtype), (g, p)).astype(dtype))
    found = np.asarray(compiled(w.T.astype(np.float32)[None]))[0].T
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn]
)
def test_xla_rounds_to_narrow_numbers_as_numpy(dtype: type) -> None:
    """All of the dtype's, those halfway between two, and their neighbours."""
    size = np.dtype(dtype).itemsize
    with np.errstate(invalid="ignore"):  # some are not numbers
        every = np.arange(256**size, dtype=f"u{size}").view(dtype).astype(np.float64)
    every = np.unique(every[np.isfinite(every)])
    middles = ((every[1:] + every[:-1]) / 2).astype(np.float32)
    inf = np.float32(np.inf)
    x = np.concatenate([every, middles, np.nextafter(middles, inf), np.nextafter(middles, -inf)])
    x = x.astype(np.float32)
    x = x[(x == 0) | (np.abs(x) >= np.finfo(np.float32).tiny)]  # smaller ones are 0 to XLA
    found = np.asarray(jax.jit(lambda x: rounded_to(x, np.dtype(dtype)))(x))
    wanted = x.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(rounded_to(x, np.dtype(dtype)), wanted)
