"""Grouped products by the native CPU kernel (`_native/grouped.cc`).

Legend: M rows, E groups, K inputs, N outputs.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fornax.kernels import _native
from fornax.kernels._grouped.call import GroupedCall, GroupedProducts
from fornax.kernels._grouped.weight import GroupedWeight

__all__ = ["declines", "native", "of_layer"]


def declines(call: GroupedCall) -> str | None:
    """Say why the native kernel cannot run `call`."""
    if call.dtype not in ("float32", "bfloat16"):
        return f"it computes in float32 or bfloat16, not {call.dtype}"
    if call.devices > 1:
        return f"the mesh in use divides arrays over {call.devices} devices; call it in shard_map"
    return _native.unavailable("grouped")


def _by_group(x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, transposed: bool) -> jax.Array:
    y_MN = jax.ShapeDtypeStruct((x_MK.shape[0], w.shape[1 if transposed else 2]), x_MK.dtype)
    call = jax.ffi.ffi_call("fornax_grouped_matmul", y_MN, vmap_method="sequential")
    return call(x_MK, w, sizes_E, jnp.int32(0), transposed=np.bool_(transposed))


def of_layer(x_MK: jax.Array, w: GroupedWeight, sizes_E: jax.Array) -> jax.Array:
    """Return y [M, N] in the dtype of x, which is rounded to that of the matrices."""
    y_MN = jax.ShapeDtypeStruct((x_MK.shape[0], w.shape[2]), x_MK.dtype)
    call = jax.ffi.ffi_call("fornax_grouped_matmul", y_MN, vmap_method="sequential")
    narrow_MK = x_MK.astype(w.dtype)
    return call(narrow_MK, w.values, sizes_E, w.layer, transposed=np.bool_(False))


def _outer(x_MK: jax.Array, y_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    shape = (sizes_E.shape[0], x_MK.shape[1], y_MN.shape[1])
    dw_EKN = jax.ShapeDtypeStruct(shape, x_MK.dtype)
    return jax.ffi.ffi_call("fornax_grouped_outer", dw_EKN, vmap_method="sequential")(
        x_MK, y_MN, sizes_E
    )


native = GroupedProducts(_by_group, _outer)
