"""Paged attention on TPU: one Pallas kernel that writes a step's keys and values and attends.

The step's tokens are cut at multiples of B and where rows begin. Each piece is an item of the grid,
so an item has one row and one block of queries, which Pallas brings and takes away. Keys and values
stay in main memory: an item fetches D of them at a time, page by page, into one of two buffers,
while the other is computed with (Dao et al. 2022); its last fetch is the next item's first. A row
of the page table comes into scalar memory the same way, an item ahead, so that no table is too
large. New keys and values go from main memory into their pages some items before they are read.

An item of few queries, as in decoding, computes with the rows of its queries alone.

Legend: T tokens of the step, N query heads, K key heads, G = N / K, H head width, L layers,
P pages, S slots of a page, C rows of a slot, R rows (sequences), W pages of a table's row, M items,
B tokens of a block, Q = B G queries of a key head in it, D keys fetched at a time.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fornax.kernels._paged_attention.call import PagedCall, PagedInputs
from fornax.kernels._paged_attention.layout import rows_and_positions, slot_rows
from fornax.kernels.registry import interpreting

__all__ = [
    "LANES",
    "Items",
    "block_tokens",
    "declines",
    "few_queries",
    "paged_head_layout",
    "prepare",
    "tpu",
]

LANES = 128
"""Numbers that a TPU keeps side by side; arrays are filled up to a multiple in their last axis."""
_PACKED = {"float32": 1, "bfloat16": 2}
"""By dtype: how many rows share the 32 bits of a word."""
_BLOCK_QUERIES = 2048
"""Queries of all heads in a block, 128 wide: with their sums, and in float32, they and the buffers
take 12 of the 16 MiB of fast memory that a kernel may use on any TPU."""
_BLOCK_TOKENS = 128
_BUFFER_BYTES = 2**21
"""Of keys and values in one of two buffers."""
_BUFFER_KEYS = 512
_BUFFER_PAGES = 32
_AHEAD = 4
"""Items by which writing is ahead of reading."""
_SUBLANES = 16
_LOWEST = -1e30
_LOG2_E = math.log2(math.e)
_TILE = 256
"""Queries of a key head whose scores are computed at a time."""
_FIELDS = ("block", "row", "token", "count", "position", "write", "write_end")


def _tiles(rows: int, dtype: str) -> bool:
    """Return whether `rows` rows of a slot fill whole tiles of a TPU's memory."""
    words, rest = divmod(rows, _PACKED[dtype])
    return not rest and (words in (1, 2, 4) or words % 8 == 0)


def paged_head_layout(
    width: int, kv_heads: int, dtype: str, *, shared: bool = False
) -> tuple[int, bool]:
    """Return how wide a TPU's cache keeps heads, and whether a value lies beside its key.

    Arrays on a TPU are filled up to 128 lanes. Heads of 64, or 192, fill them with their values.

    Args:
        width: H.
        kv_heads: K on one device.
        dtype: of the cache.
        shared: whether keys are values too.
    """
    whole, half = (-(-width // lanes) * lanes for lanes in (LANES, LANES // 2))
    fills = half < whole and not shared
    joined = fills and dtype in _PACKED and _tiles(kv_heads, dtype)
    return (half, True) if joined else (whole, False)


def declines(call: PagedCall) -> str | None:
    """Say why the TPU kernel cannot run `call`."""
    for dtype in (call.dtype, call.cache_dtype):
        if dtype not in _PACKED:
            return f"it takes float32 and bfloat16, not {dtype}"
    if call.shared:
        return "it reads keys and values apart"
    width = 2 * call.head_dim if call.joined else call.head_dim
    if width % LANES:
        return (
            f"it needs rows of the cache that are multiples of {LANES} wide, not {width}; "
            "heads of width 64 may lie beside their values"
        )
    if not _tiles(call.kv_heads * (1 if call.joined else 2), call.cache_dtype):
        return f"it cannot tile {call.kv_heads} key heads of {call.cache_dtype}"
    if LANES % call.page_size and call.page_size % LANES:
        return f"it takes pages of a power of two of tokens, not {call.page_size}"
    size = jnp.dtype(call.cache_dtype).itemsize
    page_bytes = 2 * call.page_size * call.kv_heads * call.head_dim * size
    if page_bytes > _BUFFER_BYTES:
        return f"it fetches pages of up to {_BUFFER_BYTES:,} bytes a layer, not {page_bytes:,}"
    return None


def block_tokens(tokens: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Return B, the tokens of the step that one reading of the keys serves at most.

    Args:
        tokens: T.
        heads: N.
        kv_heads: K.
        head_dim: H.
    """
    most = _BLOCK_QUERIES // (heads * -(-head_dim // LANES))
    step = _SUBLANES // math.gcd(_SUBLANES, heads // kv_heads)
    return -(-min(_BLOCK_TOKENS, max(1, most), tokens) // step) * step


def few_queries(group: int) -> int:
    """Return how many queries of a key head an item of one token computes with.

    Loads begin at multiples of 16; the queries of any token lie in so many.

    Args:
        group: G.
    """
    if _SUBLANES % group == 0:
        return _SUBLANES
    spread = group if group % _SUBLANES == 0 else group + _SUBLANES - 1
    return -(-spread // _SUBLANES) * _SUBLANES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Items:
    """A step cut into items."""

    count: jax.Array
    """int32: how many there are, M at most."""
    fields: jax.Array
    """int32 [F * (M + ahead)]: block, row of the table, first token in the block, tokens, the
    first one's position, and the tokens of the step [write, write_end) that it writes."""
    table_R1W: jax.Array
    """The page table, its rows filled up to lanes."""


def prepare(inputs: PagedInputs) -> Items:
    """Cut the step's tokens where rows and blocks begin.

    Writes are cut where pages begin: an item writes those whose first token is its own.
    """
    T, N, H = inputs.q_TNH.shape
    (R, W), S = inputs.page_table_RW.shape, inputs.kv_LPSCH.shape[2]
    B = block_tokens(T, N, inputs.kv_heads, H)
    M = min(T, R + -(-T // B) - 1)
    start_R1 = inputs.query_start_R1
    row_T, position_T, valid_T = rows_and_positions(start_R1, inputs.context_lens_R, T)
    token_T = jnp.arange(T, dtype=jnp.int32)
    begins_T = ((token_T == start_R1[row_T]) | (token_T % B == 0)) & valid_T
    begun_T = jnp.cumsum(begins_T, dtype=jnp.int32)
    number_M1 = jnp.arange(1, M + 2, dtype=jnp.int32)
    begin_M1 = jnp.searchsorted(begun_T, number_M1, method="compare_all")
    begin_M1 = jnp.minimum(begin_M1.astype(jnp.int32), start_R1[-1])
    begin_M, end_M = begin_M1[:-1], begin_M1[1:]
    at_M = jnp.minimum(begin_M, T - 1)
    row_M, position_M = row_T[at_M], position_T[at_M]
    count_M, row_end_M = end_M - begin_M, start_R1[row_M + 1]
    to_page_M = jnp.where(begin_M == start_R1[row_M], 0, -position_M % S)
    fields = {
        "block": at_M // B,
        "row": row_M,
        "token": begin_M % B,
        "count": count_M,
        "position": position_M,
        "write": jnp.minimum(begin_M + to_page_M, row_end_M),
        "write_end": jnp.minimum(end_M + -(position_M + count_M) % S, row_end_M),
    }
    found = count_M > 0
    fields_FM = jnp.stack([jnp.where(found, fields[name], 0) for name in _FIELDS])
    return Items(
        count=jnp.sum(found, dtype=jnp.int32),
        fields=jnp.pad(fields_FM, ((0, 0), (0, _AHEAD))).ravel(),
        table_R1W=jnp.pad(inputs.page_table_RW, ((0, 0), (0, -W % LANES)))[:, None],
    )


@dataclasses.dataclass(frozen=True)
class _Plan:
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

    @property
    def keys(self) -> int:
        """D."""
        return self.pages * self.page


def _plan(inputs: PagedInputs, tokens: int) -> _Plan:
    _, _, S, C, H = inputs.kv_LPSCH.shape
    G = inputs.q_TNH.shape[1] // inputs.kv_heads
    page_bytes = S * C * H * inputs.kv_LPSCH.dtype.itemsize
    keys = _BUFFER_KEYS
    if inputs.window is not None:  # of which little is seen beyond
        keys = min(keys, max(_BUFFER_KEYS // 2, -(-inputs.window // LANES) * LANES))
    most = min(keys // S, _BUFFER_PAGES, _BUFFER_BYTES // page_bytes)
    pages = min(most, inputs.page_table_RW.shape[1])
    # Scores are as wide as lanes.
    pages = -(-max(1, pages) * S // LANES) * LANES // S if LANES % S == 0 else max(1, pages)
    return _Plan(
        group=G,
        heads=inputs.kv_heads,
        queries=tokens * G,
        few=min(few_queries(G), tokens * G),
        page=S,
        pages=pages,
        joined=inputs.joined,
        scale=inputs.scale,
        window=inputs.window,
        softcap=inputs.softcap,
        sinks=inputs.sinks_N is not None,
        writes=inputs.new is not None,
    )


def tpu(inputs: PagedInputs) -> Any:
    """Compute attention on one device; with new keys and values, write them first.

    Returns:
        o_TNH, and the cache if the inputs have new keys and values.
    """
    # Imported here: it pulls in Mosaic, which nobody else needs.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    items = inputs.prepared_for("pallas_tpu") or prepare(inputs)
    T, N, H = inputs.q_TNH.shape
    K, kv = inputs.kv_heads, inputs.kv_LPSCH
    _, _, S, C, width = kv.shape
    B = block_tokens(T, N, K, H)
    plan = _plan(inputs, B)
    G, Q, blocks = plan.group, plan.queries, -(-T // B)
    wide = -(-H // LANES) * LANES
    # Strided loads are of that many lanes; what is wider lies apart.
    lanes = width if _PACKED[kv.dtype.name] == C else LANES
    q_TKGH = inputs.q_TNH.reshape(T, K, G, H)
    q_TKGH = jnp.pad(q_TKGH, ((0, blocks * B - T), (0, 0), (0, 0), (0, wide - H)))
    q_KQH = jnp.swapaxes(q_TKGH, 0, 1).reshape(K, blocks * Q, wide)

    scalars = [jnp.stack([inputs.layer, items.count]), items.fields]
    arrays = [items.table_R1W, q_KQH]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    block = pl.BlockSpec((K, Q, wide), lambda m, _, fields, *rest: (0, fields[m], 0))
    in_specs, out_specs = [anywhere, block], [block]
    out_shapes = [jax.ShapeDtypeStruct(q_KQH.shape, inputs.q_TNH.dtype)]
    if inputs.new is not None:
        scalars.append(inputs.new.slots_T)
        arrays.append(slot_rows(inputs.new.k_TKH, inputs.new.v_TKH, kv))
        in_specs.append(anywhere)
        out_specs.append(anywhere)
        out_shapes.append(jax.ShapeDtypeStruct(kv.shape, kv.dtype))
    if inputs.sinks_N is not None:
        scalars.append(inputs.sinks_N.astype(jnp.float32))
    arrays.append(kv)
    in_specs.append(anywhere)
    call = pl.pallas_call(
        functools.partial(_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(jnp.maximum(items.count, 1),),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[
                pltpu.SMEM((2, 1, items.table_R1W.shape[2]), jnp.int32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.VMEM((2, width // lanes, plan.pages, S, C, lanes), kv.dtype),
                pltpu.VMEM((K, Q, LANES), jnp.float32),
                pltpu.VMEM((K, Q, LANES), jnp.float32),
                pltpu.VMEM((K, Q, wide), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((_AHEAD + 1,)),
            ],
        ),
        out_shape=out_shapes,
        input_output_aliases=({} if inputs.new is None else {len(scalars) + len(arrays) - 1: 1}),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True
        ),
        cost_estimate=_most_work(inputs, wide),
        name="ragged_paged_attention",
        interpret=interpreting(),
    )
    o_KQH, *written = call(*scalars, *arrays)
    # Of keys that lie before their values the sums' last lanes are the values'.
    o_KQH = o_KQH[..., wide - H :] if plan.joined else o_KQH
    o_TKGH = jnp.swapaxes(o_KQH.reshape(K, blocks * B, G, H), 0, 1)[:T]
    padding = jnp.arange(T)[:, None, None] >= inputs.query_start_R1[-1]
    o_TNH = jnp.where(padding, 0, o_TKGH.reshape(T, N, H))
    return (o_TNH, *written) if written else o_TNH


def _most_work(inputs: PagedInputs, wide: int) -> Any:
    """What a call costs if every row's context is as long as its table, or the window."""
    from jax.experimental import pallas as pl

    T, N, _ = inputs.q_TNH.shape
    (R, W), kv = inputs.page_table_RW.shape, inputs.kv_LPSCH
    S, C, width = kv.shape[2:]
    context = W * S if inputs.window is None else min(W * S, inputs.window + S)
    slot_bytes = C * width * kv.dtype.itemsize
    moved = 2 * T * N * wide * inputs.q_TNH.dtype.itemsize + min(R, T) * context * slot_bytes
    if inputs.new is not None:
        moved += 2 * T * slot_bytes
    return pl.CostEstimate(
        flops=4 * T * N * wide * context, transcendentals=T * N * context, bytes_accessed=moved
    )


def _kernel(plan: _Plan, counts: Any, fields: Any, *refs: Any) -> None:
    """Compute one item; `refs` are the other scalars, arrays, results and scratch, in order."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    rest = iter(refs)
    slots: Any = next(rest) if plan.writes else None
    sinks = next(rest) if plan.sinks else None
    table_R1W, q = next(rest), next(rest)
    new: Any = next(rest) if plan.writes else None
    cache, o = next(rest), next(rest)
    cache = next(rest) if plan.writes else cache
    tables, turn, pages, highest, total, weighted, fetched, tabled, written = rest

    # jnp's ask which TPU is attached, for the signs.
    div, rem = jax.lax.div, jax.lax.rem
    S, D, G, window = plan.page, plan.keys, plan.group, plan.window
    layer, items = counts[0], counts[1]
    stride = fields.shape[0] // len(_FIELDS)
    m = pl.program_id(0)

    def field(name: str, item: Any) -> Any:
        return fields[_FIELDS.index(name) * stride + item]

    def visible(item: Any) -> tuple[Any, Any]:
        """The positions [first, end) of keys that any query of an item sees."""
        position = field("position", item)
        first = 0 if window is None else jnp.maximum(position - (window - 1), 0)
        return first, position + field("count", item)

    def table_copy(item: Any) -> Any:
        side = rem(item, 2)
        return pltpu.make_async_copy(
            table_R1W.at[field("row", item)], tables.at[side], tabled.at[side]
        )

    def page_copy(item: Any, block: Any, side: Any, index: Any, part: int) -> Any:
        """Of lanes `part` of the page that is number `index` of a block."""
        lanes = pl.ds(part * pages.shape[-1], pages.shape[-1])
        page = tables[rem(item, 2), 0, block * plan.pages + index]
        return pltpu.make_async_copy(
            cache.at[layer, page, :, :, lanes], pages.at[side, part, index], fetched.at[side]
        )

    def needed(item: Any, block: Any) -> tuple[Any, Any, Any]:
        """Which pages of a block an item sees, [low, high), and whether that is all of them."""
        first, end = visible(item)
        low = jnp.maximum(div(first, S) - block * plan.pages, 0)
        high = jnp.minimum(div(end + S - 1, S) - block * plan.pages, plan.pages)
        return low, high, (low == 0) & (high == plan.pages)

    def fetch(item: Any, block: Any, side: Any) -> None:
        low, high, whole = needed(item, block)

        def start(index: Any, _: Any = None) -> None:
            for part in range(pages.shape[1]):
                page_copy(item, block, side, index, part).start()

        @pl.when(whole)
        def _() -> None:
            for index in range(plan.pages):
                start(index)

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            jax.lax.fori_loop(low, high, start, None)

    def await_fetch(item: Any, block: Any, side: Any) -> None:
        low, high, whole = needed(item, block)

        def wait(index: Any, _: Any) -> None:
            for part in range(pages.shape[1]):
                page_copy(item, block, side, index, part).wait()

        @pl.when(whole)
        def _() -> None:
            # As many bytes as all pages.
            pltpu.make_async_copy(pages.at[side], pages.at[side], fetched.at[side]).wait()

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            jax.lax.fori_loop(low, high, wait, None)

    def each_write(item: Any, do: Any) -> None:
        """Tokens up to a page's border, whole pages, and the tokens that are left."""
        begin, end = field("write", item), field("write_end", item)
        mark = written.at[rem(item, _AHEAD + 1)]
        inside = rem(slots[jnp.minimum(begin, slots.shape[0] - 1)], S)
        border = jnp.minimum(begin + jnp.where(inside > 0, S - inside, 0), end)
        whole = div(end - border, S)
        last = border + whole * S

        def token(t: Any, _: Any) -> None:
            slot = slots[t]
            do(pltpu.make_async_copy(new.at[t], cache.at[layer, div(slot, S), rem(slot, S)], mark))

        def page(index: Any, _: Any) -> None:
            t = border + index * S
            do(pltpu.make_async_copy(new.at[pl.ds(t, S)], cache.at[layer, div(slots[t], S)], mark))

        jax.lax.fori_loop(begin, border, token, None)
        if new.shape[0] >= S:  # a step of fewer tokens has no whole page
            jax.lax.fori_loop(0, whole, page, None)
        jax.lax.fori_loop(last, end, token, None)

    def start(copy: Any) -> None:
        copy.start()

    def wait(copy: Any) -> None:
        copy.wait()

    def ready(item: Any) -> None:
        """Wait for what the first fetch of an item needs."""
        table_copy(item).wait()
        if plan.writes:
            each_write(item, wait)

    def first_block(item: Any) -> Any:
        return div(visible(item)[0], D)

    @pl.when(m == 0)
    def _() -> None:
        turn[0] = 0
        table_copy(0).start()
        if plan.writes:
            for item in range(_AHEAD):
                each_write(item, start)
        ready(0)
        fetch(0, first_block(0), 0)

    if plan.writes:
        each_write(m + _AHEAD, start)

    @pl.when(m + 1 < items)
    def _() -> None:
        table_copy(m + 1).start()

    first, end = visible(m)
    token = field("token", m)
    low, high = token * G, (token + field("count", m)) * G
    begin = jnp.minimum(div(low, _SUBLANES) * _SUBLANES, plan.queries - plan.few)
    begin = pl.multiple_of(begin, _SUBLANES)

    def on_queries(do: Any) -> None:
        """Call do(begin, size): with the item's queries where they are few, or with the block's."""
        if plan.few == plan.queries:
            do(0, plan.queries)
            return
        few = high <= begin + plan.few
        pl.when(few)(lambda: do(begin, plan.few))
        pl.when(jnp.logical_not(few))(lambda: do(0, plan.queries))

    def queries(begin: Any, size: int) -> jax.Array:
        return begin + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)

    def clear_sums(begin: Any, size: int) -> None:
        _begin_sums(plan, sinks, queries(begin, size), highest, total, weighted)

    def block(index: Any, _: Any) -> None:
        side = turn[0]
        ends = (index + 1) * D >= end
        follows = m + 1 < items
        pl.when(ends & follows)(lambda: ready(m + 1))

        @pl.when(jnp.logical_not(ends) | follows)
        def _() -> None:
            following = jnp.where(ends, first_block(m + 1), index + 1)
            fetch(jnp.where(ends, m + 1, m), following, 1 - side)

        await_fetch(m, index, side)

        @pl.when((index * D < first) | ((index + 1) * D > end))
        def _() -> None:
            _clear(plan, pages, side, index * D, first, end)

        def add(begin: Any, size: int) -> None:
            key = index * D + jax.lax.broadcasted_iota(jnp.int32, (1, D), 1)

            def seen(low: int, size: int) -> jax.Array:
                position = field("position", m) - token + div(queries(begin + low, size), G)
                mask = key <= position
                return mask if window is None else mask & (key > position - window)

            _add_block(plan, q, begin, size, pages.at[side], seen, (highest, total, weighted))

        on_queries(add)
        turn[0] = 1 - side

    def finish(begin: Any, size: int) -> None:
        query = queries(begin, size)
        own = (query >= low) & (query < high)

        def head(number: Any, _: Any) -> None:
            sums = jnp.sum(total[number, :size], axis=1, keepdims=True)
            found = weighted[number, :size] / jnp.where(sums == 0, 1, sums)
            where = (number, pl.ds(begin, size))
            o[where] = jnp.where(own, found.astype(o.dtype), o[where])

        jax.lax.fori_loop(0, plan.heads, head, None)

    on_queries(clear_sums)
    jax.lax.fori_loop(first_block(m), div(end + D - 1, D), block, None)
    on_queries(finish)


def _begin_sums(
    plan: _Plan, sinks: Any, row: jax.Array, highest: Any, total: Any, weighted: Any
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


def _clear(plan: _Plan, pages: Any, side: Any, position: Any, first: Any, end: Any) -> None:
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


def _add_block(
    plan: _Plan,
    q: Any,
    begin: Any,
    size: int,
    pages: Any,
    seen: Callable[[int, int], jax.Array],
    sums: tuple[Any, Any, Any],
) -> None:
    """Add D keys to the sums of every head's queries [begin, begin + size).

    `seen(low, count)` masks the scores of queries from begin + low on, `sums` are the highest
    scores, the sums of weights by lane and the weighted sums.
    """
    from jax.experimental import pallas as pl

    highest, total, weighted = sums
    dtype = jnp.promote_types(q.dtype, pages.dtype)
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
        if plan.softcap is None:
            scores = scores * (plan.scale * _LOG2_E)
        else:
            scores = jnp.tanh(scores * (plan.scale / plan.softcap)) * (plan.softcap * _LOG2_E)
        scores = jnp.where(seen(low, scores.shape[0]), scores, _LOWEST)
        before = highest[tile]
        now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp2(scores - _repeat(now, scores.shape[1]))
        kept = jnp.exp2(before - now)
        highest[tile] = now
        total[tile] = kept * total[tile] + _fold(weights)
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


def _heads(plan: _Plan, pages: Any, wide: int) -> Iterator[tuple[int, jax.Array, jax.Array]]:
    """Each head with its keys and values of a buffer; Mosaic loads from constant rows only."""
    if not plan.joined:
        for head in range(plan.heads):
            k_DH, v_DH = _rows(plan, pages, head)
            yield head, k_DH, v_DH
        return
    packed = _PACKED[pages.dtype.name]
    for index in range(plan.heads // packed):
        for number, row in enumerate(_rows(plan, pages, index)):
            yield index * packed + number, row[:, :wide], row[:, row.shape[1] - wide :]


def _repeat(x: jax.Array, width: int) -> jax.Array:
    """Return x, which has the same number in each lane, as wide as `width`."""
    return jnp.concatenate([x] * (width // LANES), axis=1)


def _fold(x: jax.Array) -> jax.Array:
    """Return sums as wide as lanes, which take no exchange between lanes."""
    return sum(x[:, lane : lane + LANES] for lane in range(LANES, x.shape[1], LANES)) + x[:, :LANES]


def _rows(plan: _Plan, pages: Any, index: Any) -> list[jax.Array]:
    """The rows of a buffer, D each, that are a head's key and value, or the rows of a few heads.

    Loads take every n-th row of 32 bits. Two rows of bfloat16 share them, and are the upper halves
    of float32 numbers.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    parts, P, S, C, lanes = pages.shape
    packed = _PACKED[pages.dtype.name]
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
    both = load(index)
    halves = (both << 16, both & jnp.uint32(0xFFFF0000))
    return [pltpu.bitcast(half, jnp.float32).astype(jnp.bfloat16) for half in halves]
