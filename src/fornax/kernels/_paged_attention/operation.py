"""The paged attention operation: its implementations in order of preference, and its callers, with
a step's new keys and values or without.

Legend: T tokens of the step, N query heads, K key/value heads, H head width, L layers, P pages,
S slots of a page, C rows of a slot: 2 K (k0, v0, k1, v1, ...), K where keys are values too, or K of
width 2 H where a key is beside its value; R rows (sequences), W pages of a table's row.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import KernelError
from fornax.kernels._paged_attention import blockwise, gpu, native, tpu, tpu_items
from fornax.kernels._paged_attention.cache import check_write, write_here
from fornax.kernels._paged_attention.call import (
    NewTokens,
    PagedCall,
    PagedInputs,
    PreparedAttention,
    describe,
)
from fornax.kernels._paged_attention.codes import Pages, QuantizedPages, cache_vector_bytes, encode
from fornax.kernels._paged_attention.reference import reference
from fornax.kernels._paged_attention.sharded import over_mesh
from fornax.kernels.registry import Implementation, Operation, Work, register

__all__ = [
    "paged_attention",
    "paged_attention_operation",
    "paged_attention_update",
    "prepare_paged_attention",
]


_LONGEST = 1024
"""Tokens of context at most: enough to tell implementations apart, little to allocate."""


def benchmark(call: PagedCall, run: Callable[[PagedInputs], jax.Array]) -> Callable[[], object]:
    """Return a function that computes one call like `call`, its tokens spread over its rows."""
    rng = np.random.default_rng(0)
    S, W = call.page_size, call.table_width
    rows = min(call.rows, call.tokens)
    pages = min(W, max(1, _LONGEST // S))
    start_R1 = np.full(call.rows + 1, call.tokens, np.int32)
    start_R1[: rows + 1] = np.arange(rows + 1) * call.tokens // rows
    counts_R = np.diff(start_R1)
    context_R = np.where(counts_R > 0, np.maximum(counts_R, pages * S), 0)
    table_RW = np.zeros((call.rows, W), np.int32)
    table_RW[:, :pages] = 1 + np.arange(call.rows * pages).reshape(call.rows, pages) % (4 * pages)
    numbers = call.kv_heads * call.head_dim * (1 if call.shared else 2)
    width = 2 * call.head_dim if call.joined else call.head_dim
    kv_LPSCH = _random_pages(call, rng.normal(size=(1, 1 + 4 * pages, S, numbers // width, width)))
    q_TNH = jnp.asarray(rng.normal(size=(call.tokens, call.heads, call.head_dim)), call.dtype)
    sinks_N = jnp.zeros(call.heads) if call.sinks else None

    @jax.jit
    def step(q_TNH: jax.Array, kv_LPSCH: jax.Array) -> jax.Array:
        return run(
            PagedInputs(
                q_TNH=q_TNH,
                kv_LPSCH=kv_LPSCH,
                layer=jnp.asarray(0, jnp.int32),
                page_table_RW=jnp.asarray(table_RW),
                query_start_R1=jnp.asarray(start_R1),
                context_lens_R=jnp.asarray(context_R, jnp.int32),
                sinks_N=sinks_N,
                scale=call.head_dim**-0.5,
                window=call.window,
                softcap=call.softcap,
                shared=call.shared,
            )
        )

    return lambda: step(q_TNH, kv_LPSCH)


def _random_pages(call: PagedCall, numbers_LPSCH: np.ndarray) -> Pages:
    if not call.scaled:
        return jnp.asarray(numbers_LPSCH, call.cache_dtype)
    x_PSVH = jnp.asarray(numbers_LPSCH[0]).reshape(*numbers_LPSCH.shape[1:3], -1, call.head_dim)
    codes, scales_PSV = encode(x_PSVH, call.cache_dtype)
    scales = jnp.swapaxes(scales_PSV, 1, 2).reshape(1, x_PSVH.shape[0], 1, -1)
    return QuantizedPages(codes.reshape(numbers_LPSCH.shape), scales)


def _work(call: PagedCall) -> Work:
    """Scores and sums of what `benchmark` asks for, whose rows have equally long contexts."""
    rows, S = min(call.rows, call.tokens), call.page_size
    context = min(call.table_width, max(1, _LONGEST // S)) * S
    of_row = -(-call.tokens // rows) if rows else 0
    context = max(context, of_row)
    # A row's tokens are the last of its context.
    pairs = call.tokens * (context - (of_row - 1) / 2)
    if call.window is not None:
        pairs = min(pairs, float(call.tokens * call.window))
        context = min(context, call.window + of_row - 1)
    parts = 1 if call.shared else 2
    cached = rows * context * call.kv_heads * parts
    moved = 2 * call.tokens * call.heads * call.head_dim * jnp.dtype(call.dtype).itemsize
    return Work(
        flops=4.0 * pairs * call.heads * call.head_dim,
        bytes=float(moved + cached * cache_vector_bytes(call.head_dim, call.cache_dtype)),
        dtype=call.dtype,
    )


paged_attention_operation: Operation[PagedCall] = register(
    Operation(
        "paged_attention",
        (
            Implementation("native", native.native, native.declines, platform="cpu", steady=True),
            Implementation("pallas_tpu", tpu.tpu, tpu.declines, platform="tpu"),
            Implementation("pallas_gpu", gpu.gpu, gpu.declines, platform="gpu"),
            Implementation("xla", blockwise.blockwise, lambda call: None),
            Implementation("reference", reference, lambda call: None),
        ),
        benchmark,
        work=_work,
        call=PagedCall,
    )
)

_WRITING = frozenset(["pallas_tpu"])
"""Implementations that write new keys and values themselves."""

_PREPARE: dict[str, Callable[[PagedInputs], Any]] = {
    "pallas_tpu": tpu_items.prepare,
    "pallas_gpu": gpu.prepare,
    "xla": blockwise.prepare,
}
"""By implementation: what it derives from the rows alone, the same for every layer."""


def paged_attention(
    q_TNH: jax.Array,
    kv_LPSCH: Pages,
    *,
    layer: jax.Array | int,
    page_table_RW: jax.Array,
    query_start_R1: jax.Array,
    context_lens_R: jax.Array,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    shared: bool = False,
    prepared: PreparedAttention | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Attend from every token of a ragged step to its own sequence, kept in pages of a cache.

    softmax(mask(softcap(q k^T * scale))) v, with N / K query heads sharing a key/value head
    (Kwon et al. 2023). Token t of row r is at position
    `context_lens[r] - (query_start[r + 1] - t)` and sees the positions up to its own; this step's
    keys and values are in the cache already (`paged_write`; `paged_attention_update` does both).
    Under a mesh in use whose rules divide the heads, each device computes its own heads.

    Args:
        q_TNH: queries, floating; the rows' tokens one after the other, then padding.
        kv_LPSCH: the cache, floating, of any dtype, or `QuantizedPages`: position p of row r lies
            in page `page_table[r, p // S]`, slot `p % S`. A head's value lies below its key,
            C = 2 K, or beside it in a row of 2 H numbers, C = K, which fills a TPU's lanes with
            heads of 64.
        layer: which layer of the stack, int32 scalar.
        page_table_RW: int32; entries that no token sees may be anything below P.
        query_start_R1: int32, cumulative; row r owns tokens [query_start[r], query_start[r + 1]).
            Rows without tokens come after those with tokens.
        context_lens_R: int32, tokens of each row including this step's; 0 for an unused row.
        scale: factor on the scores, usually H ** -0.5.
        window: number of keys visible including the token's own.
        softcap: c in s = c tanh(s / c), applied to the scaled scores.
        sinks_N: float logit per query head that takes part in the softmax without a value.
        shared: whether keys are values too: the cache then holds one vector of a token and key
            head, C = K, and the weighted sums are of these, as wide as the keys.
        prepared: what `prepare_paged_attention` made of the same rows, if several layers share it.
        implementation: name of one implementation to run, no other.

    Returns:
        o_TNH in q's dtype; zeros for padding.

    Raises:
        KernelError: arguments that do not fit together, or `implementation` cannot run the call.
    """
    inputs = PagedInputs(
        q_TNH=q_TNH,
        kv_LPSCH=kv_LPSCH,
        layer=jnp.asarray(layer, jnp.int32),
        page_table_RW=page_table_RW,
        query_start_R1=query_start_R1,
        context_lens_R=context_lens_R,
        sinks_N=sinks_N,
        scale=float(scale),
        window=window,
        softcap=softcap,
        shared=shared,
        prepared=prepared,
    )
    return _attend(inputs, implementation)


def paged_attention_update(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array | None,
    kv_LPSCH: Pages,
    *,
    layer: jax.Array | int,
    slots_T: jax.Array,
    page_table_RW: jax.Array,
    query_start_R1: jax.Array,
    context_lens_R: jax.Array,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    prepared: PreparedAttention | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Pages]:
    """Write one layer's keys and values of a step into the cache, then attend: one call on TPU,
    `paged_write` and `paged_attention` elsewhere.

    Args:
        q_TNH: as `paged_attention` takes it, like all arguments that are not named here.
        k_TKH: keys, floating; rounded as `paged_write` rounds them.
        v_TKH: values, likewise; None where keys are values too.
        kv_LPSCH: the cache; written in place where the caller has no further use for it.
        layer: which layer of the stack.
        slots_T: int32, page * S + slot of each token: where the page table has its position.
            What padding writes, if anything, goes to its slots.
        page_table_RW: int32.
        query_start_R1: int32.
        context_lens_R: int32.
        scale: factor on the scores.
        window: number of keys visible.
        softcap: applied to the scaled scores.
        sinks_N: float logit per query head.
        prepared: what `prepare_paged_attention` made of the same rows.
        implementation: name of one implementation of `paged_attention` to run, no other.

    Returns:
        o_TNH as `paged_attention` returns it, and the cache with these tokens in it.

    Raises:
        KernelError: arguments that do not fit together, or `implementation` cannot run the call.
    """
    check_write(kv_LPSCH, k_TKH, v_TKH, slots_T)
    inputs = PagedInputs(
        q_TNH=q_TNH,
        kv_LPSCH=kv_LPSCH,
        layer=jnp.asarray(layer, jnp.int32),
        page_table_RW=page_table_RW,
        query_start_R1=query_start_R1,
        context_lens_R=context_lens_R,
        sinks_N=sinks_N,
        scale=float(scale),
        window=window,
        softcap=softcap,
        shared=v_TKH is None,
        prepared=prepared,
        new=NewTokens(k_TKH, v_TKH, slots_T),
    )
    if slots_T.shape != q_TNH.shape[:1]:
        raise KernelError(
            f"paged_attention_update: q{q_TNH.shape} and k{k_TKH.shape} must have the same tokens"
        )
    return _attend(inputs, implementation)


def _attend(inputs: PagedInputs, implementation: str | None) -> Any:
    """Compute on each device, and write first where there is something new."""
    describe(inputs)

    def attend(local: PagedInputs) -> Any:
        chosen = paged_attention_operation.choose(describe(local), implementation)
        new = local.new
        if new is None or chosen.name in _WRITING:
            return chosen.run(local)
        kv = write_here(local.kv_LPSCH, new.k_TKH, new.v_TKH, local.layer, new.slots_T)
        return chosen.run(dataclasses.replace(local, kv_LPSCH=kv, new=None)), kv

    return over_mesh(attend, inputs)


def prepare_paged_attention(
    q_TNH: jax.ShapeDtypeStruct,
    kv_LPSCH: Pages,
    *,
    page_table_RW: jax.Array,
    query_start_R1: jax.Array,
    context_lens_R: jax.Array,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    shared: bool = False,
) -> PreparedAttention:
    """Derive once a step what calls of `paged_attention` would each derive from the rows.

    Call it outside the loop over layers, under the mesh that they run under, and hand the result to
    each call with the same rows, shapes and options.

    Args:
        q_TNH: shape and dtype of the queries.
        kv_LPSCH: the cache; not read.
        page_table_RW: as `paged_attention` takes it, like all that follows.
        query_start_R1: int32.
        context_lens_R: int32.
        window: of the calls.
        softcap: of the calls.
        sinks: whether the calls have sinks.
        shared: of the calls.

    Raises:
        KernelError: arguments that do not fit together.
    """
    inputs = PagedInputs(
        q_TNH=jnp.zeros(q_TNH.shape, q_TNH.dtype),
        kv_LPSCH=kv_LPSCH,
        layer=jnp.zeros((), jnp.int32),
        page_table_RW=page_table_RW,
        query_start_R1=query_start_R1,
        context_lens_R=context_lens_R,
        sinks_N=jnp.zeros(q_TNH.shape[1]) if sinks else None,
        scale=1.0,
        window=window,
        softcap=softcap,
        shared=shared,
    )
    describe(inputs)

    def prepare(local: PagedInputs) -> PreparedAttention:
        name = paged_attention_operation.choose(describe(local)).name
        return PreparedAttention(name, _PREPARE.get(name, lambda _: None)(local))

    return over_mesh(prepare, inputs, replicated=True)
