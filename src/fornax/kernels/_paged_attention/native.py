"""Paged attention and the write by the native CPU kernels (`_native/paged_attention.cc`).

They take the whole cache and the layer's index, so XLA neither slices nor copies it, and they read
pages where they lie. A token's result is bitwise the same whatever else is in the step, however its
prompt was cut into chunks and however many threads there are.

Legend: T tokens of the step, N query heads, K key/value heads, H head width, L layers, P pages,
S slots of a page, C = 2 K or, where keys are values too, K. A key beside its value is the same
memory as a key above it.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fornax.kernels import _native
from fornax.kernels._paged_attention.call import PagedCall, PagedInputs, WriteCall
from fornax.kernels._paged_attention.codes import Pages, QuantizedPages

__all__ = ["declines", "declines_write", "native", "write"]

_DTYPES = ("float32", "bfloat16")


def declines(call: PagedCall) -> str | None:
    """Say why the native kernel cannot run `call`."""
    return _declines(call)


def declines_write(call: WriteCall) -> str | None:
    """Say why the native kernel cannot write as `call` asks."""
    return _declines(call)


def _declines(call: PagedCall | WriteCall) -> str | None:
    for dtype in (call.dtype, *([] if call.scaled else [call.cache_dtype])):
        if dtype not in _DTYPES:
            return f"it takes float32 and bfloat16, or codes with scales, not {dtype}"
    return _native.unavailable("paged_attention")


def native(inputs: PagedInputs) -> jax.Array:
    """Compute attention on one device, in float32."""
    sinks_N = jnp.zeros((0,)) if inputs.sinks_N is None else inputs.sinks_N
    kv, scales = inputs.kv_LPSCH, jnp.zeros((0,))
    if isinstance(kv, QuantizedPages):
        kv, scales = kv.codes_LPSCH, kv.scales_LP1X
    call = jax.ffi.ffi_call(
        "fornax_paged_attention",
        jax.ShapeDtypeStruct(inputs.q_TNH.shape, inputs.q_TNH.dtype),
    )
    return call(
        inputs.q_TNH,
        _apart(kv, inputs.q_TNH.shape[2]),
        inputs.layer,
        inputs.page_table_RW,
        inputs.query_start_R1,
        inputs.context_lens_R,
        sinks_N.astype(jnp.float32),
        scales,
        scale=np.float32(inputs.scale),
        softcap=np.float32(inputs.softcap or 0),
        window=np.int64(inputs.window or 0),
        shared=np.bool_(inputs.shared),
    )


def write(
    kv_LPSCH: Pages,
    k_TKH: jax.Array,
    v_TKH: jax.Array | None,
    layer: jax.Array,
    slots_T: jax.Array,
) -> Pages:
    """Write a step's keys and values into the cache where it lies."""
    if v_TKH is None:
        v_TKH = jnp.zeros((0,), k_TKH.dtype)
    codes = isinstance(kv_LPSCH, QuantizedPages)
    apart = _apart(kv_LPSCH.codes_LPSCH if codes else kv_LPSCH, k_TKH.shape[2])
    arrays = [apart, kv_LPSCH.scales_LP1X] if codes else [apart]
    call = jax.ffi.ffi_call(
        "fornax_paged_write_codes" if codes else "fornax_paged_write",
        [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
        input_output_aliases={i: i for i in range(len(arrays))},
    )
    written, *scales = call(*arrays, k_TKH, v_TKH, layer, slots_T)
    written = written.reshape(kv_LPSCH.shape)
    return QuantizedPages(written, *scales) if codes else written


def _apart(kv_LPSCH: jax.Array, width: int) -> jax.Array:
    """The cache with keys above their values, each of one width."""
    return kv_LPSCH.reshape(*kv_LPSCH.shape[:3], -1, width)
