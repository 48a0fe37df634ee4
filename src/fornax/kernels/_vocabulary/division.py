"""How the mesh in use divides tokens and vocabulary, and running work on each device's part.

XLA's partitioner would gather the projection again for every chunk of tokens and reduce its
gradient as often. Here each device gathers its part once, adds up its own tokens' gradient, and
the sums over devices are made once, after the last chunk.

Legend: B batch, T tokens of a row, D model width, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from fornax.mesh import axes_in_use, current_mesh, current_rules, shards

__all__ = ["Arrays", "Division", "batch_shards", "divide"]

Axes = tuple[str, ...]

Arrays = Any
"""A pytree of arrays."""


@dataclasses.dataclass(frozen=True)
class Division:
    """Mesh axes that divide each dimension, and the collectives that follow from them."""

    mesh: Mesh | None = None
    """None where nothing is divided by hand."""
    tokens: tuple[Axes, ...] = ()
    """Of each leading dimension of the tokens: the batch's and the length's, or both as one."""
    width: Axes = ()
    vocabulary: Axes = ()

    @property
    def token_axes(self) -> Axes:
        """All axes between which tokens are divided."""
        return tuple(axis for axes in self.tokens for axis in axes)

    @property
    def token_shards(self) -> int:
        """Over how many devices the tokens are divided."""
        return self._size(self.token_axes)

    @property
    def vocabulary_shards(self) -> int:
        """Over how many devices the vocabulary is divided."""
        return self._size(self.vocabulary)

    def _size(self, axes: Axes) -> int:
        return math.prod(self.mesh.shape[axis] for axis in axes) if self.mesh is not None else 1

    def run(
        self,
        work: Callable[..., Arrays],
        arrays: tuple[Arrays, ...],
        outputs: str,
        inputs: str = "xwtt",
    ) -> Arrays:
        """Run `work` on each device's part of the arrays.

        Args:
            work: takes and returns one device's part.
            arrays: in the order of `inputs`.
            outputs: one letter a result (a pytree): `s` the same on all devices, `x`, `w`, `t` or
                `l` laid out as x [*tokens, D], w [D, V], the targets [*tokens] or logits
                [*tokens, V] are.
            inputs: one such letter an argument.
        """
        if self.mesh is None:
            return work(*arrays)
        specs = {
            "s": PartitionSpec(),
            "x": PartitionSpec(*(axes or None for axes in self.tokens), None),
            "w": PartitionSpec(self.width or None, self.vocabulary or None),
            "t": PartitionSpec(*(axes or None for axes in self.tokens)),
            "l": PartitionSpec(*(axes or None for axes in self.tokens), self.vocabulary or None),
        }
        mapped = jax.shard_map(
            work,
            mesh=self.mesh,
            in_specs=tuple(specs[kind] for kind in inputs),
            out_specs=tuple(specs[kind] for kind in outputs),
            check_vma=False,
        )
        return mapped(*arrays)

    def whole_width(self, w_DV: jax.Array) -> jax.Array:
        """Gather the projection's rows."""
        return jax.lax.all_gather(w_DV, self.width, axis=0, tiled=True) if self.width else w_DV

    def own_width(self, dw_DV: jax.Array) -> jax.Array:
        """Add up all tokens' gradients of the projection and keep this device's rows."""
        scattered = tuple(axis for axis in self.width if axis in self.token_axes)
        summed = tuple(axis for axis in self.token_axes if axis not in self.width)
        if scattered != self.width:  # rows divided over devices that hold the same tokens
            dw_DV = self.over_tokens(dw_DV)
            rows = dw_DV.shape[0] // self._size(self.width)
            start = jax.lax.axis_index(self.width) * rows
            return jax.lax.dynamic_slice_in_dim(dw_DV, start, rows)
        if scattered:
            dw_DV = jax.lax.psum_scatter(dw_DV, scattered, scatter_dimension=0, tiled=True)
        return jax.lax.psum(dw_DV, summed) if summed else dw_DV

    def over_tokens(self, sums: Arrays) -> Arrays:
        """Add up over the devices between which tokens are divided."""
        return jax.lax.psum(sums, self.token_axes) if self.token_axes else sums

    def over_vocabulary(self, reduce: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        """Return `x` summed (or its maximum taken) over the parts of the vocabulary."""
        return reduce(x, self.vocabulary) if self.vocabulary else x

    def first_token(self, count: int) -> jax.Array | int:
        """Return the index in the vocabulary of the first of the `count` that a device holds."""
        return jax.lax.axis_index(self.vocabulary) * count if self.vocabulary else 0


def divide(x: jax.Array, w_DV: jax.Array) -> Division:
    """Return how the mesh in use divides x [*tokens, D] and w; nothing where tokens do not divide
    evenly."""
    mesh = current_mesh()
    if mesh is None or mesh.size == 1:
        return Division()
    rules, sizes = current_rules(), mesh.shape

    def used(*logical: str) -> Axes:
        return tuple(axis for name in logical for axis in rules[name] if sizes[axis] > 1)

    def divides(size: int, axes: Axes) -> bool:
        return size % math.prod(sizes[axis] for axis in axes) == 0

    tokens = (used("batch", "length"),) if x.ndim == 2 else (used("batch"), used("length"))
    width, vocabulary = used("embed"), used("vocab")
    of_tokens = {axis for axes in tokens for axis in axes}
    vocabulary = tuple(axis for axis in vocabulary if axis not in width)
    if not all(divides(size, axes) for size, axes in zip(x.shape, tokens, strict=False)):
        return Division()
    if of_tokens & set(vocabulary):
        return Division()
    return Division(
        mesh=mesh,
        tokens=tokens,
        width=width if divides(w_DV.shape[0], width) else (),
        vocabulary=vocabulary if divides(w_DV.shape[1], vocabulary) else (),
    )


def batch_shards() -> int:
    """Return over how many devices the mesh in use divides the tokens of a batch."""
    return shards(axes_in_use("batch", "length"))
