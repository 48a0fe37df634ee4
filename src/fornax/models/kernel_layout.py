"""Where the axes of a linear module's kernel are: those summed over, those produced.

A kernel's axes are groups: batch (kept apart), inputs (summed over), outputs. Adapters and
quantization go by them.

Legend: R rank of an adapter.
"""

import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fornax.models.experts import ExpertProjection
from fornax.models.projection import Projection

__all__ = ["KernelLayout", "einsum_parts", "layout_of"]

_RANK, _RANK_2 = "z", "y"


@dataclass(frozen=True)
class KernelLayout:
    """The groups of a kernel's axes, counted without those that stack it."""

    stacked: int
    """Leading axes along which layers are stacked."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    batch: tuple[int, ...] = ()
    shared: bool = False
    """Whether A and B are the same for all of the batch, whose axes they then have of size 1."""

    def of(self, values: tuple[object, ...], axes: tuple[int, ...]) -> tuple[Any, ...]:
        """What `values`, one for each axis of the stacked kernel, has for a group of axes."""
        return tuple(values[self.stacked + axis] for axis in axes)

    def a(self, values: tuple[object, ...], rank: object, one: object) -> tuple[Any, ...]:
        """The same for the axes of lora_a: stack, batch, inputs, rank; `one` for an axis of 1."""
        batch = self._batch(values, one)
        return (*values[: self.stacked], *batch, *self.of(values, self.inputs), rank)

    def b(self, values: tuple[object, ...], rank: object, one: object) -> tuple[Any, ...]:
        """The same for the axes of lora_b: stack, batch, rank, outputs."""
        batch = self._batch(values, one)
        return (*values[: self.stacked], *batch, rank, *self.of(values, self.outputs))

    def _batch(self, values: tuple[object, ...], one: object) -> tuple[Any, ...]:
        return (one,) * len(self.batch) if self.shared else self.of(values, self.batch)

    def magnitude(self, values: tuple[object, ...]) -> tuple[object, ...]:
        """The same for the axes of a magnitude: stack, batch, outputs."""
        return (*values[: self.stacked], *self.of(values, self.batch + self.outputs))

    def product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """A B in the kernel's own order of axes, float32; stacked or not."""
        spec = f"...{self._a()},...{self._b()}->...{self._kernel()}"
        return jnp.einsum(spec, a.astype(jnp.float32), b.astype(jnp.float32))

    def squares(
        self, kernel: jax.Array, a: jax.Array | None = None, b: jax.Array | None = None
    ) -> jax.Array:
        """Sum over the inputs of (kernel + A B)^2, float32; stacked or not.

        Multiplied out, so that no second array of the kernel's size is made.
        """
        kernel = kernel.astype(jnp.float32)
        whole, out = self._kernel(), self._letters(self.batch + self.outputs)
        total = jnp.einsum(f"...{whole},...{whole}->...{out}", kernel, kernel)
        if a is None or b is None:
            return total
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        batch = self._letters(self.batch)
        gram = jnp.einsum(f"...{self._a()},...{self._a(_RANK_2)}->...{batch}{_RANK}{_RANK_2}", a, a)
        onto = jnp.einsum(f"...{whole},...{self._a()}->...{self._b()}", kernel, a)
        onto = 2 * onto + jnp.einsum(
            f"...{batch}{_RANK}{_RANK_2},...{self._b(_RANK_2)}->...{self._b()}", gram, b
        )
        return total + jnp.einsum(f"...{self._b()},...{self._b()}->...{out}", onto, b)

    def scaled(self, kernel: jax.Array, factor: jax.Array) -> jax.Array:
        """The kernel times a factor of each output; stacked or not."""
        out = self._letters(self.batch + self.outputs)
        return jnp.einsum(f"...{self._kernel()},...{out}->...{self._kernel()}", kernel, factor)

    def _kernel(self) -> str:
        count = len(self.batch) + len(self.inputs) + len(self.outputs)
        return string.ascii_lowercase[:count]

    def _letters(self, axes: tuple[int, ...]) -> str:
        return "".join(string.ascii_lowercase[axis] for axis in axes)

    def _a(self, rank: str = _RANK) -> str:
        return self._letters(self.batch + self.inputs) + rank

    def _b(self, rank: str = _RANK) -> str:
        return self._letters(self.batch) + rank + self._letters(self.outputs)


def layout_of(module: nnx.Module) -> KernelLayout | None:
    """The axes of a module's kernel; None where it is not a linear module."""
    if isinstance(module, ExpertProjection):  # read by the experts, not called
        return KernelLayout(module.kernel.get_value().ndim - 3, (1,), (2,), batch=(0,))
    own = next((_LAYOUTS[base] for base in type(module).__mro__ if base in _LAYOUTS), None)
    return None if own is None else own(module)


def _trailing(stacked: int, inputs: int, axes: int) -> KernelLayout:
    return KernelLayout(stacked, tuple(range(inputs)), tuple(range(inputs, axes)))


def _projection(module: Any) -> KernelLayout:
    axes = module.kernel.get_metadata().get("axes") or ()
    stacked = int(axes[:1] == ("layers",))
    return _trailing(stacked, module.num_inputs, module.kernel.get_value().ndim - stacked)


def _linear(module: Any) -> KernelLayout:
    return _trailing(module.kernel.get_value().ndim - 2, 1, 2)


def _general(module: Any) -> KernelLayout:
    batch, inputs = len(module.batch_axis), len(module.in_features)
    axes = batch + inputs + len(module.out_features)
    stacked = module.kernel.get_value().ndim - axes
    numbers = tuple(range(axes))
    return KernelLayout(
        stacked, numbers[batch : batch + inputs], numbers[batch + inputs :], numbers[:batch]
    )


def _einsum(module: Any) -> KernelLayout | None:
    if module.einsum_str is None:
        return None
    lhs, rhs, out = einsum_parts(module.einsum_str)
    if "." in rhs:
        return None

    def axes(wanted: Callable[[str], bool]) -> tuple[int, ...]:
        return tuple(axis for axis, letter in enumerate(rhs) if wanted(letter))

    batch = axes(lambda x: x in lhs and x in out)
    inputs = axes(lambda x: x in lhs and x not in out)
    outputs = axes(lambda x: x in out and x not in lhs)
    if not inputs or not outputs or len(batch + inputs + outputs) < len(rhs):
        return None
    return KernelLayout(module.kernel.get_value().ndim - len(rhs), inputs, outputs, batch)


def einsum_parts(einsum: str) -> tuple[str, str, str]:
    """The two operands' letters and the result's."""
    operands, out = einsum.replace(" ", "").split("->")
    lhs, rhs = operands.split(",")
    return lhs, rhs, out


_LAYOUTS: dict[type, Callable[[Any], KernelLayout | None]] = {
    Projection: _projection,
    nnx.Linear: _linear,
    nnx.LinearGeneral: _general,
    nnx.Einsum: _einsum,
}
"""Subclasses are laid out as their base."""
