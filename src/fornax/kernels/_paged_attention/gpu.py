"""Paged attention on NVIDIA Hopper: a Pallas kernel that splits contexts over blocks of its grid.

The step's tokens are cut into tiles of one row's queries. A block of the grid has one tile, one key
head and one of Z parts of the keys that the tile sees. It reads each of them once: D keys and their
values at a time, page by page, by the copy engine (TMA) into one of a few buffers in shared memory,
while the tensor cores multiply those before them (WGMMA, Shah et al. 2024). All query heads of the
key head, and all tokens of the tile, are rows of the same products.

Of scores s_i in units of log 2 a part returns m = max s_i, l = sum 2^(s_i - m) and the sum of the
values so weighted, o = sum 2^(s_i - m) v_i. XLA joins the parts (Flash-Decoding, Dao et al. 2023):
with M the greatest of the m, and of the sink's logit where a head has one, the output is

    sum_z 2^(m_z - M) o_z / (sum_z 2^(m_z - M) l_z + 2^(sink - M)).

Legend: T tokens of the step, N query heads, K key heads, G = N / K, H head width, L layers,
P pages, S slots of a page, C rows of a slot, M tiles, Q tokens of a tile, X = Q G queries of a key
head in it, B of them with padding, Z parts, D keys at a time.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fornax.kernels._paged_attention.call import PagedCall, PagedInputs
from fornax.kernels._paged_attention.codes import QuantizedPages
from fornax.kernels._paged_attention.layout import Tiles, cut
from fornax.kernels.registry import interpreting

__all__ = ["QUERIES", "declines", "gpu", "largest_tile", "prepare"]

QUERIES = 64
"""Rows of a product: what the tensor cores of a Hopper multiply, used or not."""
_KEYS = 64
"""D."""
_COLUMNS = 64
"""Of 16 bits, in the 128 bytes over which rows in shared memory are swizzled."""
_ROWS = 8
"""Of a tile in shared memory."""
_MOST_COLUMNS = 128
"""Of values multiplied at once; of wider ones fewer, as the sums so far take the registers."""
_SHARED_BYTES = 110 * 1024
"""Of shared memory for a block, of which two then fit a multiprocessor's 227 KiB."""
_MOST_BUFFERS = 4
_BLOCKS = 4 * 132
"""Blocks that occupy a Hopper's 132 multiprocessors, two at a time each, two times over."""
_SHORTEST_PART = 256
"""Keys: shorter parts would cost more to start than to read."""
_LOWEST = -1e30
_LOG2_E = math.log2(math.e)


def declines(call: PagedCall) -> str | None:
    """Say why the kernel cannot run `call`."""
    if call.dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, not {call.dtype}"
    if call.cache_dtype != call.dtype:
        return f"it takes a cache of the queries' {call.dtype}, not {call.cache_dtype}"
    if call.shared:
        return "it reads keys and values apart"
    if call.head_dim not in (64, 128, 256):
        return f"it takes heads of width 64, 128 and 256, not {call.head_dim}"
    group = call.heads // call.kv_heads
    if group > QUERIES:
        return f"it takes up to {QUERIES} query heads a key head, not {group}"
    S = call.page_size
    if S % _ROWS or (_KEYS % S and S % _KEYS):
        return f"it takes pages of 8, 16, 32 or a multiple of {_KEYS} tokens, not {S}"
    if interpreting():
        return "JAX 0.10 has no public interpreter of a Hopper"
    return _other_device(call.capability)


def _other_device(capability: float | None) -> str | None:
    """Where there is no GPU to ask, it is a Hopper that programs are lowered for."""
    if capability is None and jax.default_backend() == "gpu":
        capability = float(getattr(jax.local_devices()[0], "compute_capability", "") or 0)
    if capability is None or 9 <= capability < 10:
        return None
    return f"its products are those of a Hopper (9.0), which a GPU of {capability} does not have"


def largest_tile(group: int) -> int:
    """Return how many tokens of a row share the reading of its keys, at most: a power of two.

    Args:
        group: G.
    """
    return 1 << (QUERIES // group).bit_length() - 1


def _parts(tiles: int, kv_heads: int, longest: int) -> int:
    """Return Z: as many as occupy the GPU, where `longest` keys make that many worth a block."""
    wanted = -(-_BLOCKS // (tiles * kv_heads))
    return max(1, min(wanted, longest // _SHORTEST_PART))


def prepare(inputs: PagedInputs) -> Tiles:
    """Cut the step's tokens into tiles."""
    return cut(inputs, largest_tile(inputs.q_TNH.shape[1] // inputs.kv_heads))


@dataclass(frozen=True)
class _Plan:
    """What is known of a call before it runs."""

    kv_heads: int
    group: int
    width: int
    """H."""
    queries: int
    """X."""
    padded: int
    """B."""
    parts: int
    page: int
    pages: int
    """Pages of a layer."""
    scale: float
    window: int | None
    softcap: float | None

    @property
    def piece(self) -> int:
        """Keys of one copy."""
        return min(self.page, _KEYS)

    @property
    def buffers(self) -> int:
        """How many times D keys and values lie in shared memory."""
        sums = QUERIES * _COLUMNS * 4
        free = _SHARED_BYTES - 2 * QUERIES * (self.width + _KEYS) - sums
        return max(2, min(_MOST_BUFFERS, free // (2 * 2 * _KEYS * self.width)))


def _plan(inputs: PagedInputs, tiles: Tiles) -> _Plan:
    (M, Q), (_, N, H), K = tiles.token_MQ.shape, inputs.q_TNH.shape, inputs.kv_heads
    _, P, S, _, _ = inputs.kv_LPSCH.shape
    longest = inputs.page_table_RW.shape[1] * S
    if inputs.window is not None:
        longest = min(longest, inputs.window + Q + _KEYS)
    return _Plan(
        kv_heads=K,
        group=N // K,
        width=H,
        queries=Q * N // K,
        padded=-(-Q * N // K // _ROWS) * _ROWS,
        parts=_parts(M, K, longest),
        page=S,
        pages=P,
        scale=inputs.scale,
        window=inputs.window,
        softcap=inputs.softcap,
    )


def gpu(inputs: PagedInputs) -> jax.Array:
    """Compute attention on one device; scores and sums are float32, weights the values' dtype.

    Returns:
        o_TNH of the queries' dtype, zeros for padding.
    """
    tiles = inputs.prepared_for("pallas_gpu") or prepare(inputs)
    plan = _plan(inputs, tiles)
    (M, Q), (_, N, H), K = tiles.token_MQ.shape, inputs.q_TNH.shape, inputs.kv_heads
    G, X = plan.group, plan.queries
    q_MKXH = jnp.swapaxes(inputs.q_TNH[tiles.token_MQ].reshape(M, Q, K, G, H), 1, 2)
    q_MKBH = jnp.pad(q_MKXH.reshape(M, K, X, H), ((0, 0), (0, 0), (0, plan.padded - X), (0, 0)))
    o_ZMKXH, highest_ZMKX, total_ZMKX = _attend_parts(plan, inputs, tiles, q_MKBH)
    sinks = jnp.full((N,), _LOWEST) if inputs.sinks_N is None else inputs.sinks_N
    sinks_KX = jnp.tile(sinks.astype(jnp.float32).reshape(K, G) * _LOG2_E, (1, Q))
    highest_MKX = jnp.maximum(jnp.max(highest_ZMKX, axis=0), sinks_KX)
    weight_ZMKX = jnp.exp2(highest_ZMKX - highest_MKX)
    total_MKX = jnp.sum(weight_ZMKX * total_ZMKX, axis=0)
    if inputs.sinks_N is not None:
        total_MKX += jnp.exp2(sinks_KX - highest_MKX)
    o_MKXH = jnp.sum(weight_ZMKX[..., None] * o_ZMKXH, axis=0)
    o_MKXH /= jnp.where(total_MKX == 0, 1, total_MKX)[..., None]
    o_MQNH = jnp.swapaxes(o_MKXH.reshape(M, K, Q, G, H), 1, 2).reshape(M, Q, N, H)
    o_TNH = o_MQNH[tiles.tile_T, tiles.offset_T]
    return jnp.where(tiles.valid_T[:, None, None], o_TNH, 0).astype(inputs.q_TNH.dtype)


def _attend_parts(
    plan: _Plan, inputs: PagedInputs, tiles: Tiles, q_MKBH: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return float32 o [Z, M, K, X, H], m and l [Z, M, K, X] of each part."""
    # Imported here: it pulls in Mosaic, which nobody else needs.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    M, K, B, H = q_MKBH.shape
    Z, X, dtype = plan.parts, plan.queries, q_MKBH.dtype
    rows = Z * M * K
    swizzled = (plgpu.TilingTransform((_ROWS, _COLUMNS)), plgpu.SwizzleTransform(128))
    keys = plgpu.SMEM((plan.buffers, _KEYS, H), dtype, transforms=swizzled)
    copies = 2 * _KEYS // plan.piece

    def paged_attention(*refs: Any) -> None:
        _kernel(plan, *refs)

    call = plgpu.kernel(
        paged_attention,
        out_type=(
            jax.ShapeDtypeStruct((rows * X, H), jnp.float32),
            jax.ShapeDtypeStruct((rows, B), jnp.float32),
            jax.ShapeDtypeStruct((rows, B), jnp.float32),
        ),
        scratch_types=[
            plgpu.SMEM((QUERIES, H), dtype, transforms=swizzled),
            keys,
            keys,
            plgpu.SMEM((QUERIES, _KEYS), dtype, transforms=swizzled),
            plgpu.SMEM((QUERIES, _COLUMNS), jnp.float32),
            plgpu.SMEM((QUERIES,), jnp.float32),
            plgpu.SMEM((QUERIES,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=copies, num_barriers=plan.buffers),
        ],
        grid=(Z, M, K),
        grid_names=("part", "tile", "head"),  # the heads of a page are read at about one time
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )
    # As rows of all layers' slots: a head's value follows its key in either layout of a cache.
    assert not isinstance(inputs.kv_LPSCH, QuantizedPages), "codes are declined"
    kv = inputs.kv_LPSCH.reshape(-1, 2 * K * H)
    position_M, end_M = tiles.position_MQ[:, 0], jnp.max(tiles.position_MQ, axis=1) + 1
    fields_FM = jnp.stack([tiles.row_M.astype(jnp.int32), position_M, end_M])
    o, highest, total = call(
        inputs.layer.reshape(1), fields_FM, inputs.page_table_RW, q_MKBH.reshape(-1, H), kv
    )
    sums = (each.reshape(Z, M, K, B)[..., :X] for each in (highest, total))
    return o.reshape(Z, M, K, X, H), *sums


def _kernel(plan: _Plan, layer: Any, fields: Any, table: Any, q: Any, kv: Any, *refs: Any) -> None:
    """Compute one part of one tile and key head: a warpgroup that also starts the copies."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    o, highest, total, q_s, k_s, v_s, weights_s, o_s, highest_s, total_s, asked, fetched = refs
    # jnp's ask which device is attached, for the signs.
    div, rem = jax.lax.div, jax.lax.rem
    D, S, H, X, B = _KEYS, plan.page, plan.width, plan.queries, plan.padded
    part, tile, head = (jax.lax.axis_index(name) for name in ("part", "tile", "head"))
    row, position, end = (fields[field, tile] for field in range(3))
    # Keys [first, end) are seen by some query; none where a tile is empty.
    first = 0 if plan.window is None else jnp.maximum(position - (plan.window - 1), 0)
    begin_block, end_block = div(first, D), div(end + D - 1, D)
    each = div(end_block - begin_block + plan.parts - 1, plan.parts)
    begin = jnp.minimum(begin_block + part * each, end_block)
    count = jnp.minimum(begin + each, end_block) - begin
    last_page = jnp.maximum(div(end - 1, S), 0)

    def fetch(number: Any) -> None:
        """Start the copies of the part's D keys and values of that number."""
        side = rem(number, plan.buffers)
        starts = [(begin + number) * D + low for low in range(0, D, plan.piece)]
        # Beyond the last page the table may hold anything: it is read again instead.
        pages = [table[row, jnp.minimum(div(start, S), last_page)] for start in starts]
        for index, (start, page) in enumerate(zip(starts, pages, strict=True)):
            slots = pl.ds((layer[0] * plan.pages + page) * S + rem(start, S), plan.piece)
            to = pl.ds(index * plan.piece, plan.piece)
            for place, buffer in enumerate((k_s, v_s)):
                source = kv.at[slots, pl.ds((2 * head + place) * H, H)]
                plgpu.copy_gmem_to_smem(source, buffer.at[side, to], fetched.at[side])

    queries = (tile * plan.kv_heads + head) * B
    plgpu.copy_gmem_to_smem(q.at[pl.ds(queries, B)], q_s.at[pl.ds(0, B)], asked)
    for number in range(plan.buffers - 1):
        pl.when(number < count)(functools.partial(fetch, number))
    plgpu.barrier_wait(asked)

    products, sums = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
    wide = H if H <= _MOST_COLUMNS else _COLUMNS
    query_position = position + div(
        plgpu.broadcasted_iota(jnp.int32, (QUERIES,), 0, layout=sums), plan.group
    )

    def across(x: Any, columns: int) -> Any:
        return jax.lax.broadcast_in_dim(x, (QUERIES, columns), [0])

    def scores(acc: Any, side: Any) -> Any:
        plgpu.wgmma(acc, q_s, k_s.at[side].transpose((1, 0)))
        return acc[...]

    def weighted(acc: Any, side: Any, low: int) -> Any:
        plgpu.wgmma(acc, weights_s, v_s.at[side, :, pl.ds(low, wide)])
        return acc[...]

    def block(number: Any, carry: Any) -> Any:
        """Add D keys; queries that see none of them yet have weights of 1 that later fall to 0."""
        before, sum_before, o_before = carry
        side, start = rem(number, plan.buffers), (begin + number) * D
        plgpu.barrier_wait(fetched.at[side])
        following = number + plan.buffers - 1
        pl.when(following < count)(functools.partial(fetch, following))

        @pl.when((start < first) | (start + D > end))
        def _() -> None:
            # What the buffer has of others may be NaN, which a weight of 0 would not silence.
            key = start + plgpu.broadcasted_iota(jnp.int32, (D, H), 0, layout=products)
            v_s[side] = jnp.where((key >= first) & (key < end), v_s[side], 0)
            plgpu.commit_smem()

        accumulator = plgpu.ACC((QUERIES, D), jnp.float32)
        found = pl.run_scoped(functools.partial(scores, side=side), accumulator)
        if plan.softcap is None:
            found = found * (plan.scale * _LOG2_E)
        else:
            # The hardware's own tanh has 11 bits; this one is as exact as 2^x.
            power = jnp.exp2(found * (2 * _LOG2_E * plan.scale / plan.softcap))
            found = (1 - 2 / (power + 1)) * (plan.softcap * _LOG2_E)
        key = start + plgpu.broadcasted_iota(jnp.int32, (QUERIES, D), 1, layout=products)
        limit = across(query_position, D)
        seen = key <= limit
        if plan.window is not None:
            seen = seen & (key > limit - plan.window)
        found = jnp.where(seen, found, _LOWEST)
        now = jnp.maximum(before, jnp.max(found, axis=1))
        weights = jnp.exp2(found - across(now, D))
        kept = jnp.exp2(before - now)
        weights_s[...] = weights.astype(weights_s.dtype)
        plgpu.commit_smem()
        o_now = []
        for index, so_far in enumerate(o_before):
            accumulator = plgpu.ACC((QUERIES, wide), jnp.float32)
            product = functools.partial(weighted, side=side, low=index * wide)
            more = pl.run_scoped(product, accumulator)
            o_now.append(so_far * across(kept, wide) + more)
        return now, sum_before * kept + jnp.sum(weights, axis=1), tuple(o_now)

    def constant(value: float, shape: tuple[int, ...], layout: Any) -> Any:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    carry = (
        constant(_LOWEST, (QUERIES,), sums),
        constant(0, (QUERIES,), sums),
        (constant(0, (QUERIES, wide), products),) * (H // wide),
    )
    highest_s[...], total_s[...], found = jax.lax.fori_loop(0, count, block, carry)
    item = (part * fields.shape[1] + tile) * plan.kv_heads + head
    for low in range(0, H, _COLUMNS):
        columns = found[low // wide][:, low % wide : low % wide + _COLUMNS]
        if hasattr(plgpu, "store"):  # where an assignment must not meet conflicts of banks
            plgpu.store(o_s, columns, optimized=False)
        else:  # jax 0.10
            o_s[...] = columns
        plgpu.commit_smem()
        to = o.at[pl.ds(item * X, X), pl.ds(low, _COLUMNS)]
        plgpu.copy_smem_to_gmem(o_s.at[pl.ds(0, X)], to)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.copy_smem_to_gmem(highest_s.at[pl.ds(0, B)], highest.at[item])
    plgpu.copy_smem_to_gmem(total_s.at[pl.ds(0, B)], total.at[item])
    plgpu.wait_smem_to_gmem(0)
