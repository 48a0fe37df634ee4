"""A weight laid out once for products that only ever read it, alone or one of a stack of layers.

Legend: L layers, M rows, K inputs (flattened), N outputs (flattened), G groups of the inputs.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import KernelError
from fornax.kernels._packed import native, plain
from fornax.kernels._packed.formats import FORMATS, Parts, Precision, dequantize

__all__ = ["PackedWeight"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A weight for `kernels.linear`, made by `kernels.pack`. It has no gradient.

    A pytree: pass it to a compiled function as an argument. In a scan over layers keep the whole
    stack outside the loop and take `weight.at(layer)` inside, so that nothing is copied.
    """

    values: jax.Array
    """[L, ...]: layers, laid out as the implementation wants them."""
    scales: jax.Array | None
    """[L, ...]: what codes of few bits are multiplied by, float32 or (mxfp4) e8m0 as uint8."""
    zeros: jax.Array | None
    """[L, ...] uint8: which code is 0, where that is not the same for all."""
    layer: jax.Array | None
    """int32: which layer of the stack this is; None for the stack itself."""
    precision: Precision = dataclasses.field(metadata={"static": True})
    group: int | None = dataclasses.field(metadata={"static": True})
    """Inputs that share a scale; None for all of an output's, or where there are no scales."""
    implementation: Literal["native", "plain"] = dataclasses.field(metadata={"static": True})
    inputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """Sizes of the axes summed over."""
    outputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """Sizes of the axes produced."""
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    """Dtype of the array that was packed."""
    stacked: bool = dataclasses.field(metadata={"static": True})
    """Whether the array that was packed had an axis of layers."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array this stands for."""
        whole = self.stacked and self.layer is None
        return (*((self.values.shape[0],) if whole else ()), *self.inputs, *self.outputs)

    @property
    def ndim(self) -> int:
        """Number of axes of the array this stands for."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers as they are stored."""
        return sum(each.size * each.dtype.itemsize for each in jax.tree.leaves(self._parts))

    def at(self, layer: jax.Array | int) -> "PackedWeight":
        """Return one layer of a stack, without copying it.

        Raises:
            KernelError: this is not a stack.
        """
        if not self.stacked or self.layer is not None:
            raise KernelError(f"weight{self.shape} is one layer; at() takes a layer from a stack")
        return dataclasses.replace(self, layer=jnp.asarray(layer, jnp.int32))

    def linear(self, x: jax.Array, inputs: int = 1) -> jax.Array:
        """Sum over the last `inputs` axes of x and the first `inputs` of this weight.

        With the native implementation a row's result is the same, bit for bit, whatever other rows
        are in x and however many threads run.

        Args:
            x: [..., *in], float32 or bfloat16.
            inputs: how many axes are summed over.

        Returns:
            y [..., *out] in the dtype of x.

        Raises:
            KernelError: a stack without a layer, or shapes or dtypes that do not fit.
        """
        self._check(x, inputs)
        if self.implementation == "native":
            return self.linears(x, [self], inputs)[0]
        y_MN = plain.linear(self._rows(x), self._parts, self._index(), self.precision, self.group)
        return y_MN.reshape(*x.shape[: x.ndim - inputs], *self.outputs)

    @classmethod
    def linears(
        cls, x: jax.Array, weights: "Sequence[PackedWeight]", inputs: int
    ) -> list[jax.Array]:
        """Return `linear` of x for each weight; native ones that are alike share a call."""
        first = weights[0]
        kinds = {(weight.implementation, weight.precision, weight.group) for weight in weights}
        if kinds != {("native", first.precision, first.group)}:
            return [weight.linear(x, inputs) for weight in weights]
        for weight in weights:
            weight._check(x, inputs)
        lead = x.shape[: x.ndim - inputs]
        given = [(w._parts, w._index(), math.prod(w.outputs)) for w in weights]
        found = native.linears(first._rows(x), given, first.precision)
        return [
            y_MN.reshape(*lead, *weight.outputs)
            for y_MN, weight in zip(found, weights, strict=True)
        ]

    def unpack(self) -> jax.Array:
        """Return the array this stands for, as precise as it is stored, in its first dtype."""
        parts, K, N = self._parts, math.prod(self.inputs), math.prod(self.outputs)
        if self.layer is not None or not self.stacked:
            parts = jax.tree.map(lambda each: each[self._index()][None], parts)
        if self.implementation == "native":
            found = native.codes(parts, self.precision, K, N)
        else:
            found = plain.codes(parts, self.precision, K)
        w_LKN = found.values
        if self.precision in FORMATS:
            w_LKN = dequantize(found, self.precision, self.group)
        return w_LKN.astype(self.dtype).reshape(self.shape)

    def _rows(self, x: jax.Array) -> jax.Array:
        """Return x as [M, K]."""
        lead = x.shape[: x.ndim - len(self.inputs)]
        return x.reshape(math.prod(lead), math.prod(self.inputs))

    @property
    def _parts(self) -> Parts:
        return Parts(self.values, self.scales, self.zeros)

    def _index(self) -> jax.Array:
        return jnp.int32(0) if self.layer is None else self.layer

    def _check(self, x: jax.Array, inputs: int) -> None:
        if self.stacked and self.layer is None:
            raise KernelError(f"linear: weight{self.shape} is a stack; take a layer with at()")
        if inputs != len(self.inputs) or x.shape[max(x.ndim - inputs, 0) :] != self.inputs:
            raise KernelError(
                f"linear: the last {inputs} axes of x{x.shape} must equal the {len(self.inputs)} "
                f"input axes {self.inputs} that the weight was packed with"
            )
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            raise KernelError(
                f"linear: x is {x.dtype}; a packed weight takes float32 or bfloat16, so cast x"
            )
