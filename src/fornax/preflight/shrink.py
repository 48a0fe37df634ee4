"""Meshes, optimizer and sizes of a small config, whatever its model."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fornax.mesh import MESH_AXES, DtypePolicy, MeshConfig
from fornax.models import PipelineConfig
from fornax.optim import SOAP, Adafactor, OptimConfig, Optimizer, Shampoo
from fornax.train import TrainConfig, TrainerConfig

__all__ = [
    "DEVICES",
    "Pieces",
    "Shrunk",
    "describe_mesh",
    "float32",
    "meshes_of",
    "on_mesh",
    "pieces_on",
    "settled_optim",
    "smallest_multiple",
    "with_mesh",
]

DEVICES = 8
"""Virtual devices of a preflight."""

ConfigT = TypeVar("ConfigT", bound=TrainerConfig)

Pieces = Callable[..., int]
"""Logical axes to the number that sizes of all of them must be multiples of."""


@dataclass(frozen=True, kw_only=True)
class Shrunk(Generic[ConfigT]):
    """A config made small, and the meshes to try it on."""

    config: ConfigT
    """On the largest mesh; every other choice is the user's own."""
    axes: tuple[str, ...]
    """Mesh axes that the config uses, slowest link first."""
    meshes: tuple[MeshConfig, ...]
    """The whole mesh; several, which hold every three axes together, where four do not fit."""


def float32(config: ConfigT) -> ConfigT:
    """The config with everything computed in float32."""
    return dataclasses.replace(config, dtypes=DtypePolicy())


def with_mesh(config: ConfigT, **sizes: int) -> ConfigT:
    """The config on a mesh of these sizes, all other axes 1, under its own rules."""
    return on_mesh(config, _mesh(config, sizes))


def on_mesh(config: ConfigT, mesh: MeshConfig) -> ConfigT:
    """The config on another mesh; without stages there is no pipeline to describe."""
    changes: dict[str, Any] = {"mesh": mesh}
    if isinstance(config, TrainConfig) and mesh.num_stages() == 1:
        changes["pipeline"] = PipelineConfig()
    return dataclasses.replace(config, **changes)


def describe_mesh(mesh: MeshConfig) -> str:
    """The axes that have several devices: `data=2 x tensor=2`."""
    sizes = (f"{axis}={size}" for axis, size in mesh.axis_sizes().items() if size != 1)
    stages = ", stages across slices" if mesh.across == "stage" else ""
    return f"{' x '.join(sizes)}{stages}" or "one device"


def meshes_of(
    config: TrainerConfig, rest: Callable[[str, int], int]
) -> tuple[tuple[str, ...], tuple[MeshConfig, ...]]:
    """The axes that a config uses, and the meshes of eight devices to try it on.

    Args:
      config: the user's.
      rest: (axis, devices) to the most devices that the open axis can have.
    """
    sizes = config.mesh.axis_sizes()
    axes = tuple(axis for axis, size in sizes.items() if size != 1)
    return axes, tuple(_meshes(config, axes, rest))


def pieces_on(config: TrainerConfig, meshes: tuple[MeshConfig, ...]) -> Pieces:
    """What sizes with some logical axes must be multiples of, to divide over every mesh."""
    rules = config.mesh.resolved_rules()
    widest = {axis: max(getattr(mesh, axis) for mesh in meshes) for axis in MESH_AXES}

    def pieces(*logical: str) -> int:
        return math.lcm(*(math.prod(widest[axis] for axis in rules[name]) for name in logical))

    return pieces


def _meshes(
    config: TrainerConfig, axes: tuple[str, ...], rest_of: Callable[[str, int], int]
) -> Iterator[MeshConfig]:
    """The whole mesh on eight devices; every choice of three axes where there are more."""
    most = int(math.log2(DEVICES))
    for some in itertools.combinations(axes, min(len(axes), most)):
        sizes = dict.fromkeys(some, 2)
        rest = next((axis for axis in some if getattr(config.mesh, axis) == -1), None)
        if rest is not None:
            sizes[rest] = rest_of(rest, DEVICES // 2 ** (len(some) - 1))
        yield _mesh(config, sizes)


def _mesh(config: TrainerConfig, sizes: Mapping[str, int]) -> MeshConfig:
    """A mesh of these sizes; where it has slices, with what the user's have across them."""
    across = config.mesh.across if sizes.get("slice", 1) > 1 else "data"
    return MeshConfig(**{"fsdp": 1, **sizes}, rules=config.mesh.rules, across=across)


def settled_optim(config: OptimConfig, share: float) -> OptimConfig:
    """The same chain; a first update that moves, and matrices of this share of their width factored
    as before."""
    groups = tuple(
        dataclasses.replace(group, optimizer=_shrink_optimizer(group.optimizer, share))
        for group in config.groups
    )
    return dataclasses.replace(
        config,
        schedule=dataclasses.replace(config.schedule, warmup_steps=0),
        optimizer=_shrink_optimizer(config.optimizer, share),
        groups=groups,
    )


def _shrink_optimizer(optimizer: Optimizer | None, share: float) -> Optimizer | None:
    """Thresholds on the sides of a matrix shrink with the sides."""
    if isinstance(optimizer, Adafactor):
        least = max(1, round(optimizer.min_dim_size_to_factor * share))
        return dataclasses.replace(optimizer, min_dim_size_to_factor=least)
    if isinstance(optimizer, Shampoo):
        side = max(1, round(optimizer.block_size * share))
        return dataclasses.replace(optimizer, block_size=side)
    if isinstance(optimizer, SOAP):
        most = max(1, round(optimizer.max_precondition_dim * share))
        return dataclasses.replace(optimizer, max_precondition_dim=most)
    return optimizer


def smallest_multiple(least: int, of: int) -> int:
    """The smallest multiple of `of` that is at least `least`."""
    return -(-least // of) * of
