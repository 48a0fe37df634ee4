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

__all__ = ["PackedWeight", "Precision"]

Precision = Literal["float32", "bfloat16", "int8"]


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
    """[L, ...] float32: what int8 values are multiplied by."""
    layer: jax.Array | None
    """int32: which layer of the stack this is; None for the stack itself."""
    precision: Precision = dataclasses.field(metadata={"static": True})
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
        return sum(a.size * a.dtype.itemsize for a in (self.values, self.scales) if a is not None)

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
        run = native.linear if self.implementation == "native" else plain.linear
        y_MN = run(self._rows(x), *self._parts())
        return y_MN.reshape(*x.shape[: x.ndim - inputs], *self.outputs)

    @classmethod
    def linears(
        cls, x: jax.Array, weights: "Sequence[PackedWeight]", inputs: int
    ) -> list[jax.Array]:
        """Return `linear` of x for each weight; native ones of one precision share a call."""
        first = weights[0]
        alike = all((w.implementation, w.precision) == ("native", first.precision) for w in weights)
        if not alike:
            return [weight.linear(x, inputs) for weight in weights]
        for weight in weights:
            weight._check(x, inputs)
        lead = x.shape[: x.ndim - inputs]
        found = native.linears(first._rows(x), [weight._parts() for weight in weights])
        return [
            y_MN.reshape(*lead, *weight.outputs)
            for y_MN, weight in zip(found, weights, strict=True)
        ]

    def unpack(self) -> jax.Array:
        """Return the array this stands for, as precise as it is stored, in its first dtype."""
        run = native.unpack if self.implementation == "native" else plain.unpack
        sizes = (math.prod(self.inputs), math.prod(self.outputs))
        values, scales = self.values, self.scales
        if self.layer is not None or not self.stacked:
            values = values[self._index()][None]
            scales = None if scales is None else scales[self._index()][None]
        return run(values, scales, *sizes).astype(self.dtype).reshape(self.shape)

    def _rows(self, x: jax.Array) -> jax.Array:
        """Return x as [M, K]."""
        lead = x.shape[: x.ndim - len(self.inputs)]
        return x.reshape(math.prod(lead), math.prod(self.inputs))

    def _parts(self) -> tuple[jax.Array, jax.Array | None, jax.Array, int]:
        return self.values, self.scales, self._index(), math.prod(self.outputs)

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
