"""What paged attention on TPU computes with a block of keys in fast memory.

Legend: T tokens of the step, K key heads, G query heads of one, H head width, P pages and S slots
of a buffer, C rows of a slot, Q queries of a key head in a block, D keys fetched at a time.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fornax.kernels._paged_attention.tpu_items import LANES
from fornax.kernels._paged_attention.tpu_scales import row_of

__all__ = ["PACKED", "Plan", "add_block", "begin_sums", "clear"]

PACKED = {"float32": 1, "bfloat16": 2, "int8": 4, "float8_e4m3fn": 4}
"""By dtype: how many rows share the 32 bits of a word."""
_LOWEST = -1e30
_LOG2_E = math.log2(math.e)
_TILE = 256
"""Queries of a key head whose scores are computed at a time."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known of a call before it runs."""

    group: int
    """G."""
    heads: int
    """K."""
    queries: int
    """Q."""
    few: int
    """Queries of a key head in an item of few."""
    page: int
    """S."""
    pages: int
    """Pages fetched at a time."""
    joined: bool
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool
    writes: bool
    codes: bool
    """Whether the cache holds codes with scales."""

    @property
    def keys(self) -> int:
        """D."""
        return self.pages * self.page


def begin_sums(
    plan: Plan, sinks: Any, row: jax.Array, highest: Any, total: Any, weighted: Any
) -> None:
    """Begin with no key, or with the sinks, which have no value."""
    size = row.shape[0]

    def begin(head: Any, _: Any) -> None:
        logit = jnp.full((size, LANES), _LOWEST, jnp.float32)
        if sinks is not None:
            for member in range(plan.group):
                own = jax.lax.rem(row, plan.group) == member
                logit = jnp.where(own, sinks[head * plan.group + member] * _LOG2_E, logit)
        highest[head, :size] = logit
        # Of a sink's weight, which is 1, each lane has a share.
        share = 0.0 if sinks is None else 1 / LANES
        total[head, :size] = jnp.full((size, LANES), share, jnp.float32)
        weighted[head, :size] = jnp.zeros((size, weighted.shape[2]), jnp.float32)

    jax.lax.fori_loop(0, plan.heads, begin, None)


def clear(plan: Plan, pages: Any, side: Any, position: Any, first: Any, end: Any) -> None:
    """Put zeros where a buffer has nothing that the item sees: a weight of 0 silences no NaN."""
    from jax.experimental import pallas as pl

    shape = pages.shape[3:]

    def clear(index: Any, _: Any) -> None:
        begin = position + index * plan.page

        @pl.when((begin < first) | (begin + plan.page > end))
        def _() -> None:
            key = begin + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
            for part in range(pages.shape[1]):
                where = (side, part, index)
                pages[where] = jnp.where((key >= first) & (key < end), pages[where], 0)

    jax.lax.fori_loop(0, plan.pages, clear, None)


def add_block(
    plan: Plan,
    q: Any,
    begin: Any,
    size: int,
    pages: Any,
    seen: Callable[[int, int], jax.Array],
    sums: tuple[Any, Any, Any],
    scales: Any = None,
) -> None:
    """Add D keys to the sums of every head's queries [begin, begin + size).

    `seen(low, count)` masks the scores of queries from begin + low on, `sums` are the highest
    scores, the sums of weights by lane and the weighted sums; `scales` [D / 128, V, 128] are
    those of codes.
    """
    from jax.experimental import pallas as pl

    highest, total, weighted = sums
    dtype = q.dtype if scales is not None else jnp.promote_types(q.dtype, pages.dtype)
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    wide = q.shape[2]
    product = functools.partial(
        jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32
    )

    def scores_of(head: int, low: int, k_DH: jax.Array) -> jax.Array:
        q_QH = q[head, pl.ds(begin + low, min(_TILE, size - low))].astype(dtype)
        return product(q_QH, k_DH.astype(dtype), (((1,), (1,)), ((), ())))

    def add(head: int, low: int, scores: jax.Array, v_DH: jax.Array) -> None:
        tile = (head, pl.ds(low, scores.shape[0]))
        # Powers are of 2, which is what the hardware raises.
        factor: Any = plan.scale * _LOG2_E if plan.softcap is None else plan.scale / plan.softcap
        if scales is not None:
            factor = row_of(scales, 2 * head) * factor
        scores = scores * factor
        if plan.softcap is not None:
            scores = jnp.tanh(scores) * (plan.softcap * _LOG2_E)
        scores = jnp.where(seen(low, scores.shape[0]), scores, _LOWEST)
        before = highest[tile]
        now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp2(scores - _repeat(now, scores.shape[1]))
        kept = jnp.exp2(before - now)
        highest[tile] = now
        total[tile] = kept * total[tile] + _fold(weights)
        if scales is not None:
            weights = weights * row_of(scales, 2 * head + 1)
        more = product(weights.astype(dtype), v_DH.astype(dtype), (((1,), (0,)), ((), ())))
        weighted[tile] = _repeat(kept, wide) * weighted[tile] + more

    # The scores of what comes next are asked for ahead of this one's softmax.
    waiting = None
    for head, k_DH, v_DH in _heads(plan, pages, wide):
        for low in range(0, size, _TILE):
            following = (head, low, scores_of(head, low, k_DH), v_DH)
            if waiting is not None:
                add(*waiting)
            waiting = following
    if waiting is not None:
        add(*waiting)


def _heads(plan: Plan, pages: Any, wide: int) -> Iterator[tuple[int, jax.Array, jax.Array]]:
    """Each head with its keys and values of a buffer; Mosaic loads from constant rows only."""
    own = 1 if plan.joined else 2
    together = max(1, PACKED[pages.dtype.name] // own)
    for index in range(plan.heads // together):
        rows = _rows(plan, pages, index)
        for number in range(together):
            k_DH, v_DH = rows[own * number], rows[own * number + own - 1]
            yield index * together + number, k_DH[:, :wide], v_DH[:, v_DH.shape[1] - wide :]


def _repeat(x: jax.Array, width: int) -> jax.Array:
    """Return x, which has the same number in each lane, as wide as `width`."""
    return jnp.concatenate([x] * (width // LANES), axis=1)


def _fold(x: jax.Array) -> jax.Array:
    """Return sums as wide as lanes, which take no exchange between lanes."""
    return sum(x[:, lane : lane + LANES] for lane in range(LANES, x.shape[1], LANES)) + x[:, :LANES]


def _rows(plan: Plan, pages: Any, index: Any) -> list[jax.Array]:
    """The rows of a buffer, D each, that are a head's key and value, or the rows of a few heads.

    Loads take every n-th row of 32 bits. Two rows of bfloat16 share them, and are the upper halves
    of float32 numbers; or four of codes, which come as bfloat16.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    parts, P, S, C, lanes = pages.shape
    packed = PACKED[pages.dtype.name]
    every = C // packed
    flat = pages.bitcast(jnp.uint32).reshape(parts * P * S * every, lanes)

    def load(row: Any) -> jax.Array:
        if every == 1:
            return flat[...]
        starts = [part * plan.keys * every + row for part in range(parts)]
        found = [flat[pl.ds(start, plan.keys, stride=every)] for start in starts]
        return jnp.concatenate(found, axis=1)

    if packed == 1:
        numbers = (index,) if plan.joined else (2 * index, 2 * index + 1)
        return [pltpu.bitcast(load(number), jnp.float32) for number in numbers]
    words = load(index)
    if packed == 2:
        halves = (words << 16, words & jnp.uint32(0xFFFF0000))
        return [pltpu.bitcast(half, jnp.float32).astype(jnp.bfloat16) for half in halves]
    widen = _widen_int8 if pages.dtype == jnp.int8 else _widen_e4m3
    words = pltpu.bitcast(words, jnp.int32)
    return [widen(words, 8 * byte).astype(jnp.bfloat16) for byte in range(packed)]


def _widen_int8(words: jax.Array, low: int) -> jax.Array:
    """Return the int8 whose lowest bit is number `low` of a word, float32."""
    return ((words << (24 - low)) >> 24).astype(jnp.float32)


def _widen_e4m3(words: jax.Array, low: int) -> jax.Array:
    """Return the finite e4m3 whose lowest bit is number `low` of a word, float32.

    Bits of exponent and mantissa go where float32 has them, with its bias: y. That is the number,
    except where the exponent is 0: then y = (1 + m / 8) 2^-7, the number m 2^-9 = 2 y - 2^-6,
    which is less than y there and nowhere else.
    """
    from jax.experimental.pallas import tpu as pltpu

    moved = words << (20 - low) if low <= 20 else words >> (low - 20)
    y = pltpu.bitcast((moved & 0x07F00000) + (120 << 23), jnp.float32)
    size = pltpu.bitcast(jnp.minimum(y, y + y - 2.0**-6), jnp.int32)
    sign = (words << (24 - low)) & jnp.int32(-(2**31))
    return pltpu.bitcast(size | sign, jnp.float32)
