"""Group normalisation of images whose channels come last, with the activation that follows it.

Legend: B batch, S places of an image, C channels, G groups of neighbouring channels.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import KernelError
from fornax.kernels._grouped.call import free_devices
from fornax.kernels._layer.native import declines, is_open
from fornax.kernels._tangent import native_tangent
from fornax.kernels.registry import Implementation, Operation, Work, current_platform, register

__all__ = ["GroupNormCall", "group_norm", "group_norm_operation"]


@dataclass(frozen=True)
class GroupNormCall:
    """One call: what implementations look at when they decline."""

    platform: str
    batch: int
    places: int
    """Of an image: the product of the axes between batch and channels."""
    channels: int
    groups: int
    dtype: str
    activation: Literal["silu"] | None
    devices: int
    """Over which XLA divides what is computed here."""


def group_norm(
    x_BSC: jax.Array,
    scale_C: jax.Array,
    bias_C: jax.Array,
    *,
    groups: int,
    eps: float,
    activation: Literal["silu"] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Normalise each image over its places and the channels of a group (Wu and He 2018).

    y = activation((x - mean) / sqrt(variance + eps) * scale + bias), computed in float32 and
    rounded once. On CPU and one device an image's result has the same bits whatever the batch is;
    so has its gradient. Elsewhere, for other dtypes and without a C++ compiler, formula and
    gradient are left to XLA.

    Args:
        x_BSC: [B, ..., C], with any axes between.
        scale_C: of any floating dtype; computed with as float32.
        bias_C: likewise.
        groups: G, a divisor of C.
        eps: added to the variance.
        activation: `silu`, or None for none.
        implementation: name of one implementation to run, no other.

    Returns:
        y [B, ..., C] in the dtype of x.

    Raises:
        KernelError: arguments that do not go together, another activation, or `implementation`
            cannot run the call.
    """
    if x_BSC.ndim < 2 or scale_C.shape != x_BSC.shape[-1:] or bias_C.shape != scale_C.shape:
        raise KernelError(
            f"group_norm: x{x_BSC.shape}, scale{scale_C.shape} and bias{bias_C.shape} must be "
            "[B, ..., C], [C] and [C]"
        )
    if groups < 1 or scale_C.shape[0] % groups:
        raise KernelError(
            f"group_norm: groups={groups} does not divide {scale_C.shape[0]} channels; use a "
            "divisor"
        )
    if activation not in (None, "silu"):
        raise KernelError(
            f"group_norm: activation={activation!r} is unknown; use 'silu', or None and your own "
            "after it"
        )
    how = _How(groups, float(eps), activation)
    parameters_2C = jnp.stack([scale_C.astype(jnp.float32), bias_C.astype(jnp.float32)])
    return _group_norm(how, implementation, x_BSC, parameters_2C)


@dataclass(frozen=True)
class _How:
    """The numbers of a call."""

    groups: int
    eps: float
    activation: Literal["silu"] | None

    @property
    def numbers(self) -> dict[str, Any]:
        """The attributes of the native calls."""
        return {
            "groups": np.int64(self.groups),
            "eps": np.float32(self.eps),
            "silu": np.bool_(self.activation == "silu"),
        }


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _group_norm(
    how: _How, implementation: str | None, x_BSC: jax.Array, parameters_2C: jax.Array
) -> jax.Array:
    if is_open(x_BSC):
        return _plain(how, x_BSC, parameters_2C)
    return _choose(how, x_BSC, implementation).run(how, x_BSC, parameters_2C)


@_group_norm.defjvp
def _group_norm_jvp(
    how: _How, implementation: str | None, primals: tuple, tangents: tuple
) -> tuple[jax.Array, jax.Array]:
    x_BSC, parameters_2C = primals
    if is_open(x_BSC) or _choose(how, x_BSC, implementation).name != "native":
        return jax.jvp(functools.partial(_plain, how), primals, tangents)
    y_BSC = _group_norm(how, implementation, x_BSC, parameters_2C)
    return y_BSC, _tangent(*tangents, x_BSC, parameters_2C, how=how)


def _choose(
    how: _How, x_BSC: jax.Array, implementation: str | None
) -> Implementation[GroupNormCall]:
    call = GroupNormCall(
        platform=current_platform(),
        batch=x_BSC.shape[0],
        places=math.prod(x_BSC.shape[1:-1]),
        channels=x_BSC.shape[-1],
        groups=how.groups,
        dtype=jnp.dtype(x_BSC.dtype).name,
        activation=how.activation,
        devices=free_devices(),
    )
    return group_norm_operation.choose(call, implementation)


def _plain(how: _How, x: jax.Array, parameters_2C: jax.Array) -> jax.Array:
    """By channel first: a group's few channels as an axis would fill little of a TPU's lanes."""
    B, C = x.shape[0], x.shape[-1]

    def by_group(x_BSC: jax.Array) -> jax.Array:
        means_BGc = jnp.mean(x_BSC, axis=1).reshape(B, how.groups, -1)
        mean_BG1 = jnp.mean(means_BGc, axis=2, keepdims=True)
        return jnp.broadcast_to(mean_BG1, means_BGc.shape).reshape(B, 1, C)

    x_BSC = x.astype(jnp.float32).reshape(B, -1, C)
    x_BSC = x_BSC - by_group(x_BSC)
    y_BSC = x_BSC * jax.lax.rsqrt(by_group(jnp.square(x_BSC)) + how.eps)
    y_BSC = y_BSC * parameters_2C[0] + parameters_2C[1]
    if how.activation == "silu":
        y_BSC = jax.nn.silu(y_BSC)
    return y_BSC.astype(x.dtype).reshape(x.shape)


def _native(how: _How, x: jax.Array, parameters_2C: jax.Array) -> jax.Array:
    x_BSC = x.reshape(x.shape[0], -1, x.shape[-1])
    y_BSC = jax.ShapeDtypeStruct(x_BSC.shape, x.dtype)
    call = jax.ffi.ffi_call("fornax_group_norm", y_BSC, vmap_method="sequential")
    return call(x_BSC, parameters_2C, **how.numbers).reshape(x.shape)


def _native_gradients(
    how: _How, dy: jax.Array, x: jax.Array, parameters_2C: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x_BSC = x.reshape(x.shape[0], -1, x.shape[-1])
    shapes = (
        jax.ShapeDtypeStruct(x_BSC.shape, x.dtype),
        jax.ShapeDtypeStruct(parameters_2C.shape, jnp.float32),
    )
    call = jax.ffi.ffi_call("fornax_group_norm_gradient", shapes, vmap_method="sequential")
    dx_BSC, dparameters_2C = call(x_BSC, dy.reshape(x_BSC.shape), parameters_2C, **how.numbers)
    return dx_BSC.reshape(x.shape), dparameters_2C


_tangent = native_tangent("group_norm_tangent", _plain, _native_gradients)


def _declines(call: GroupNormCall) -> str | None:
    return declines(call.devices, call.dtype, unit="group_norm")


def _benchmark(call: GroupNormCall, run: Callable[..., jax.Array]) -> Callable[[], object]:
    how = _How(call.groups, 1e-5, call.activation)
    keys = jax.random.split(jax.random.key(0), 2)
    x_BSC = jax.random.normal(keys[0], (call.batch, call.places, call.channels), call.dtype)
    parameters_2C = jax.random.normal(keys[1], (2, call.channels))
    work = jax.jit(functools.partial(run, how))
    return lambda: work(x_BSC, parameters_2C)


def _work(call: GroupNormCall) -> Work:
    """An array read and one written."""
    elements = call.batch * call.places * call.channels
    return Work(flops=0.0, bytes=2.0 * elements * jnp.dtype(call.dtype).itemsize, dtype=call.dtype)


group_norm_operation: Operation[GroupNormCall] = register(
    Operation(
        "group_norm",
        (
            Implementation("native", _native, _declines, platform="cpu", steady=True),
            Implementation("xla", _plain, lambda call: None),
        ),
        _benchmark,
        work=_work,
        call=GroupNormCall,
    )
)
