"""Scales of codes in paged attention on TPU: as the kernel writes them, and as it reads them.

A page's scales lie vector by vector, so that one copy brings them; attention needs those of a
vector for all keys that were fetched.

Legend: T tokens of the step, V vectors of a token, S slots of a page, X = V S, P pages of a buffer,
D = P S keys in it, J = D / 128.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fornax.kernels._paged_attention.codes import QuantizedPages
from fornax.kernels._paged_attention.tpu_items import LANES

__all__ = ["buffer_pages", "by_vector", "row_of", "written_scales"]


def written_scales(
    kv: QuantizedPages,
    layer: jax.Array,
    slots_T: jax.Array,
    scales_TV: jax.Array,
    row_T2: jax.Array,
) -> jax.Array:
    """Return the scales of each token's page after the step, [T, 1, X].

    Args:
        kv: the cache before it.
        layer: int32 scalar.
        slots_T: int32, page * S + slot.
        scales_TV: float32, of the tokens' own vectors.
        row_T2: int32, where the tokens of each token's row begin and end.
    """
    S, T = kv.shape[2], slots_T.shape[0]
    token_T1 = jnp.arange(T, dtype=jnp.int32)[:, None]
    slot_X = jnp.arange(scales_TV.shape[1] * S, dtype=jnp.int32) % S
    writer_TX = token_T1 + slot_X - slots_T[:, None] % S
    new_TX = kv.scales_LP1X[layer, slots_T // S, 0]
    inside_TX = (writer_TX >= row_T2[:, :1]) & (writer_TX < row_T2[:, 1:])
    away_TX = jnp.where(inside_TX, writer_TX - token_T1, S)
    # One shift for each distance between tokens of a page: TPUs gather rows one by one.
    most = min(S, T) - 1
    near_TX = jnp.pad(jnp.repeat(scales_TV, S, axis=1), ((most, most), (0, 0)))
    for away in range(-most, most + 1):
        shifted_TX = near_TX[most + away : most + away + T]
        new_TX = jnp.where(away_TX == away, shifted_TX, new_TX)
    return new_TX[:, None]


def buffer_pages(pages: int) -> int:
    """Return how many pages of scales a buffer has, whole tiles of 8 rows, for `pages` fetched."""
    return -(-pages // 8) * 8


def by_vector(page: int, pages: Any, seen: Any, scales: Any) -> None:
    """Put the scales of fetched pages in the order of keys.

    Args:
        page: S.
        pages: reference to float32 [P, 1, X], P a multiple of 8 and of 128 / S.
        seen: seen(j) says whether keys 128 j to 128 j + 127 are seen, bool [1, 128]; others get 0.
        scales: reference to float32 [J, V, 128], which is filled.
    """
    from jax.experimental import pallas as pl

    P, _, X = pages.shape
    J, V, _ = scales.shape
    chunks = X // LANES
    flat = pages.reshape(P * chunks, LANES)
    if page >= LANES:
        parts = page // LANES
        for j in range(J):
            number, part = divmod(j, parts)
            start = number * chunks + part
            found = flat[pl.ds(start, V, stride=parts)] if parts > 1 else flat[pl.ds(start, V)]
            scales[j] = jnp.where(seen(j), found, 0)
        return
    side = LANES // page
    for chunk in range(chunks):
        every = flat[pl.ds(chunk, P, stride=chunks)] if chunks > 1 else flat[...]
        turned = _transpose_blocks(every, page)
        for j in range(J):
            own = turned[j * side : (j + 1) * side]
            scales[j, chunk * side : (chunk + 1) * side] = jnp.where(seen(j), own, 0)


def _transpose_blocks(x: jax.Array, width: int) -> jax.Array:
    """Transpose each square of 128 / width rows, whose elements are `width` lanes: one bit of the
    row's number is exchanged with one of the element's at a time."""
    from jax.experimental.pallas import tpu as pltpu

    rows = x.shape[0]
    row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    element = jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, x.shape, 1), width)
    bit = 1
    while bit * width < LANES:
        up = pltpu.roll(pltpu.roll(x, rows - bit, 0), bit * width, 1)
        down = pltpu.roll(pltpu.roll(x, bit, 0), LANES - bit * width, 1)
        of_row, of_element = row & bit, element & bit
        x = jnp.where(of_row == of_element, x, jnp.where(of_row < of_element, up, down))
        bit *= 2
    return x


def row_of(scales: Any, vector: int) -> jax.Array:
    """Return the scales of a vector for all keys, [1, D], from what `by_vector` filled."""
    return jnp.concatenate([scales[j, vector : vector + 1] for j in range(scales.shape[0])], axis=1)
