"""Caches of 8-bit codes in numpy: the formula that every implementation is held against."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fornax import kernels

__all__ = ["DTYPES", "dequantized", "encoded", "pages_of"]

DTYPES: dict[str, tuple[Any, float]] = {
    "int8": (np.int8, 127.0),
    "fp8": (ml_dtypes.float8_e4m3fn, 448.0),
}
"""By the engine's name: the dtype of codes, and the largest."""


def encoded(x: np.ndarray, codes: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes of vectors [..., H], and their scales [...]."""
    dtype, largest = DTYPES[codes]
    x = x.astype(np.float32)
    found, scales = np.zeros(x.shape, dtype), np.zeros(x.shape[:-1], np.float32)
    for at in np.ndindex(scales.shape):
        scale = np.abs(x[at]).max() * np.float32(1 / largest)
        if not np.isfinite(x[at]).all():
            scales[at] = np.nan
        elif scale >= np.finfo(np.float32).tiny:
            scales[at] = scale
            ratio = x[at] * (1 / scale)
            found[at] = (np.rint(ratio) if codes == "int8" else ratio).astype(dtype)
    return found, scales


def dequantized(x: np.ndarray, codes: str) -> np.ndarray:
    """What a cache of codes makes of vectors [..., H], in float64."""
    found, scales = encoded(x, codes)
    return found.astype(np.float64) * scales[..., None].astype(np.float64)


def pages_of(kv_LPSCH: np.ndarray, dtype: Any, *, joined: bool = False) -> kernels.Pages:
    """A cache of `dtype`, or of codes by the engine's name; `joined`: values beside their keys."""
    shape = kv_LPSCH.shape
    rows = (*shape[:3], shape[3] // 2, 2 * shape[4]) if joined else shape
    if dtype not in DTYPES:
        return jnp.asarray(kv_LPSCH, dtype).reshape(rows)
    found, scales = encoded(kv_LPSCH, dtype)
    scales_LP1X = np.swapaxes(scales, 2, 3).reshape(*shape[:2], 1, -1)
    return kernels.QuantizedPages(*jax.tree.map(jnp.asarray, (found.reshape(rows), scales_LP1X)))
