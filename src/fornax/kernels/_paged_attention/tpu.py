"""Paged attention on TPU: one Pallas kernel that writes a step's keys and values and attends.

The step's tokens are cut at multiples of B and where rows begin. Each piece is an item of the grid,
so an item has one row and one block of queries, which Pallas brings and takes away. Keys and values
stay in main memory: an item fetches D of them at a time, page by page, into one of two buffers,
while the other is computed with (Dao et al. 2022); its last fetch is the next item's first. A row
of the page table comes into scalar memory the same way, an item ahead, so that no table is too
large. New keys and values go from main memory into their pages some items before they are read.

An item of few queries, as in decoding, computes with the rows of its queries alone.

Of a cache of codes a page's scales come by a copy of their own. Scores are multiplied by the keys',
weights by the values'; a token is written with the scales of its whole page.

Legend: T tokens of the step, N query heads, K key heads, G = N / K, H head width, L layers,
P pages, S slots of a page, C rows of a slot, R rows (sequences), W pages of a table's row, M items,
B tokens of a block, Q = B G queries of a key head in it, D keys fetched at a time.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fornax.kernels._paged_attention.call import NewTokens, PagedCall, PagedInputs
from fornax.kernels._paged_attention.codes import Pages, QuantizedPages, cache_vector_bytes
from fornax.kernels._paged_attention.layout import slot_codes, slot_rows
from fornax.kernels._paged_attention.tpu_block import PACKED, Plan, add_block, begin_sums, clear
from fornax.kernels._paged_attention.tpu_items import (
    AHEAD,
    FIELDS,
    LANES,
    SUBLANES,
    block_tokens,
    few_queries,
    prepare,
)
from fornax.kernels._paged_attention.tpu_scales import buffer_pages, by_vector, written_scales
from fornax.kernels.registry import interpreting

__all__ = ["declines", "paged_head_layout", "tpu"]

_BUFFER_BYTES = 2**21
"""Of keys and values in one of two buffers."""
_BUFFER_KEYS = 512
_BUFFER_PAGES = 32


def _tiles(rows: int, dtype: str) -> bool:
    """Return whether `rows` rows of a slot fill whole tiles of a TPU's memory."""
    words, rest = divmod(rows, PACKED[dtype])
    return not rest and (words in (1, 2, 4) or words % 8 == 0)


def paged_head_layout(
    width: int, kv_heads: int, dtype: str, *, shared: bool = False
) -> tuple[int, bool]:
    """Return how wide a TPU's cache keeps heads, and whether a value is beside its key.

    Arrays on a TPU are filled up to 128 lanes. Heads of 64, or 192, fill them with their values.

    Args:
        width: H.
        kv_heads: K on one device.
        dtype: of the cache; one that the kernel does not take may lie as fills lanes best.
        shared: whether keys are values too.
    """
    whole, half = (-(-width // lanes) * lanes for lanes in (LANES, LANES // 2))
    fills = half < whole and not shared
    taken = dtype in PACKED and (_tiles(kv_heads, dtype) or _tiles(2 * kv_heads, dtype))
    joined = fills and (not taken or _tiles(kv_heads, dtype))
    return (half, True) if joined else (whole, False)


def declines(call: PagedCall) -> str | None:
    """Say why the TPU kernel cannot run `call`."""
    for dtype in (call.dtype, *([] if call.scaled else [call.cache_dtype])):
        if dtype not in ("float32", "bfloat16"):
            return f"it takes float32 and bfloat16, or codes with scales, not {dtype}"
    if call.shared:
        return "it reads keys and values apart"
    width = 2 * call.head_dim if call.joined else call.head_dim
    if width % LANES:
        return (
            f"it needs rows of the cache that are multiples of {LANES} wide, not {width}; "
            "heads of width 64 may be beside their values"
        )
    if not _tiles(call.kv_heads * (1 if call.joined else 2), call.cache_dtype):
        return f"it cannot tile {call.kv_heads} key heads of {call.cache_dtype}"
    if LANES % call.page_size and call.page_size % LANES:
        return f"it takes pages of a power of two of tokens, not {call.page_size}"
    scales = 2 * call.kv_heads * call.page_size
    if call.scaled and scales % LANES:
        return f"it needs scales of a page that are a multiple of {LANES}, not {scales}"
    size = jnp.dtype(call.cache_dtype).itemsize
    page_bytes = 2 * call.page_size * call.kv_heads * call.head_dim * size
    if page_bytes > _BUFFER_BYTES:
        return f"it fetches pages of up to {_BUFFER_BYTES:,} bytes a layer, not {page_bytes:,}"
    return None


def _plan(inputs: PagedInputs, tokens: int) -> Plan:
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
    return Plan(
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
        codes=isinstance(inputs.kv_LPSCH, QuantizedPages),
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
    caches = [kv.codes_LPSCH, kv.scales_LP1X] if isinstance(kv, QuantizedPages) else [kv]
    B = block_tokens(T, N, K, H)
    plan = _plan(inputs, B)
    G, Q, blocks = plan.group, plan.queries, -(-T // B)
    wide = -(-H // LANES) * LANES
    # Strided loads are of that many lanes; what is wider lies apart.
    lanes = width if PACKED[kv.dtype.name] == C else LANES
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
        arrays += _new_slots(inputs.new, kv, inputs.layer, items.row_T2)
        in_specs += [anywhere] * len(caches)
        out_specs += [anywhere] * len(caches)
        out_shapes += [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches]
    if inputs.sinks_N is not None:
        scalars.append(inputs.sinks_N.astype(jnp.float32))
    first = len(scalars) + len(arrays)
    arrays += caches
    in_specs += [anywhere] * len(caches)
    scratch = [
        pltpu.SMEM((2, 1, items.table_R1W.shape[2]), jnp.int32),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.VMEM((2, width // lanes, plan.pages, S, C, lanes), kv.dtype),
        pltpu.VMEM((K, Q, LANES), jnp.float32),
        pltpu.VMEM((K, Q, LANES), jnp.float32),
        pltpu.VMEM((K, Q, wide), jnp.float32),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((AHEAD + 1,)),
    ]
    if plan.codes:
        scratch += [
            pltpu.VMEM((2, buffer_pages(plan.pages), 1, 2 * K * S), jnp.float32),
            pltpu.VMEM((plan.keys // LANES, 2 * K, LANES), jnp.float32),
        ]
    call = pl.pallas_call(
        functools.partial(_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(jnp.maximum(items.count, 1),),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        out_shape=out_shapes,
        input_output_aliases=(
            {} if inputs.new is None else {first + i: 1 + i for i in range(len(caches))}
        ),
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
    if not written:
        return o_TNH
    return o_TNH, QuantizedPages(*written) if plan.codes else written[0]


def _new_slots(new: NewTokens, kv: Pages, layer: jax.Array, row_T2: jax.Array) -> list[jax.Array]:
    """Return what the kernel copies into each of the cache's arrays, by token."""
    if not isinstance(kv, QuantizedPages):
        return [slot_rows(new.k_TKH, new.v_TKH, kv)]
    rows_TCW, scales_TV = slot_codes(new.k_TKH, new.v_TKH, kv)
    return [rows_TCW, written_scales(kv, layer, new.slots_T, scales_TV, row_T2)]


def _most_work(inputs: PagedInputs, wide: int) -> Any:
    """What a call costs if every row's context is as long as its table, or the window."""
    from jax.experimental import pallas as pl

    T, N, _ = inputs.q_TNH.shape
    (R, W), kv = inputs.page_table_RW.shape, inputs.kv_LPSCH
    S = kv.shape[2]
    context = W * S if inputs.window is None else min(W * S, inputs.window + S)
    slot_bytes = 2 * inputs.kv_heads * cache_vector_bytes(inputs.q_TNH.shape[2], kv.dtype)
    moved = 2 * T * N * wide * inputs.q_TNH.dtype.itemsize + min(R, T) * context * slot_bytes
    if inputs.new is not None:
        moved += 2 * T * slot_bytes
    return pl.CostEstimate(
        flops=4 * T * N * wide * context, transcendentals=T * N * context, bytes_accessed=moved
    )


def _kernel(plan: Plan, counts: Any, fields: Any, *refs: Any) -> None:
    """Compute one item; `refs` are the other scalars, arrays, results and scratch, in order."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    rest = iter(refs)
    slots: Any = next(rest) if plan.writes else None
    sinks = next(rest) if plan.sinks else None
    table_R1W, q = next(rest), next(rest)
    arrays = 2 if plan.codes else 1
    news = [next(rest) for _ in range(arrays if plan.writes else 0)]
    caches = [next(rest) for _ in range(arrays)]
    o = next(rest)
    caches = [next(rest) for _ in news] or caches
    tables, turn, pages, highest, total, weighted, fetched, tabled, written, *of_codes = rest
    scale_pages: Any = None
    scales: Any = None
    if plan.codes:
        scale_pages, scales = of_codes

    # jnp's ask which TPU is attached, for the signs.
    div, rem = jax.lax.div, jax.lax.rem
    S, D, G, window = plan.page, plan.keys, plan.group, plan.window
    layer, items = counts[0], counts[1]
    stride = fields.shape[0] // len(FIELDS)
    m = pl.program_id(0)

    def field(name: str, item: Any) -> Any:
        return fields[FIELDS.index(name) * stride + item]

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

    def page_copies(item: Any, block: Any, side: Any, index: Any) -> Iterator[Any]:
        """Of the page that is number `index` of a block: its lanes in parts, and its scales."""
        page = tables[rem(item, 2), 0, block * plan.pages + index]
        for part in range(pages.shape[1]):
            lanes = pl.ds(part * pages.shape[-1], pages.shape[-1])
            yield pltpu.make_async_copy(
                caches[0].at[layer, page, :, :, lanes],
                pages.at[side, part, index],
                fetched.at[side],
            )
        if plan.codes:
            yield pltpu.make_async_copy(
                caches[1].at[layer, page], scale_pages.at[side, index], fetched.at[side]
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
            for copy in page_copies(item, block, side, index):
                copy.start()

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
            for copy in page_copies(item, block, side, index):
                copy.wait()

        @pl.when(whole)
        def _() -> None:
            # As many bytes as all pages.
            every = [pages.at[side]]
            if plan.codes:
                every.append(scale_pages.at[side, pl.ds(0, plan.pages)])
            for buffer in every:
                pltpu.make_async_copy(buffer, buffer, fetched.at[side]).wait()

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            jax.lax.fori_loop(low, high, wait, None)

    def each_write(item: Any, do: Any) -> None:
        """Tokens up to a page's border, whole pages, and the tokens that are left."""
        begin, end = field("write", item), field("write_end", item)
        mark = written.at[rem(item, AHEAD + 1)]
        inside = rem(slots[jnp.minimum(begin, slots.shape[0] - 1)], S)
        border = jnp.minimum(begin + jnp.where(inside > 0, S - inside, 0), end)
        whole = div(end - border, S)
        last = border + whole * S

        def token(t: Any, _: Any) -> None:
            slot = slots[t]
            page = div(slot, S)
            do(pltpu.make_async_copy(news[0].at[t], caches[0].at[layer, page, rem(slot, S)], mark))
            if plan.codes:  # of the whole page, which the page's other tokens write likewise
                do(pltpu.make_async_copy(news[1].at[t], caches[1].at[layer, page], mark))

        def page(index: Any, _: Any) -> None:
            t = border + index * S
            page = div(slots[t], S)
            do(pltpu.make_async_copy(news[0].at[pl.ds(t, S)], caches[0].at[layer, page], mark))
            if plan.codes:
                do(pltpu.make_async_copy(news[1].at[t], caches[1].at[layer, page], mark))

        jax.lax.fori_loop(begin, border, token, None)
        if news[0].shape[0] >= S:  # a step of fewer tokens has no whole page
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
            for item in range(AHEAD):
                each_write(item, start)
        ready(0)
        fetch(0, first_block(0), 0)

    if plan.writes:
        each_write(m + AHEAD, start)

    @pl.when(m + 1 < items)
    def _() -> None:
        table_copy(m + 1).start()

    first, end = visible(m)
    token = field("token", m)
    low, high = token * G, (token + field("count", m)) * G
    begin = jnp.minimum(div(low, SUBLANES) * SUBLANES, plan.queries - plan.few)
    begin = pl.multiple_of(begin, SUBLANES)

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
        begin_sums(plan, sinks, queries(begin, size), highest, total, weighted)

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

        if plan.codes:  # which are finite; scales need not be

            def used(part: int) -> jax.Array:
                key = index * D + part * LANES + jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
                return (key >= first) & (key < end)

            by_vector(S, scale_pages.at[side], used, scales)
        else:

            @pl.when((index * D < first) | ((index + 1) * D > end))
            def _() -> None:
                clear(plan, pages, side, index * D, first, end)

        def add(begin: Any, size: int) -> None:
            key = index * D + jax.lax.broadcasted_iota(jnp.int32, (1, D), 1)

            def seen(low: int, size: int) -> jax.Array:
                position = field("position", m) - token + div(queries(begin + low, size), G)
                mask = key <= position
                return mask if window is None else mask & (key > position - window)

            sums = (highest, total, weighted)
            add_block(plan, q, begin, size, pages.at[side], seen, sums, scales)

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
