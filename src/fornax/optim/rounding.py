"""Stochastic rounding of float32 results to bfloat16 parameters.

Rounding to the nearest drops every update smaller than half a unit in the last place of its
parameter (0.4 % of it at most), so that training stalls as the learning rate falls. Rounding up or
down at random, with the probabilities that keep the mean, loses nothing on average.
"""

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from fornax import kernels
from fornax.optim.transforms import increment, transformation
from fornax.optim.tree import flatten, rebuild

__all__ = [
    "UpdateCount",
    "count_updates",
    "is_rounded",
    "round_as",
    "round_stochastically",
    "widen",
]

Tree = TypeVar("Tree")


class UpdateCount(NamedTuple):
    """State of `count_updates`: the random bits of the rounding come from it."""

    count: jax.Array
    """int32 scalar: updates made."""


def count_updates() -> optax.GradientTransformation:
    """Count the updates of a chain whose results are rounded; changes none of them."""

    def init(params: optax.Params) -> UpdateCount:
        del params
        return UpdateCount(jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates, state: UpdateCount, params: optax.Params | None = None
    ) -> tuple[optax.Updates, UpdateCount]:
        del params
        return updates, UpdateCount(increment(state.count))

    return transformation(init, update)


def is_rounded(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether a parameter is narrower than the updates made to it."""
    return leaf.dtype == jnp.bfloat16


def round_as(params: optax.Params, wide: optax.Params, state: UpdateCount | None) -> optax.Params:
    """`wide` in the dtypes of `params`; `state` is None where nothing is to be rounded."""
    if state is None:
        return wide
    old, new = flatten(params), flatten(wide)
    for number, path in enumerate(new):
        if is_rounded(old[path]):
            new[path] = round_stochastically(new[path], state.count, number)
    return rebuild(params, new)


def widen(tree: Tree) -> Tree:
    """The tree with float32 in place of narrower floating-point types."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def round_stochastically(x: jax.Array, number: jax.Array, leaf: int) -> jax.Array:
    """A float32 array as bfloat16: a neighbour of each value, with that value as expectation.

    A value that bfloat16 holds stays as it is; so do infinities and NaN. The random bits are a
    hash of the element's index, so they depend on no sharding, and XLA computes them inside the
    update, without an array of them.

    Args:
      x: [...] float32.
      number: integer scalar: which update this is.
      leaf: which array of the update this is.
    """
    noise = kernels.index_noise(x.shape, number, leaf)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    upper = ((bits + (noise >> 16)) >> 16).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(upper, jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
