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
from fornax.models.kernel_layout import einsum_parts, layout_of
from fornax.models.projection import Projection

__all__ = ["Kind", "kind_of"]


@dataclass(frozen=True)
class Kind:
    """How one type of module computes."""

    through: Callable[..., jax.Array]
    """(module, x, a, b, call arguments) to x A B, in the order of the module's output."""
    spread: Callable[..., jax.Array]
    """(module, [*batch, *outputs], y, call arguments) to what broadcasts against the output y."""
    bias: Callable[..., jax.Array]
    """(module, its bias, y, call arguments) to what broadcasts against the output y."""


def kind_of(module: nnx.Module) -> Kind | None:
    """The kind of a module, if it is a linear one; subclasses are of their base's kind."""
    return next((_KINDS[base] for base in type(module).__mro__ if base in _KINDS), None)


def _through_projection(module: Any, x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    hidden = kernels.linear(x, a, inputs=module.num_inputs)
    return kernels.linear(hidden, b, inputs=1)


def _through_linear(
    module: object, x: jax.Array, a: jax.Array, b: jax.Array, out_sharding: object = None
) -> jax.Array:
    del module, out_sharding
    return kernels.linear(kernels.linear(x, a), b)


def _as_it_is(module: object, values: jax.Array, y: jax.Array, *arguments: object, **named: object):
    del module, y, arguments, named
    return values


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


def _through_einsum(
    module: Any,
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    einsum_str: str | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    del out_sharding
    lhs, rhs, out = einsum_parts(einsum_str or module.einsum_str)
    layout = layout_of(module)
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
    _, rhs, out = einsum_parts(einsum_str or module.einsum_str)
    layout = layout_of(module)
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
    layout = layout_of(module)
    assert layout is not None
    _, rhs, out = einsum_parts(einsum_str or module.einsum_str)
    widths = dict(zip(rhs, module.kernel_shape, strict=True))
    mine = [rhs[axis] for axis in layout.batch + layout.outputs]
    in_order = sorted(mine, key=out.index)
    values = values.reshape([widths[letter] for letter in in_order])
    values = values.transpose([in_order.index(letter) for letter in mine])
    return _spread_einsum(module, values, y, einsum_str, out_sharding)


_KINDS: dict[type, Kind] = {
    Projection: Kind(_through_projection, _as_it_is, _as_it_is),
    nnx.Linear: Kind(_through_linear, _as_it_is, _as_it_is),
    nnx.LinearGeneral: Kind(_through_general, _spread_general, _spread_general),
    nnx.Einsum: Kind(_through_einsum, _spread_einsum, _bias_einsum),
}
