"""Root mean square normalisation whose rows do not depend on each other, to the last bit.

XLA's CPU backend sums a row in an order that depends on how many rows there are (measured: float32
results differ in the last place below 8 rows of 512), so that a request would be answered
differently beside others. The native kernel here sums each row in one order.

Legend: M rows, D width.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import KernelError
from fornax.kernels import _native
from fornax.kernels.registry import current_platform
from fornax.mesh import current_mesh

__all__ = ["rms_norm"]


def rms_norm(x: jax.Array, scale: jax.Array, *, eps: float) -> jax.Array:
    """Return x / sqrt(mean(x^2) + eps) * scale, in float32 (Zhang and Sennrich 2019).

    On CPU and one device a row's result is the same, bit for bit, whatever other rows there are.
    Elsewhere, for other dtypes and without a C++ compiler, the formula is left to XLA. The gradient
    is that of the formula.

    Args:
        x: [..., *normalised].
        scale: [*normalised], of any floating dtype; computed with as float32.
        eps: added to the mean.

    Returns:
        y [..., *normalised] in the dtype of x.

    Raises:
        KernelError: the last axes of x are not those of scale.
    """
    if scale.ndim == 0 or x.shape[max(x.ndim - scale.ndim, 0) :] != scale.shape:
        raise KernelError(f"rms_norm: the last axes of x{x.shape} must be scale's, {scale.shape}")
    return _rms_norm(float(eps), x, scale)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _rms_norm(eps: float, x: jax.Array, scale: jax.Array) -> jax.Array:
    if _declines(x):
        return _plain(eps, x, scale)
    D = math.prod(scale.shape)
    x_MD = x.reshape(-1, D)
    y = jax.ShapeDtypeStruct(x_MD.shape, x.dtype)
    call = jax.ffi.ffi_call("fornax_rms_norm", y, vmap_method="sequential")
    y_MD = call(x_MD, scale.astype(jnp.float32).reshape(D), eps=np.float32(eps))
    return y_MD.reshape(x.shape)


@_rms_norm.defjvp
def _rms_norm_jvp(eps: float, primals: object, tangents: object) -> tuple[jax.Array, jax.Array]:
    return jax.jvp(functools.partial(_plain, eps), primals, tangents)


def _plain(eps: float, x: jax.Array, scale: jax.Array) -> jax.Array:
    axes = tuple(range(x.ndim - scale.ndim, x.ndim))
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=axes, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + eps) * scale.astype(jnp.float32)).astype(x.dtype)


def _declines(x: jax.Array) -> bool:
    """Whether the native kernel cannot take `x`."""
    mesh = current_mesh()
    return (
        current_platform() != "cpu"
        or x.dtype not in (jnp.float32, jnp.bfloat16)
        or x.size == 0
        or (mesh is not None and mesh.size > 1)
        or _native.unavailable("norm") is not None
    )
