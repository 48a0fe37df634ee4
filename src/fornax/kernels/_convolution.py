"""Convolutions of images and videos whose channels come last.

Legend: B batch, C channels in, N channels out, K = window times C.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from fornax.config.errors import KernelError
from fornax.kernels import _matmul, _native
from fornax.kernels._grouped.call import free_devices
from fornax.kernels._layer.native import is_open
from fornax.kernels._linear import LINEAR_OUTPUT, linear
from fornax.kernels.registry import Implementation, Operation, Work, current_platform, register

__all__ = ["ConvolutionCall", "convolution", "convolution_operation"]

_FEWEST = 16
"""Channels in or out below which a tile of the product is mostly padding."""


@dataclass(frozen=True)
class ConvolutionCall:
    """One call: what implementations look at when they decline."""

    platform: str
    batch: int
    space: tuple[int, ...]
    """Of the input."""
    window: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    channels: int
    outputs: int
    dtype: str
    bias: bool
    devices: int
    """Over which XLA divides what is computed here."""

    def __post_init__(self) -> None:
        """Make tuples of what another process sent as lists."""
        for name in ("space", "window", "stride"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "padding", tuple((first, last) for first, last in self.padding))

    @property
    def out(self) -> tuple[int, ...]:
        """Axes of the result between batch and channels."""
        sizes = zip(self.space, self.window, self.stride, self.padding, strict=True)
        return tuple((n + sum(pad) - w) // s + 1 for n, w, s, pad in sizes)


def convolution(
    x: jax.Array,
    kernel: jax.Array,
    bias_N: jax.Array | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: Sequence[tuple[int, int]] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiply each window of an image or video with a kernel.

    y[b, i] = sum_(w, c) x[b, i stride + w - before, c] kernel[w, c] + bias, as cross-correlation,
    with zeros outside of x. A convolution that is causal over frames has (window - 1, 0) as their
    padding. On one CPU with AVX2 it is native in bfloat16 and float32: sums and bias are float32,
    rounded once, and an image's result has the same bits whatever the batch is; so are its
    gradients, but for that of x where the stride is more than 1. Elsewhere it is XLA's, which
    rounds the sum to the dtype of x before it adds the bias.

    Args:
        x: [B, H, W, C], or [B, E, H, W, C] with E frames.
        kernel: [h, w, C, N], or [e, h, w, C, N], of any floating dtype; it is rounded to that of x
            where it is read, and its gradient to its own.
        bias_N: of any floating dtype; None for none.
        stride: of the window, for all axes or for each.
        padding: zeros before and after each axis; None for the window's size less one, half of it
            before and the rest after: of odd windows with stride 1 the result has the size of x.
        implementation: name of one implementation to run, no other.

    Returns:
        y [B, ..., N] in the dtype of x.

    Raises:
        KernelError: arguments that do not go together, or `implementation` cannot run the call.
    """
    axes = x.ndim - 2
    if axes not in (2, 3) or kernel.ndim != x.ndim or kernel.shape[-2] != x.shape[-1]:
        raise KernelError(
            f"convolution: x{x.shape} and kernel{kernel.shape} must be [B, H, W, C] and "
            "[h, w, C, N], or [B, E, H, W, C] and [e, h, w, C, N]"
        )
    if not all(jnp.issubdtype(each.dtype, jnp.floating) for each in (x, kernel)):
        raise KernelError(
            f"convolution: x is {x.dtype} and the kernel {kernel.dtype}; use floating dtypes"
        )
    if bias_N is not None and bias_N.shape != kernel.shape[-1:]:
        raise KernelError(f"convolution: bias{bias_N.shape} must be {kernel.shape[-1:]}")
    strides = (stride,) * axes if isinstance(stride, int) else tuple(stride)
    window = kernel.shape[:axes]
    pads = tuple(((w - 1) // 2, w // 2) for w in window) if padding is None else tuple(padding)
    if len(strides) != axes or len(pads) != axes or min(strides) < 1 or min(map(min, pads)) < 0:
        raise KernelError(
            f"convolution: stride={stride} and padding={padding} must be {axes} numbers of at "
            "least 1, and as many pairs of at least 0"
        )
    call = ConvolutionCall(
        platform=current_platform(),
        batch=x.shape[0],
        space=x.shape[1:-1],
        window=window,
        stride=strides,
        padding=pads,
        channels=x.shape[-1],
        outputs=kernel.shape[-1],
        dtype=jnp.dtype(x.dtype).name,
        bias=bias_N is not None,
        devices=free_devices(),
    )
    if not is_open(x) and min(call.out) < 1:
        raise KernelError(
            f"convolution: a window of {window} does not fit x{x.shape} with padding={pads}; pad "
            "more, or use a smaller window"
        )
    how = _How(strides, pads)
    if is_open(x, kernel):
        return _plain(how, x, kernel, bias_N)
    y = convolution_operation.choose(call, implementation).run(how, x, kernel, bias_N)
    return checkpoint_name(y, LINEAR_OUTPUT)  # a product, for policies of rematerialisation


@dataclass(frozen=True)
class _How:
    """The numbers of a call."""

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    turned: bool = False
    """Whether the kernel is [..., N, C] and turned around, as that of an input's gradient is."""

    @property
    def lead(self) -> tuple[int, ...]:
        """Axes that make a video of one frame of an image."""
        return (1,) * (3 - len(self.stride))

    @property
    def numbers(self) -> dict[str, np.ndarray]:
        """The numbers that all native calls take."""
        before = (0,) * len(self.lead) + tuple(first for first, _ in self.padding)
        return {
            "stride": np.array((*self.lead, *self.stride), np.int64),
            "before": np.array(before, np.int64),
        }

    def video(self, x: jax.Array) -> jax.Array:
        """`x` as a video, which the native calls take."""
        return x.reshape(x.shape[0], *self.lead, *x.shape[1:])


def _turned(how: _How, kernel: jax.Array) -> jax.Array:
    """The kernel, turned around if it is to be."""
    axes = range(len(how.stride))
    return jnp.swapaxes(jnp.flip(kernel, axes), -1, -2) if how.turned else kernel


def _plain(how: _How, x: jax.Array, kernel: jax.Array, bias_N: jax.Array | None) -> jax.Array:
    axes, kernel = len(how.stride), _turned(how, kernel).astype(x.dtype)
    letters = "DHW"[-axes:]
    pointwise = kernel.shape[:axes] == how.stride == (1,) * axes
    if pointwise and how.padding == ((0, 0),) * axes:
        # On CPU the kernel's gradient takes a third of the time.
        y = linear(x, kernel.reshape(kernel.shape[axes:]))
    else:
        y = jax.lax.conv_general_dilated(
            x,
            kernel,
            how.stride,
            how.padding,
            dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        )
    if bias_N is None:
        return y
    # In float32, so that the bias's gradient, a sum over all places, is too.
    return (y.astype(jnp.float32) + bias_N.astype(jnp.float32)).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _native_run(how: _How, x: jax.Array, kernel: jax.Array, bias_N: jax.Array | None) -> jax.Array:
    B, *out, N = jax.eval_shape(functools.partial(_plain, how), x, kernel, None).shape
    kernel = kernel.astype(_kernel_dtype(x.dtype, kernel.dtype))
    y = jax.ShapeDtypeStruct((B, *how.lead, *out, N), x.dtype)
    call = jax.ffi.ffi_call(f"fornax_{_unit_of(x.dtype)}", y, vmap_method="sequential")
    bias = jnp.zeros((0,)) if bias_N is None else bias_N.astype(jnp.float32)
    video = kernel.reshape(*how.lead, *kernel.shape)
    found = call(how.video(x), video, bias, turned=how.turned, **how.numbers)
    return found.reshape(B, *out, N)


def _native_jvp(how: _How, primals: Any, tangents: Any) -> tuple[jax.Array, object]:
    """Of an argument that is not differentiated, a frozen kernel say, nothing is computed."""
    x, kernel, _ = primals
    dx, dkernel, dbias_N = tangents
    y = _native_run(how, *primals)
    parts = []
    if not isinstance(dx, SymbolicZero):
        parts.append(_tangent.bind(dx, kernel, how=how))
    if not isinstance(dkernel, SymbolicZero):
        parts.append(_tangent.bind(x, dkernel, how=how))
    if not (dbias_N is None or isinstance(dbias_N, SymbolicZero)):
        wide = jnp.broadcast_to(dbias_N.astype(jnp.float32), y.shape)
        parts.append(wide.astype(y.dtype))
    return y, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(y)


_native_run.defjvp(_native_jvp, symbolic_zeros=True)


def _product(x: jax.Array, kernel: jax.Array, *, how: _How) -> jax.Array:
    return _plain(how, x, kernel, None)


def _x_cotangent(dy: jax.Array, x: Any, kernel: jax.Array, *, how: _How) -> jax.Array:
    """A convolution of dy with the kernel turned around, where the stride is 1."""
    axes = len(how.stride)
    pads = [(w - 1 - before, w - 1 - after) for w, (before, after) in
            zip(kernel.shape[:axes], how.padding, strict=True)]  # fmt: skip
    if set(how.stride) != {1} or min(map(min, pads)) < 0:
        like = jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype)
        [dx] = jax.linear_transpose(lambda x: _product(x, kernel, how=how), like)(dy)
        return dx
    return _native_run(_How(how.stride, tuple(pads), not how.turned), dy, kernel, None)


def _kernel_cotangent(dy: jax.Array, x: jax.Array, kernel: Any, *, how: _How) -> jax.Array:
    shape = jax.eval_shape(functools.partial(_turned, how), kernel.aval).shape
    dtype = _kernel_dtype(x.dtype, kernel.aval.dtype)
    dkernel = jax.ShapeDtypeStruct((*how.lead, *shape), dtype)
    target = f"fornax_{_unit_of(x.dtype)}_kernel_gradient"
    call = jax.ffi.ffi_call(target, dkernel, vmap_method="sequential")
    found = call(how.video(x), how.video(dy), **how.numbers).reshape(shape)
    return _turned(how, found).astype(kernel.aval.dtype)


def _batch(arrays: Any, dims: Any, *, how: _How) -> tuple[jax.Array, int]:
    return jax.vmap(functools.partial(_product, how=how), in_axes=tuple(dims))(*arrays), 0


_tangent = Primitive("convolution_tangent")
"""XLA's convolution, linear in both arguments, with transposes that are native."""
_tangent.def_impl(_product)
_tangent.def_abstract_eval(
    lambda x, kernel, *, how: jax.core.ShapedArray(
        jax.eval_shape(functools.partial(_product, how=how), x, kernel).shape, x.dtype
    )
)
mlir.register_lowering(_tangent, mlir.lower_fun(_product, multiple_results=False))
ad.defbilinear(_tangent, _x_cotangent, _kernel_cotangent)
batching.primitive_batchers[_tangent] = _batch


def _unit_of(dtype: DTypeLike) -> str | None:
    """The unit that convolves on this processor; None where XLA does."""
    unit = _matmul.unit_of(dtype, _matmul.LEFT_TRANSPOSED)  # native in float32 everywhere
    return unit and unit.replace("matmul", "convolution")


def _kernel_dtype(x: DTypeLike, kernel: DTypeLike) -> DTypeLike:
    """That in which the unit takes a kernel, and returns its gradient."""
    wide = _unit_of(x) == "convolution" and jnp.dtype(kernel) == jnp.float32
    return kernel if wide else x


def _declines(call: ConvolutionCall) -> str | None:
    unit = _unit_of(call.dtype)
    if unit is None:
        return f"it convolves bfloat16 and float32 with AVX2, not {call.dtype} here"
    if min(call.channels, call.outputs) < _FEWEST:
        return f"it takes {_FEWEST} channels or more, not {min(call.channels, call.outputs)}"
    if unit == "float32_convolution" and _work(call).flops < 2 * _matmul.LEAST:
        return f"it takes {_matmul.LEAST:,} multiplications or more"
    if call.devices != 1:
        return f"XLA divides the call over {call.devices} devices"
    return _native.unavailable(unit)


def _benchmark(call: ConvolutionCall, run: Callable[..., jax.Array]) -> Callable[[], object]:
    how = _How(call.stride, call.padding)
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (call.batch, *call.space, call.channels), call.dtype)
    shape = (*call.window, call.channels, call.outputs)
    kernel = jax.random.normal(keys[1], shape, call.dtype)
    bias_N = jnp.ones(call.outputs) if call.bias else None
    work = jax.jit(functools.partial(run, how))
    return lambda: work(x, kernel, bias_N)


def _work(call: ConvolutionCall) -> Work:
    inner, places = math.prod(call.window) * call.channels, call.batch * math.prod(call.out)
    read = call.batch * math.prod(call.space) * call.channels + inner * call.outputs
    size = jnp.dtype(call.dtype).itemsize
    return Work(
        flops=2.0 * places * inner * call.outputs,
        bytes=float(size * (read + places * call.outputs)),
        dtype=call.dtype,
    )


convolution_operation: Operation[ConvolutionCall] = register(
    Operation(
        "convolution",
        (
            Implementation("native", _native_run, _declines, platform="cpu", steady=True),
            Implementation("xla", _plain, lambda call: None),
        ),
        _benchmark,
        work=_work,
        call=ConvolutionCall,
    )
)
