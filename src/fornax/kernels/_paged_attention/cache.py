"""Writing a step's keys and values into a paged cache, and copying pages of it.

Legend: T tokens of the step, K key/value heads, H head width, L layers, P pages,
S slots of a page, C rows of a slot: 2 K (k0, v0, k1, v1, ...), K where keys are values too, or K of
width 2 H where a key is beside its value; M copies.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fornax.config.errors import KernelError
from fornax.kernels._paged_attention import native
from fornax.kernels._paged_attention.call import WriteCall, check_pages
from fornax.kernels._paged_attention.codes import (
    Pages,
    QuantizedPages,
    cache_vector_bytes,
    empty_pages,
)
from fornax.kernels._paged_attention.layout import slot_codes, slot_rows
from fornax.kernels._paged_attention.sharded import write_over_mesh
from fornax.kernels.registry import Implementation, Operation, Work, current_platform, register

__all__ = ["check_write", "copy_pages", "paged_write", "paged_write_operation", "write_here"]


def scatter(
    kv_LPSCH: Pages,
    k_TKH: jax.Array,
    v_TKH: jax.Array | None,
    layer: jax.Array,
    slots_T: jax.Array,
) -> Pages:
    """Write by one scatter of XLA's, or one for codes and one for their scales."""
    S = kv_LPSCH.shape[2]
    page_T, slot_T = slots_T // S, slots_T % S
    if not isinstance(kv_LPSCH, QuantizedPages):
        rows_TCH = slot_rows(k_TKH, v_TKH, kv_LPSCH)
        return kv_LPSCH.at[layer, page_T, slot_T].set(rows_TCH, mode="drop")
    rows_TCH, scales_TV = slot_codes(k_TKH, v_TKH, kv_LPSCH)
    at_TV = jnp.arange(scales_TV.shape[1], dtype=jnp.int32) * S + slot_T[:, None]
    codes, scales = kv_LPSCH.codes_LPSCH, kv_LPSCH.scales_LP1X
    # A scatter of single numbers makes TPUs lay its array out again: of one layer, then, not of
    # all.
    own_P1X = jax.lax.dynamic_index_in_dim(scales, layer, keepdims=False)
    own_P1X = own_P1X.at[page_T[:, None], 0, at_TV].set(scales_TV, mode="drop")
    return QuantizedPages(
        codes.at[layer, page_T, slot_T].set(rows_TCH, mode="drop"),
        jax.lax.dynamic_update_index_in_dim(scales, own_P1X, layer, 0),
    )


def _benchmark(call: WriteCall, run: Callable[..., Pages]) -> Callable[[], object]:
    S, K, H = call.page_size, call.kv_heads, call.head_dim
    pages = 1 + call.tokens // S
    slots_T = jnp.arange(call.tokens, dtype=jnp.int32)
    k_TKH = jnp.ones((call.tokens, K, H), call.dtype)
    heads = K if call.shared else 2 * K
    cache = [empty_pages((1, pages, S, heads, H), heads, call.cache_dtype)]
    values = None if call.shared else k_TKH
    step = jax.jit(run, donate_argnums=0)

    def work() -> Pages:
        cache[0] = step(cache[0], k_TKH, values, jnp.asarray(0, jnp.int32), slots_T)
        return cache[0]

    return work


def _work(call: WriteCall) -> Work:
    """Keys and values read, and written."""
    vectors = call.tokens * call.kv_heads * (1 if call.shared else 2)
    read = call.head_dim * jnp.dtype(call.dtype).itemsize
    written = cache_vector_bytes(call.head_dim, call.cache_dtype)
    return Work(flops=0.0, bytes=float(vectors * (read + written)), dtype=call.dtype)


paged_write_operation: Operation[WriteCall] = register(
    Operation(
        "paged_write",
        (
            Implementation("native", native.write, native.declines_write, platform="cpu"),
            Implementation("xla", scatter, lambda call: None),
        ),
        _benchmark,
        work=_work,
        call=WriteCall,
    )
)


def paged_write(
    kv_LPSCH: Pages,
    k_TKH: jax.Array,
    v_TKH: jax.Array | None,
    *,
    layer: jax.Array | int,
    slots_T: jax.Array,
    implementation: str | None = None,
) -> Pages:
    """Write one layer's keys and values of a step into the cache.

    In place where the caller has no further use for the old cache: donated to the compiled
    program, or carried through a scan.

    Args:
        kv_LPSCH: the cache, floating or `QuantizedPages`: C = 2 K, or C = K of width 2 H.
        k_TKH: keys, floating; rounded to the cache's dtype, or to codes with a scale for each
            token and head (`QuantizedPages`).
        v_TKH: values, likewise; None where keys are values too, of which the cache then holds one.
        layer: which layer of the stack, int32 scalar.
        slots_T: int32, page * S + slot of each token. Padding goes into page 0; where two tokens
            name one slot, either may be the one that stays.
        implementation: name of one implementation to run, no other.

    Returns:
        The cache with these tokens in it.

    Raises:
        KernelError: arguments that do not fit together, or `implementation` cannot run the call.
    """
    check_write(kv_LPSCH, k_TKH, v_TKH, slots_T)

    def write(kv: Pages, *new: jax.Array) -> Pages:
        return write_here(kv, *new, implementation=implementation)

    layer = jnp.asarray(layer, jnp.int32)
    return write_over_mesh(write, kv_LPSCH, k_TKH, v_TKH, layer, slots_T)


def write_here(
    kv: Pages,
    k: jax.Array,
    v: jax.Array | None,
    layer: jax.Array,
    slots: jax.Array,
    *,
    implementation: str | None = None,
) -> Pages:
    """Write on one device, as `paged_write` takes it."""
    call = WriteCall(
        platform=current_platform(),
        tokens=k.shape[0],
        kv_heads=k.shape[1],
        head_dim=k.shape[2],
        page_size=kv.shape[2],
        dtype=jnp.dtype(k.dtype).name,
        cache_dtype=jnp.dtype(kv.dtype).name,
        shared=v is None,
        scaled=isinstance(kv, QuantizedPages),
    )
    return paged_write_operation.choose(call, implementation).run(kv, k, v, layer, slots)


def check_write(kv: Pages, k: jax.Array, v: jax.Array | None, slots: jax.Array) -> None:
    """Check what is written against the cache and each other.

    Raises:
        KernelError: arguments that do not fit together.
    """
    parts, v = (1, k) if v is None else (2, v)
    if kv.ndim != 5 or k.ndim != 3 or k.shape != v.shape or k.dtype != v.dtype:
        raise KernelError(
            f"paged_write: kv{kv.shape}, k{k.shape} {k.dtype}, v{v.shape} {v.dtype} must be "
            "[L, P, S, 2 K, H], [T, K, H], [T, K, H], keys and values of one dtype"
        )
    T, K, H = k.shape
    if kv.shape[3:] not in ((parts * K, H), (K, parts * H)):
        raise KernelError(
            f"paged_write: kv{kv.shape} holds {kv.shape[3] // parts} heads of width {kv.shape[4]}, "
            f"but k{k.shape} has {K} of width {H}; they must agree"
        )
    check_pages("paged_write", kv, parts * K)
    if slots.shape != (T,) or slots.dtype != jnp.int32:
        raise KernelError(
            f"paged_write: slots{slots.shape} {slots.dtype} must be int32 of shape ({T},)"
        )


def copy_pages(kv_LPSCH: Pages, sources_M: jax.Array, targets_M: jax.Array) -> Pages:
    """Copy whole pages, in all layers, one after the other; in place if the cache is donated.

    Args:
        kv_LPSCH: the cache; of `QuantizedPages` the scales are copied with their codes.
        sources_M: int32 pages to read; pad with 0 on both sides (page 0 onto itself).
        targets_M: int32 pages to overwrite.

    Raises:
        KernelError: not as many targets as sources.
    """
    if sources_M.ndim != 1 or sources_M.shape != targets_M.shape:
        raise KernelError(
            f"copy_pages: sources{sources_M.shape} and targets{targets_M.shape} must be two lists "
            "of one length"
        )

    def copy(i: jax.Array, array: jax.Array) -> jax.Array:
        page = jax.lax.dynamic_slice_in_dim(array, sources_M[i], 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(array, page, targets_M[i], axis=1)

    def copy_all(i: jax.Array, kv: Pages) -> Pages:
        return jax.tree.map(lambda array: copy(i, array), kv)

    return jax.lax.fori_loop(0, sources_M.shape[0], copy_all, kv_LPSCH)
