"""The linear layer of every projection, with a gradient that XLA's CPU backend compiles well.

JAX's own rule for the gradient of the weights contracts the cotangent with the input in an order
that makes that backend rewrite the larger of both, and all that was fused into it, transposed,
element by element. The rule here contracts so that the smaller one is transposed: a whole training
step of 36M parameters takes a quarter less processor time (docs/guides/kernels.md). A native
product copies neither.

The forward product stays an ordinary `dot_general`, which remat policies and quantization know;
only the tangents are a primitive of their own, for its transposes' sake. Where the sums are wider
than the result, the result carries the name `LINEAR_OUTPUT`, so that a policy can keep it instead.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from fornax.config.errors import KernelError
from fornax.kernels import _matmul
from fornax.kernels._checkpoint_name import name_in_rule, wants_bits
from fornax.kernels._packed import PackedWeight
from fornax.kernels._products import over_rows, sum_products
from fornax.kernels.registry import current_platform

__all__ = ["LINEAR_OUTPUT", "Weight", "linear", "linears"]

LINEAR_OUTPUT = "linear_output"
"""Name of a product's result for `jax.checkpoint_policies`, where its sums are wider."""


@runtime_checkable
class Weight(Protocol):
    """A weight that knows its own product: packed, quantized, or with adapters around another."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that it stands for: [*in, *out]."""
        ...

    @property
    def dtype(self) -> Any:
        """Dtype of the array that it stands for."""
        ...

    def linear(self, x: jax.Array, inputs: int) -> jax.Array:
        """Return what `kernels.linear(x, array, inputs=inputs)` would, in the dtype of x."""
        ...


def linear(x: jax.Array, w: jax.Array | Weight, *, inputs: int = 1) -> jax.Array:
    """Sum over the last `inputs` axes of x and the first `inputs` axes of w.

    Args:
        x: [..., *in], in the same dtype as w if that is an array.
        w: [*in, *out], or an object that knows its own product.
        inputs: how many axes are summed over.

    Returns:
        y [..., *out] in the dtype of x.

    Raises:
        KernelError: shapes or dtypes that do not fit together.
    """
    if isinstance(w, Weight):
        return w.linear(x, inputs)
    if not 0 < inputs <= min(x.ndim, w.ndim) or x.shape[-inputs:] != w.shape[:inputs]:
        raise KernelError(
            f"linear: the last {inputs} axes of x{x.shape} must equal the first {inputs} of "
            f"w{w.shape}"
        )
    if x.dtype != w.dtype:
        raise KernelError(f"linear: x is {x.dtype} and w {w.dtype}; cast both to one dtype")
    if current_platform() == "cpu":
        return _linear(inputs, wants_bits(x), x, w)
    return lax.dot_general(x, w, (_axes(x, inputs), ((), ())))


def linears(
    x: jax.Array, weights: Sequence[jax.Array | Weight], *, inputs: int = 1
) -> list[jax.Array]:
    """Return `linear` of one x with each of several weights.

    Packed weights share one native call: x is prepared once, and threads meet once.

    Args:
        x: [..., *in].
        weights: what `linear` takes, each [*in, *out] with outputs of its own.
        inputs: how many axes are summed over.

    Raises:
        KernelError: shapes or dtypes that do not fit together.
    """
    packed = [w for w in weights if isinstance(w, PackedWeight)]
    if len(weights) > 1 and len(packed) == len(weights):
        return PackedWeight.linears(x, packed, inputs)
    return [linear(x, w, inputs=inputs) for w in weights]


def _product(x: jax.Array, w: jax.Array, *, inputs: int) -> jax.Array:
    return sum_products(x, w, inputs)


def _axes(x: jax.Array, inputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _linear(inputs: int, bits: bool, x: jax.Array, w: jax.Array) -> jax.Array:
    del bits
    return _product(x, w, inputs=inputs)


def _linear_jvp(inputs: int, bits: bool, primals: Any, tangents: Any) -> tuple[jax.Array, object]:
    """Of an argument that is not differentiated, a frozen weight say, no product is made."""
    x, w = primals
    dx, dw = tangents
    y = name_in_rule(_product(x, w, inputs=inputs), LINEAR_OUTPUT, bits=bits)
    parts = []
    if not isinstance(dx, SymbolicZero):
        parts.append(_tangent.bind(dx, w, inputs=inputs))
    if not isinstance(dw, SymbolicZero):
        parts.append(_tangent.bind(x, dw, inputs=inputs))
    return y, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(y)


_linear.defjvp(_linear_jvp, symbolic_zeros=True)


def _x_cotangent(dy: jax.Array, x: object, w: jax.Array, *, inputs: int) -> jax.Array:
    return sum_products(dy, w, w.ndim - inputs, transposed=True)


def _w_cotangent(dy: jax.Array, x: jax.Array, w: Any, *, inputs: int) -> jax.Array:
    shape = w.aval.shape
    lead = x.ndim - inputs
    sides = math.prod(shape[:inputs]), math.prod(shape[inputs:])
    rows, form = math.prod(x.shape[:lead]), _matmul.LEFT_TRANSPOSED
    if _matmul.runs(x.dtype, rows, *sides, form=form) or sides[0] <= sides[1]:
        return over_rows(x, dy, lead)
    dw = over_rows(dy, x, lead)
    outputs = len(shape) - inputs
    return lax.transpose(dw, (*range(outputs, len(shape)), *range(outputs)))


def _batch(arrays: Any, dims: Any, *, inputs: int) -> tuple[jax.Array, int]:
    return jax.vmap(functools.partial(_product, inputs=inputs), in_axes=tuple(dims))(*arrays), 0


_tangent = Primitive("linear_tangent")
"""Like `_product`, linear in both arguments, with transposes that suit XLA's CPU backend."""
_tangent.def_impl(_product)
_tangent.def_abstract_eval(
    lambda x, w, *, inputs: jax.core.ShapedArray(
        (*x.shape[: x.ndim - inputs], *w.shape[inputs:]), x.dtype
    )
)
mlir.register_lowering(_tangent, mlir.lower_fun(_product, multiple_results=False))
ad.defbilinear(_tangent, _x_cotangent, _w_cotangent)
batching.primitive_batchers[_tangent] = _batch
