"""Which parameters are exchanged together: layers in turn, and all else spread evenly.

Trees are lists of arrays here, in the order of `jax.tree.leaves`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fornax.config.errors import ConfigError

__all__ = ["Fragment", "Part", "make_fragments"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Of one array: all of it, or every n-th of its layers."""

    leaf: int
    """Which array."""
    layers: slice | None
    """Along its first dimension; None for all of it."""
    shape: tuple[int, ...]

    def of(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """The part of the arrays."""
        x = leaves[self.leaf]
        return x if self.layers is None else x[self.layers]


@dataclass(frozen=True)
class Fragment:
    """Parameters that are exchanged at the same time."""

    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """How many values."""
        return sum(math.prod(part.shape) for part in self.parts)

    def take(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """The fragment's parts of the arrays."""
        return [part.of(leaves) for part in self.parts]

    def put(self, leaves: Sequence[jax.Array], values: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays with the fragment's parts replaced, in their own dtypes."""
        found = list(leaves)
        for part, value in zip(self.parts, values, strict=True):
            x = found[part.leaf]
            value = value.astype(x.dtype)
            found[part.leaf] = value if part.layers is None else x.at[part.layers].set(value)
        return found

    def flat(self, values: Sequence[jax.Array], size: int) -> jax.Array:
        """Values of the fragment as one float32 vector, filled up with zeros to `size`."""
        vector = jnp.concatenate([value.astype(jnp.float32).reshape(-1) for value in values])
        return jnp.pad(vector, (0, size - self.size))

    def shaped(self, vector: jax.Array) -> list[jax.Array]:
        """What `flat` made a vector of."""
        found, start = [], 0
        for part in self.parts:
            stop = start + math.prod(part.shape)
            found.append(vector[start:stop].reshape(part.shape))
            start = stop
        return found


def make_fragments(
    shapes: Sequence[tuple[int, ...]], stacked: Sequence[bool], count: int
) -> list[Fragment]:
    """Spread arrays over `count` fragments.

    Layer l goes to fragment l modulo `count`, the pattern that the paper found best; every other
    array, the largest first, to the fragment that is smallest so far.

    Args:
      shapes: of the arrays.
      stacked: which of them have a first dimension of layers.
      count: of fragments.

    Raises:
      ConfigError: when a fragment would be empty.
    """
    parts: list[list[Part]] = [[] for _ in range(count)]
    sizes = [0] * count

    def add(number: int, leaf: int, layers: slice | None, shape: tuple[int, ...]) -> None:
        parts[number].append(Part(leaf=leaf, layers=layers, shape=shape))
        sizes[number] += math.prod(shape)

    for leaf, shape in enumerate(shapes):
        for number in range(min(count, shape[0]) if stacked[leaf] else 0):
            layers = len(range(number, shape[0], count))
            add(number, leaf, slice(number, None, count), (layers, *shape[1:]))
    whole = [leaf for leaf in range(len(shapes)) if not stacked[leaf]]
    for leaf in sorted(whole, key=lambda leaf: (-math.prod(shapes[leaf]), leaf)):
        add(sizes.index(min(sizes)), leaf, None, shapes[leaf])
    if empty := sum(not each for each in parts):
        raise ConfigError(
            f"diloco.num_fragments={count}: {empty} of them would have no parameters; a fragment "
            "has one layer at least, so use at most as many as the model has"
        )
    return [Fragment(tuple(each)) for each in parts]
