"""What is asked of the child that compiles, and what a builder of programs gives it.

A builder is a function that the child finds by name; it takes a `Job` and returns the programs as
functions that trace when they are called:

    def build(job: Job) -> Mapping[str, Callable[[], Lowering]]: ...
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding

from fornax.mesh import path_name
from fornax.plan.artifact import ArrayFact, Owner, dividing_axes
from fornax.plan.topology import Topology

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from jax.stages import Lowered


@dataclass(frozen=True, kw_only=True)
class Request:
    """Programs to compile for a topology."""

    builder: str
    """`module:function`, importable in the child."""
    arguments: Mapping[str, Any]
    """What the builder receives, as JSON types."""
    programs: tuple[str, ...]
    """Which of the builder's programs."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Compiler options, such as `xla_tpu_…`: those of the real run, or the plan is of another."""

    def to_mapping(self) -> dict[str, object]:
        """The request as plain data."""
        return {**dataclasses.asdict(self), "programs": list(self.programs)}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request as the builder sees it, in the child."""

    topology: Topology
    devices: list[jax.Device]
    """The topology's JAX devices: nothing can run on them."""
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """A traced program."""

    lowered: "Lowered"
    mesh: "Mesh"
    arguments: tuple[ArrayFact, ...]
    """Facts of every argument, in the order of the flattened arguments."""
    notes: tuple[str, ...] = ()


def array_facts(tree: object, owner: Callable[[str], Owner]) -> tuple[ArrayFact, ...]:
    """Facts of the leaves of `tree`, in the order of `jax.tree.leaves`.

    Args:
      tree: ShapeDtypeStructs that carry NamedShardings.
      owner: says whose a leaf is, given its path such as `params/embed/kernel`.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return tuple(_fact(path_name(path), leaf, owner) for path, leaf in leaves)


def _fact(name: str, leaf: jax.ShapeDtypeStruct, owner: Callable[[str], Owner]) -> ArrayFact:
    sharding = leaf.sharding
    assert isinstance(sharding, NamedSharding)
    share = sharding.shard_shape(leaf.shape)
    return ArrayFact(
        name=name,
        owner=owner(name),
        shape=tuple(leaf.shape),
        dtype=leaf.dtype.name,
        axes=dividing_axes(sharding, len(leaf.shape)),
        bytes_device=-(-math.prod(share) * jax.dtypes.itemsize_bits(leaf.dtype) // 8),
    )
