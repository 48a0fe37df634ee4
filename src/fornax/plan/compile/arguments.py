"""From abstract arrays with shardings to what is known of each argument."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from fornax.mesh import path_name
from fornax.plan.artifact import ArrayFact, Owner

__all__ = ["array_facts"]


def array_facts(tree: Any, owner: Callable[[str], Owner]) -> tuple[ArrayFact, ...]:
    """Facts of the leaves of `tree`, in the order of `jax.tree.leaves`.

    Args:
      tree: ShapeDtypeStructs that carry NamedShardings.
      owner: says whose a leaf is, given its path such as `params/embed/kernel`.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return tuple(_fact(path_name(path), leaf, owner) for path, leaf in leaves)


def _fact(name: str, leaf: Any, owner: Callable[[str], Owner]) -> ArrayFact:
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    share = sharding.shard_shape(leaf.shape)
    return ArrayFact(
        name=name,
        owner=owner(name),
        shape=tuple(leaf.shape),
        dtype=leaf.dtype.name,
        axes=tuple(_axes(entry, sharding.mesh) for entry in _entries(sharding, len(leaf.shape))),
        bytes_global=_bytes(leaf.shape, leaf.dtype),
        bytes_device=_bytes(share, leaf.dtype),
    )


def _entries(sharding: NamedSharding, ndim: int) -> list[Any]:
    return [*sharding.spec, *[None] * (ndim - len(sharding.spec))]


def _axes(entry: Any, mesh: Any) -> tuple[str, ...]:
    names = () if entry is None else (entry,) if isinstance(entry, str) else entry
    return tuple(name for name in names if mesh.shape[name] > 1)


def _bytes(shape: tuple[int, ...], dtype: Any) -> int:
    bits = jax.dtypes.itemsize_bits(dtype)
    return -(-math.prod(shape) * bits // 8)
