"""The kinds of linear modules that adapters know: where their axes are, and how to follow them.

Legend: R rank. A kernel's axes are groups: batch (kept apart), inputs (summed over), outputs.
"""

import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fornax import kernels
from fornax.models.experts import ExpertProjection
from fornax.models.projection import Projection

__all__ = ["KernelLayout", "Kind", "kind_of", "layout_of"]

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


@dataclass(frozen=True)
class Kind:
    """How one type of module computes."""

    layout: Callable[[Any], KernelLayout | None]
    """The module's axes; None where it cannot be adapted."""
    through: Callable[..., jax.Array]
    """(module, x, a, b, call arguments) to x A B, in the order of the module's output."""
    spread: Callable[..., jax.Array]
    """(module, [*batch, *outputs], y, call arguments) to what broadcasts against the output y."""
    bias: Callable[..., jax.Array]
    """(module, its bias, y, call arguments) to what broadcasts against the output y."""


def kind_of(module: nnx.Module) -> Kind | None:
    """The kind of a module, if it is a linear one; subclasses are of their base's kind."""
    return next((_KINDS[base] for base in type(module).__mro__ if base in _KINDS), None)


def layout_of(module: nnx.Module) -> KernelLayout | None:
    """The axes of a module's kernel; None where the module cannot be adapted."""
    if isinstance(module, ExpertProjection):  # read by the experts, not called
        return KernelLayout(module.kernel.get_value().ndim - 3, (1,), (2,), batch=(0,))
    kind = kind_of(module)
    return None if kind is None else kind.layout(module)


def _trailing(stacked: int, inputs: int, axes: int) -> KernelLayout:
    return KernelLayout(stacked, tuple(range(inputs)), tuple(range(inputs, axes)))


def _projection(module: Any) -> KernelLayout:
    axes = module.kernel.get_metadata().get("axes") or ()
    stacked = int(axes[:1] == ("layers",))
    return _trailing(stacked, module.num_inputs, module.kernel.get_value().ndim - stacked)


def _through_projection(module: Any, x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    hidden = kernels.linear(x, a, inputs=module.num_inputs)
    return kernels.linear(hidden, b, inputs=1)


def _linear(module: Any) -> KernelLayout:
    return _trailing(module.kernel.get_value().ndim - 2, 1, 2)


def _through_linear(
    module: object, x: jax.Array, a: jax.Array, b: jax.Array, out_sharding: object = None
) -> jax.Array:
    del module, out_sharding
    return kernels.linear(kernels.linear(x, a), b)


def _as_it_is(module: object, values: jax.Array, y: jax.Array, *arguments: object, **named: object):
    del module, y, arguments, named
    return values


def _general(module: Any) -> KernelLayout:
    batch, inputs = len(module.batch_axis), len(module.in_features)
    axes = batch + inputs + len(module.out_features)
    stacked = module.kernel.get_value().ndim - axes
    numbers = tuple(range(axes))
    return KernelLayout(
        stacked, numbers[batch : batch + inputs], numbers[batch + inputs :], numbers[:batch]
    )


def _through_general(
    module: Any, x: jax.Array, a: jax.Array, b: jax.Array, out_sharding: Any = None
) -> jax.Array:
    del out_sharding
    batch = tuple(range(len(module.batch_axis)))
    axes = tuple(axis % x.ndim for axis in module.axis)
    of_x = tuple(axis % x.ndim for axis in module.batch_axis)
    inputs = tuple(range(len(batch), len(batch) + len(axes)))
    hidden = jax.lax.dot_general(x, a, ((axes, inputs), (of_x, batch)))
    return jax.lax.dot_general(hidden, b, (((hidden.ndim - 1,), (len(batch),)), (batch, batch)))


def _spread_general(
    module: Any, values: jax.Array, y: jax.Array, *arguments: Any, **named: Any
) -> jax.Array:
    del arguments, named
    batch = len(module.batch_axis)
    between = (1,) * (y.ndim - values.ndim)
    return values.reshape(*values.shape[:batch], *between, *values.shape[batch:])


def _einsum(module: Any) -> KernelLayout | None:
    if module.einsum_str is None:
        return None
    lhs, rhs, out = _parts(module.einsum_str)
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


def _parts(einsum: str) -> tuple[str, str, str]:
    operands, out = einsum.replace(" ", "").split("->")
    lhs, rhs = operands.split(",")
    return lhs, rhs, out


def _through_einsum(
    module: Any,
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    einsum_str: str | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    del out_sharding
    lhs, rhs, out = _parts(einsum_str or module.einsum_str)
    layout = _einsum(module)
    assert layout is not None
    batch, inputs, outputs = (
        "".join(rhs[axis] for axis in axes)
        for axes in (layout.batch, layout.inputs, layout.outputs)
    )
    rank = next(letter for letter in string.ascii_letters if letter not in lhs + rhs)
    hidden = "".join(letter for letter in lhs if letter not in inputs) + rank
    h = jnp.einsum(f"{lhs},{batch}{inputs}{rank}->{hidden}", x, a)
    return jnp.einsum(f"{hidden},{batch}{rank}{outputs}->{out}", h, b)


def _spread_einsum(
    module: Any,
    values: jax.Array,
    y: jax.Array,
    einsum_str: str | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    del out_sharding
    _, rhs, out = _parts(einsum_str or module.einsum_str)
    layout = _einsum(module)
    assert layout is not None
    letters = [rhs[axis] for axis in layout.batch + layout.outputs]
    order = sorted(range(len(letters)), key=lambda i: out.index(letters[i]))
    widths = {letters[i]: values.shape[i] for i in order}
    named = out.replace(".", "")
    free = (1,) * (y.ndim - len(named))
    shape = tuple(widths.get(letter, 1) for letter in named)
    at = out.index(".") if "." in out else 0
    return values.transpose(order).reshape(*shape[:at], *free, *shape[at:])


def _bias_einsum(
    module: Any,
    values: jax.Array,
    y: jax.Array,
    einsum_str: str | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Flax lays a bias out in the order of the output's axes."""
    layout = _einsum(module)
    assert layout is not None
    _, rhs, out = _parts(einsum_str or module.einsum_str)
    widths = dict(zip(rhs, module.kernel_shape, strict=True))
    mine = [rhs[axis] for axis in layout.batch + layout.outputs]
    in_order = sorted(mine, key=out.index)
    values = values.reshape([widths[letter] for letter in in_order])
    values = values.transpose([in_order.index(letter) for letter in mine])
    return _spread_einsum(module, values, y, einsum_str, out_sharding)


_KINDS: dict[type, Kind] = {
    Projection: Kind(_projection, _through_projection, _as_it_is, _as_it_is),
    nnx.Linear: Kind(_linear, _through_linear, _as_it_is, _as_it_is),
    nnx.LinearGeneral: Kind(_general, _through_general, _spread_general, _spread_general),
    nnx.Einsum: Kind(_einsum, _through_einsum, _spread_einsum, _bias_einsum),
}
