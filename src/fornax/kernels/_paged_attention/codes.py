"""A cache of 8-bit codes: each key and each value of a token has a scale of its own.

A vector's scale is its largest magnitude over the largest code's, so a token's codes and scales
depend on nothing but its own key and value: pages may be shared, copied and computed again.

Legend: T tokens of the step, V vectors of a token: each key head's key and value, or the one that
is both; H head width, L layers, P pages, S slots of a page, C rows of a slot as in the cache.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

__all__ = [
    "Pages",
    "QuantizedPages",
    "cache_has_codes",
    "cache_vector_bytes",
    "empty_pages",
    "encode",
]

_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
"""By dtype of codes: the largest one."""
_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
_SCALE_BYTES = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedPages:
    """Pages of codes, which `paged_attention`, `paged_write` and `copy_pages` take as a cache."""

    codes_LPSCH: jax.Array
    """int8 from -127 to 127, or float8_e4m3fn; in the layout of a cache of floats."""
    scales_LP1X: jax.Array
    """float32, X = V S: what a code of vector v in slot s stands for is code * scale[v S + s]. A
    page's slots lie side by side, in the order in which attention reads them, and fill a TPU's
    lanes; the last axis is divided over devices as the heads are. With an axis of one before it a
    TPU keeps a page's scales in one piece, where it would interleave those of eight pages."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the codes: [L, P, S, C, H]."""
        return self.codes_LPSCH.shape

    @property
    def ndim(self) -> int:
        """Of the codes: 5."""
        return self.codes_LPSCH.ndim

    @property
    def dtype(self) -> np.dtype:
        """Of the codes."""
        return np.dtype(self.codes_LPSCH.dtype)

    def scales_of(self, layer: jax.Array, pages: jax.Array) -> jax.Array:
        """Return the scales in some pages of a layer: [*pages, S, V]."""
        scales = self.scales_LP1X[layer, pages].reshape(*pages.shape, -1, self.shape[2])
        return jnp.swapaxes(scales, -1, -2)


Pages = jax.Array | QuantizedPages
"""A paged cache kv_LPSCH of one group of layers: of floats, or of codes with their scales."""


def cache_has_codes(dtype: DTypeLike) -> bool:
    """Return whether a cache of `dtype` is one of codes with scales."""
    return jnp.dtype(dtype).name in _LARGEST


def cache_vector_bytes(width: int, dtype: DTypeLike) -> int:
    """Return the bytes that a cache of `dtype` takes for one key or value.

    Args:
        width: H.
        dtype: of the cache; int8 and float8_e4m3fn are codes, and come with a float32 scale.
    """
    return width * jnp.dtype(dtype).itemsize + (_SCALE_BYTES if cache_has_codes(dtype) else 0)


def empty_pages(shape: tuple[int, ...], vectors: int, dtype: DTypeLike) -> Pages:
    """Return a cache of zeros.

    Args:
        shape: [L, P, S, C, H].
        vectors: V of a token.
        dtype: floating, or int8; int8 and float8_e4m3fn make pages of codes.
    """
    zeros = jnp.zeros(shape, dtype)
    if not cache_has_codes(dtype):
        return zeros
    layers, pages, slots = shape[:3]
    return QuantizedPages(zeros, jnp.zeros((layers, pages, 1, vectors * slots), jnp.float32))


def encode(x_TVH: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Return each vector's codes [T, V, H] and scale [T, V], float32.

    scale = max |x| * (1 / largest), code = x * (1 / scale), rounded to the nearest, ties to even,
    for largest = 127 (int8) and 448 (float8_e4m3fn); each factor is a float32. A scale below 2^-126
    is 0, and so are its codes. A vector with an element that is not finite has a NaN scale, and
    codes of 0.
    """
    x_TVH = x_TVH.astype(jnp.float32)
    top_TV = jnp.max(jnp.abs(x_TVH), axis=-1)
    scale_TV = top_TV * np.float32(1 / _LARGEST[jnp.dtype(dtype).name])
    scale_TV = jnp.where(scale_TV < _SMALLEST_SCALE, 0, scale_TV)
    # Asked of the numbers: on CPU XLA's maximum may pass over NaN.
    scale_TV = jnp.where(jnp.all(jnp.isfinite(x_TVH), axis=-1), scale_TV, jnp.nan)
    usable_TV = scale_TV > 0
    inverse_TV = 1 / jnp.where(usable_TV, scale_TV, 1)  # XLA makes this of a quotient by itself
    ratio_TVH = jnp.where(usable_TV[..., None], x_TVH * inverse_TV[..., None], 0)
    if jnp.issubdtype(dtype, jnp.integer):
        ratio_TVH = jnp.round(ratio_TVH)
    return ratio_TVH.astype(dtype), scale_TV


def page_specs(kv: Pages, heads: str | tuple[str, ...] | None) -> PartitionSpec | QuantizedPages:
    """Return how a cache divides over the mesh axes that its key heads divide over."""
    rows = PartitionSpec(None, None, None, heads, None)
    if not isinstance(kv, QuantizedPages):
        return rows
    scales = PartitionSpec(None, None, None, heads)
    return jax.tree.unflatten(jax.tree.structure(kv), (rows, scales))
