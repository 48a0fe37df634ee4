"""A weight laid out once for products that only ever read it, alone or one of a stack of layers.

Legend: L layers, M rows, E groups of rows (experts), K inputs (flattened), N outputs (flattened).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fornax.config.errors import KernelError
from fornax.kernels._packed import blocks, native, plain
from fornax.kernels._packed.formats import FORMATS, Parts, Precision, dequantize

__all__ = ["PackedWeight", "block_weight"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A weight for `kernels.linear`, or with a matrix for each group of rows for
    `kernels.grouped_matmul` and `kernels.fused_experts`, made by `kernels.pack`,
    `kernels.pack_codes` or `kernels.block_weight`. It has no gradient.

    A pytree: pass it to a compiled function as an argument. In a scan over layers keep the whole
    stack outside the loop and take `weight.at(layer)` inside, so that nothing is copied.
    """

    values: jax.Array
    """[L, ...], of experts [L, E, ...]: layers, laid out as the implementation expects them; of
    blocks [U, 64] uint8, with the scales among them."""
    scales: jax.Array | None
    """[L, ...]: what codes of few bits are multiplied by, float32 or (mxfp4) e8m0 as uint8."""
    zeros: jax.Array | None
    """[L, ...] uint8: which code is 0, where that is not the same for all."""
    order: jax.Array | None
    """[L, K] int32: which input of x is at each place of the matrix, whose groups of inputs are
    consecutive; None where they are as in x."""
    layer: jax.Array | None
    """int32: which layer of the stack this is; None for the stack itself."""
    precision: Precision | Literal["blocks"] = dataclasses.field(metadata={"static": True})
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
    experts: int | None = dataclasses.field(metadata={"static": True})
    """E, matrices of a layer; None for one matrix, without an axis."""
    kinds: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    """GGUF's types of the layers, of blocks."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array this stands for."""
        whole = self.stacked and self.layer is None
        layers = (len(self.kinds) or self.values.shape[0],) if whole else ()
        experts = () if self.experts is None else (self.experts,)
        return (*layers, *experts, *self.inputs, *self.outputs)

    @property
    def ndim(self) -> int:
        """Number of axes of the array this stands for."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers as they are stored."""
        held = (self.parts, self.order)
        return sum(each.size * each.dtype.itemsize for each in jax.tree.leaves(held))

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
        assert self.precision != "blocks", "these are native"
        x_MK = self._rows(x)
        if self.order is not None:
            x_MK = x_MK[:, self.order[self.index]]
        y_MN = plain.linear(x_MK, self.parts, self.index, self.precision, self.group)
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
        rows = first._rows(x)
        if first.precision == "blocks":
            held = [(w.values, w.kinds, w.index, math.prod(w.outputs)) for w in weights]
            found = blocks.linears(rows, held)
        else:
            given = [(w.parts, w.order, w.index, math.prod(w.outputs)) for w in weights]
            found = native.linears(rows, given, first.precision)
        return [
            y_MN.reshape(*lead, *weight.outputs)
            for y_MN, weight in zip(found, weights, strict=True)
        ]

    def unpack(self) -> jax.Array:
        """Return the array this stands for, as precise as it is stored, in its first dtype."""
        if self.precision == "blocks":
            return self._unpack_blocks().astype(self.dtype).reshape(self.shape)
        parts, K, N = self.parts, math.prod(self.inputs), math.prod(self.outputs)
        order = self.order
        if self.layer is not None or not self.stacked:
            parts, order = jax.tree.map(lambda each: each[self.index][None], (parts, order))
        if self.experts is not None:
            parts = jax.tree.map(lambda each: each.reshape(-1, *each.shape[2:]), parts)
        if self.implementation == "native":
            found = native.codes(parts, self.precision, K, N)
        else:
            found = plain.codes(parts, self.precision, K)
        w_LKN = found.values
        if self.precision in FORMATS:
            w_LKN = dequantize(found, self.precision, self.group)
        if order is not None:
            w_LKN = jnp.take_along_axis(w_LKN, jnp.argsort(order, axis=1)[..., None], axis=1)
        return w_LKN.astype(self.dtype).reshape(self.shape)

    def _unpack_blocks(self) -> jax.Array:
        """Return float32 [L, K, N], or [K, N] of one layer."""
        K, N = math.prod(self.inputs), math.prod(self.outputs)
        starts = blocks.starts(self.kinds, K, N)

        def one(number: int) -> jax.Array:
            units = self.values[starts[number] : starts[number + 1]]
            return blocks.dequantize_blocks(self.kinds[number], units, K, N)

        if not self.stacked:
            return one(0)
        if self.layer is None:
            return jnp.stack([one(number) for number in range(len(self.kinds))])
        branches = [functools.partial(one, number) for number in range(len(self.kinds))]
        return jax.lax.switch(self.layer, branches)

    def _rows(self, x: jax.Array) -> jax.Array:
        """Return x as [M, K]."""
        lead = x.shape[: x.ndim - len(self.inputs)]
        return x.reshape(math.prod(lead), math.prod(self.inputs))

    @property
    def parts(self) -> Parts:
        """The arrays of all layers."""
        return Parts(self.values, self.scales, self.zeros)

    @property
    def index(self) -> jax.Array:
        """int32: which layer of the arrays this is; 0 for what is not a stack."""
        return jnp.int32(0) if self.layer is None else self.layer

    def _check(self, x: jax.Array, inputs: int) -> None:
        if self.experts is not None:
            raise KernelError(
                f"linear: weight{self.shape} has a matrix for each group of rows; use "
                "grouped_matmul"
            )
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


def block_weight(
    values: jax.Array,
    *,
    kinds: tuple[str, ...],
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    dtype: DTypeLike,
    stacked: bool = False,
) -> PackedWeight:
    """Return a weight in the blocks of a GGUF file, multiplied as they are stored.

    Its products round rows to 8 bits, 32 inputs at a time, and sum in float32. It runs by the
    native kernel alone; `blocks_unavailable` says why it cannot.

    Args:
        values: uint8 [U, 64], the layers as `lay_out_blocks` returns them, one behind the other.
        kinds: GGUF's type of each layer; see `BLOCKS`.
        inputs: sizes of the axes summed over.
        outputs: sizes of the axes produced.
        dtype: of the array that the weight stands for.
        stacked: whether that has an axis of layers; without, there is one.

    Returns:
        A weight for `kernels.linear`.

    Raises:
        KernelError: an unknown type, values that do not fit, or no native kernel.
    """
    reason = blocks.blocks_unavailable()
    if reason is not None:
        raise KernelError(f"blocks cannot be multiplied: {reason}; dequantize them")
    units = blocks.starts(kinds, math.prod(inputs), math.prod(outputs))[-1]
    layers = "some layers" if stacked else "one layer"
    if values.shape != (units, 64) or values.dtype != jnp.uint8 or (not stacked and len(kinds) > 1):
        raise KernelError(
            f"block_weight: values is {values.dtype}{list(values.shape)}, and uint8[{units}, 64] "
            f"belongs there for {layers} of {', '.join(kinds)} with inputs={inputs}, "
            f"outputs={outputs}"
        )
    return PackedWeight(
        values=values,
        scales=None,
        zeros=None,
        order=None,
        layer=None,
        precision="blocks",
        group=None,
        implementation="native",
        inputs=inputs,
        outputs=outputs,
        dtype=jnp.dtype(dtype),
        stacked=stacked,
        experts=None,
        kinds=kinds,
    )
