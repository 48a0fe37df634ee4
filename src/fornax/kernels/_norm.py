"""Root mean square normalisation whose rows do not depend on each other, to the last bit.

XLA's CPU backend sums a row in an order that depends on how many rows there are (measured: float32
results differ in the last place below 8 rows of 512), so that a request would be answered
differently beside others. The native kernel here sums each row in one order.

Legend: M rows, D width.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import KernelError
from fornax.kernels._layer.native import declines, is_open
from fornax.kernels._stack import LayerStack
from fornax.kernels._tangent import native_tangent
from fornax.kernels.registry import Implementation, Operation, Work, current_platform, register
from fornax.mesh import current_mesh

__all__ = [
    "AddNormCall",
    "NormCall",
    "StackedScale",
    "add_rms_norm",
    "add_rms_norm_operation",
    "rms_norm",
    "rms_norm_operation",
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StackedScale(LayerStack):
    """The scales of all layers, [L, *normalised], of which `rms_norm` reads one as it is: a slice
    would be widened to float32 too."""


@dataclass(frozen=True)
class NormCall:
    """One call of `rms_norm`: what implementations look at when they decline."""

    platform: str
    rows: int
    width: int
    dtype: str
    scale_dtype: str
    """Of a stack's; a scale of its own is widened to float32 first."""
    devices: int
    """Of the mesh."""


@dataclass(frozen=True)
class AddNormCall(NormCall):
    """One call of `add_rms_norm`."""


def rms_norm(
    x: jax.Array,
    scale: jax.Array | StackedScale,
    *,
    eps: float,
    offset: float = 0.0,
    divisor: float = 1.0,
    implementation: str | None = None,
) -> jax.Array:
    """Return x / sqrt(mean(x^2) + eps) * (scale + offset) / divisor (Zhang and Sennrich 2019).

    Computed in float32. On CPU and one device a row's result is the same, bit for bit, whatever
    other rows there are, and so is the row of x's gradient. Elsewhere, for other dtypes and
    without a C++ compiler, formula and gradient are left to XLA.

    Args:
        x: [..., *normalised].
        scale: [*normalised], of any floating dtype; computed with as float32. Or a layer of a
            stack.
        eps: added to the mean.
        offset: added to the scale.
        divisor: what the scale is divided by after that.
        implementation: name of one implementation to run, no other.

    Returns:
        y [..., *normalised] in the dtype of x.

    Raises:
        KernelError: the last axes of x are not those of scale, or `implementation` cannot run the
            call.
    """
    _check("rms_norm", x, scale)
    how = _How(float(eps), float(offset), float(divisor))
    if isinstance(scale, StackedScale):
        return _run_norm(how, implementation, x, scale)
    return _rms_norm(how, implementation, x, scale)


def add_rms_norm(
    x: jax.Array,
    branch: jax.Array,
    scale: jax.Array | StackedScale,
    *,
    eps: float,
    offset: float = 0.0,
    divisor: float = 1.0,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return x + branch, and `rms_norm` of it: what follows a branch of a decoder's layer.

    One native call on one CPU, and the two operations elsewhere, as `rms_norm` says.

    Args:
        x: [..., *normalised].
        branch: of the shape and dtype of x.
        scale: see `rms_norm`, and so for eps, offset, divisor and implementation.

    Returns:
        The sum and y, both [..., *normalised] in the dtype of x.

    Raises:
        KernelError: x and branch differ, the last axes of x are not those of scale, or
            `implementation` cannot run the call.
    """
    _check("add_rms_norm", x, scale)
    if (x.shape, x.dtype) != (branch.shape, branch.dtype):
        raise KernelError(
            f"add_rms_norm: x{x.shape} {x.dtype} and branch{branch.shape} {branch.dtype} must be "
            "alike; cast or reshape the branch"
        )
    how = _How(float(eps), float(offset), float(divisor))
    if isinstance(scale, StackedScale):
        return _run_add_norm(how, implementation, x, branch, scale)
    return _add_rms_norm(how, implementation, x, branch, scale)


def _check(name: str, x: jax.Array, scale: jax.Array | StackedScale) -> None:
    if scale.ndim == 0 or x.shape[max(x.ndim - scale.ndim, 0) :] != scale.shape:
        raise KernelError(f"{name}: the last axes of x{x.shape} must be scale's, {scale.shape}")


@dataclass(frozen=True)
class _How:
    """The numbers of a call."""

    eps: float
    offset: float
    divisor: float

    def of(self, scale: jax.Array) -> jax.Array:
        """The scale that is multiplied with."""
        wide = scale.astype(jnp.float32)
        wide = wide + self.offset if self.offset else wide
        return wide / self.divisor if self.divisor != 1.0 else wide

    @property
    def numbers(self) -> dict[str, np.float32]:
        """The attributes of the native calls."""
        return {name: np.float32(value) for name, value in vars(self).items()}


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _rms_norm(how: _How, implementation: str | None, x: jax.Array, scale: jax.Array) -> jax.Array:
    return _run_norm(how, implementation, x, scale)


@_rms_norm.defjvp
def _rms_norm_jvp(
    how: _How, implementation: str | None, primals: tuple, tangents: tuple
) -> tuple[jax.Array, jax.Array]:
    x, scale = primals
    if is_open(x) or _choose(rms_norm_operation, x, scale, implementation).name != "native":
        return jax.jvp(functools.partial(_plain, how), primals, tangents)
    y = _rms_norm(how, implementation, x, scale)
    return y, _tangent(*tangents, x, scale, how=how)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _add_rms_norm(
    how: _How, implementation: str | None, x: jax.Array, branch: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _run_add_norm(how, implementation, x, branch, scale)


@_add_rms_norm.defjvp
def _add_rms_norm_jvp(
    how: _How, implementation: str | None, primals: tuple, tangents: tuple
) -> tuple:
    x, branch, scale = primals
    if is_open(x) or _choose(add_rms_norm_operation, x, scale, implementation).name != "native":
        return jax.jvp(functools.partial(_plain_sum, how), primals, tangents)
    dx, dbranch, dscale = tangents
    total, y = _add_rms_norm(how, implementation, x, branch, scale)
    dtotal = dx + dbranch
    return (total, y), (dtotal, _tangent(dtotal, dscale, total, scale, how=how))


def _run_norm(
    how: _How, implementation: str | None, x: jax.Array, scale: jax.Array | StackedScale
) -> jax.Array:
    if is_open(x):
        return _plain(how, x, scale)
    return _choose(rms_norm_operation, x, scale, implementation).run(how, x, scale)


def _run_add_norm(
    how: _How,
    implementation: str | None,
    x: jax.Array,
    branch: jax.Array,
    scale: jax.Array | StackedScale,
) -> tuple[jax.Array, jax.Array]:
    if is_open(x):
        return _plain_sum(how, x, branch, scale)
    return _choose(add_rms_norm_operation, x, scale, implementation).run(how, x, branch, scale)


def _choose(
    operation: "Operation[Any]",
    x: jax.Array,
    scale: jax.Array | StackedScale,
    implementation: str | None,
) -> Implementation[NormCall]:
    mesh = current_mesh()
    width = math.prod(scale.shape)
    assert operation.call is not None
    call = operation.call(
        platform=current_platform(),
        rows=x.size // width,
        width=width,
        dtype=jnp.dtype(x.dtype).name,
        scale_dtype=jnp.dtype(scale.dtype).name if isinstance(scale, StackedScale) else "float32",
        devices=1 if mesh is None else mesh.size,
    )
    return operation.choose(call, implementation)


def _alone(scale: jax.Array | StackedScale) -> StackedScale:
    """The scale as the only layer of a stack, unless it is in one."""
    if isinstance(scale, StackedScale):
        return scale
    return StackedScale(values=scale.astype(jnp.float32)[None], layer=jnp.int32(0))


def _native_norm(how: _How, x: jax.Array, given: jax.Array | StackedScale) -> jax.Array:
    scale, D = _alone(given), math.prod(given.shape)
    x_MD = x.reshape(-1, D)
    y = jax.ShapeDtypeStruct(x_MD.shape, x.dtype)
    call = jax.ffi.ffi_call("fornax_rms_norm", y, vmap_method="sequential")
    return call(x_MD, scale.values.reshape(-1, D), scale.layer, **how.numbers).reshape(x.shape)


def _native_add_norm(
    how: _How, x: jax.Array, branch: jax.Array, given: jax.Array | StackedScale
) -> tuple[jax.Array, jax.Array]:
    scale, D = _alone(given), math.prod(given.shape)
    x_MD = x.reshape(-1, D)
    y = jax.ShapeDtypeStruct(x_MD.shape, x.dtype)
    call = jax.ffi.ffi_call("fornax_add_rms_norm", (y, y), vmap_method="sequential")
    scales_LD = scale.values.reshape(-1, D)
    sum_MD, y_MD = call(x_MD, branch.reshape(-1, D), scales_LD, scale.layer, **how.numbers)
    return sum_MD.reshape(x.shape), y_MD.reshape(x.shape)


def _plain_sum(
    how: _How, x: jax.Array, branch: jax.Array, scale: jax.Array | StackedScale
) -> tuple[jax.Array, jax.Array]:
    total = x + branch
    return total, _plain(how, total, scale)


def _plain(how: _How, x: jax.Array, scale: jax.Array | StackedScale) -> jax.Array:
    scale = scale.array() if isinstance(scale, StackedScale) else scale
    axes = tuple(range(x.ndim - scale.ndim, x.ndim))
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=axes, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + how.eps) * how.of(scale)).astype(x.dtype)


def _native_gradients(
    how: _How, dy: jax.Array, x: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    D = math.prod(scale.shape)
    x_MD, alone = x.reshape(-1, D), _alone(scale)
    shapes = (jax.ShapeDtypeStruct(x_MD.shape, x.dtype), jax.ShapeDtypeStruct((D,), jnp.float32))
    call = jax.ffi.ffi_call("fornax_rms_norm_gradient", shapes, vmap_method="sequential")
    scales_LD = alone.values.reshape(-1, D)
    dx_MD, dscale_D = call(x_MD, dy.reshape(-1, D), scales_LD, alone.layer, **how.numbers)
    return dx_MD.reshape(x.shape), dscale_D.reshape(scale.shape).astype(scale.dtype)


_tangent = native_tangent("rms_norm_tangent", _plain, _native_gradients)


def _declines(call: NormCall) -> str | None:
    return declines(call.devices, call.dtype, call.scale_dtype, unit="norm")


def _benchmark(arrays: int) -> Callable[[NormCall, Callable[..., Any]], Callable[[], object]]:
    """What runs a call on this many arrays of rows."""

    def prepare(call: NormCall, run: Callable[..., Any]) -> Callable[[], object]:
        shape = arrays, call.rows, call.width
        rows = jax.random.normal(jax.random.key(0), shape, call.dtype)
        scales_LD = jnp.ones((2, call.width), call.scale_dtype)
        work = jax.jit(functools.partial(run, _How(1e-6, 0.0, 1.0)))
        scale = StackedScale(values=scales_LD).at(1)
        return lambda: work(*rows, scale)

    return prepare


def _work(arrays: int) -> Callable[[NormCall], Work]:
    """A call that reads and writes this many arrays of rows."""

    def count(call: NormCall) -> Work:
        scale = call.width * jnp.dtype(call.scale_dtype).itemsize
        moved = 2 * arrays * call.rows * call.width * jnp.dtype(call.dtype).itemsize
        return Work(flops=0.0, bytes=float(moved + scale), dtype=call.dtype)

    return count


rms_norm_operation: Operation[NormCall] = register(
    Operation(
        "rms_norm",
        (
            Implementation("native", _native_norm, _declines, platform="cpu", steady=True),
            Implementation("xla", _plain, lambda call: None),
        ),
        _benchmark(1),
        work=_work(1),
        call=NormCall,
    )
)

add_rms_norm_operation: Operation[AddNormCall] = register(
    Operation(
        "add_rms_norm",
        (
            Implementation("native", _native_add_norm, _declines, platform="cpu", steady=True),
            Implementation("xla", _plain_sum, lambda call: None),
        ),
        _benchmark(2),
        work=_work(2),
        call=AddNormCall,
    )
)
