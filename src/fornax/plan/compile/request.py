"""What is asked of the child that compiles, and what a builder of programs gives it.

A builder is a function that the child finds by name; it takes a `Job` and returns the programs as
functions that trace when they are called:

    def build(job: Job) -> Mapping[str, Callable[[], Lowering]]: ...
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fornax.plan.artifact import ArrayFact
from fornax.plan.topology import Topology

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from jax.stages import Lowered

__all__ = ["Job", "Lowering", "Request"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """Programs to compile for a topology."""

    builder: str
    """`module:function`, importable in the child."""
    arguments: Mapping[str, Any]
    """What the builder is told, JSON-able."""
    programs: tuple[str, ...]
    """Which of the builder's programs."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Compiler options, such as `xla_tpu_…`: those of the real run, or the plan is of another."""

    def to_mapping(self) -> dict[str, Any]:
        """The request as plain data."""
        return {**dataclasses.asdict(self), "programs": list(self.programs)}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request as the builder sees it, in the child."""

    topology: Topology
    devices: list[Any]
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
    facts: Mapping[str, Any] = field(default_factory=dict)
