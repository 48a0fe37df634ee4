"""Named device meshes: every mesh has all the axes, most of them of size one."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from fornax.config.errors import ConfigError, ShardingError
from fornax.mesh.capabilities import ACROSS, MESH_AXES
from fornax.mesh.rules import DEFAULT_RULES, Rules, merge_rules, stage_axes

__all__ = ["MeshConfig", "make_mesh"]


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each kind of parallelism gets; one axis may be -1 and takes what is left.

    Where parameters do not divide over all that `fsdp` would take so, `data` takes the others."""

    slice: int = 1
    """Groups of devices joined only by the data-centre network; what they divide is `across`."""
    data: int = 1
    """Data parallelism: parameters replicated, batch divided."""
    stage: int = 1
    """Pipeline stages: layers divided, and the batch outside them (`pipeline`)."""
    fsdp: int = -1
    """Fully sharded data parallelism: parameters, optimizer state and batch divided."""
    expert: int = 1
    """Expert parallelism: experts and the batch divided, other parameters as by `fsdp`."""
    context: int = 1
    """Sequence parallelism: the length of a batch divided."""
    tensor: int = 1
    """Tensor parallelism: heads, hidden width and vocabulary divided."""
    across: Literal["data", "stage"] = "data"
    """What crosses between slices: `data`, each slice has a part of the batch and all parameters;
    `stage`, each has `stage` of the `slice` x `stage` stages of one pipeline, neighbours in it."""
    rules: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Overrides of the rule table: logical axis to the mesh axes that divide it."""

    def __post_init__(self) -> None:
        """Check sizes and rule names."""
        sizes = self.axis_sizes()
        for axis, size in sizes.items():
            if size == 0 or size < -1:
                raise ConfigError(f"{axis}={size}: a mesh axis is a positive size, or -1 for rest")
        left = [axis for axis, size in sizes.items() if size == -1]
        if len(left) > 1:
            raise ConfigError(
                f"{' and '.join(left)} are both -1; only one mesh axis can take what is left"
            )
        rules = self.resolved_rules()
        if self.across == "stage" and self.slice == 1:
            raise ConfigError(
                "mesh.across=stage is for several slices and mesh.slice is 1; set mesh.slice to "
                "the number of slices, or leave mesh.across out"
            )
        if ("slice" in stage_axes(rules)) != (self.across == "stage"):
            raise ConfigError(
                f"mesh.rules.layers={list(rules['layers'])} and mesh.across={self.across} disagree "
                "on whether slices divide layers; leave the rule out and set mesh.across, to stage "
                "or to data"
            )

    def axis_sizes(self) -> dict[str, int]:
        """Mesh axis to its configured size, in mesh order."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    def resolved_rules(self) -> Rules:
        """The default rule table, as `across` has it, with this config's overrides."""
        return merge_rules({**DEFAULT_RULES, **ACROSS[self.across].rules}, self.rules)

    def stage_slices(self) -> int:
        """Over how many slices the stages of a pipeline lie."""
        return self.slice if self.across == "stage" else 1

    def num_stages(self) -> int:
        """Stages of the pipeline, in all its slices; -1 where that is what is left of devices."""
        sizes = (self.stage, self.stage_slices())
        return -1 if -1 in sizes else math.prod(sizes)

    def resolved_sizes(self, num_devices: int) -> dict[str, int]:
        """Axis sizes with -1 replaced, for `num_devices` devices.

        Raises:
          ShardingError: when the sizes do not multiply to `num_devices`.
        """
        sizes = self.axis_sizes()
        fixed = math.prod(size for size in sizes.values() if size != -1)
        shown = " x ".join(f"{a}={s}" for a, s in sizes.items() if s != 1) or "1"
        if -1 in sizes.values():
            if num_devices % fixed:
                raise ShardingError(
                    f"the mesh {shown} needs a multiple of {fixed} devices and there are "
                    f"{num_devices}; change the sizes in `mesh`"
                )
            return {a: num_devices // fixed if s == -1 else s for a, s in sizes.items()}
        if fixed != num_devices:
            raise ShardingError(
                f"the mesh {shown} needs {fixed} devices and there are {num_devices}; "
                "change the sizes in `mesh`, or set one axis to -1 to take what is left"
            )
        return sizes


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with every axis of `MESH_AXES`, laid out so that inner axes are near neighbours.

    Args:
      config: axis sizes.
      devices: devices to use; all of them when None.

    Raises:
      ShardingError: when the sizes do not multiply to the number of devices, or the axis `slice`
        does not fit the slices, nodes or processes that they are in.
    """
    chosen = list(jax.devices() if devices is None else devices)
    sizes = config.resolved_sizes(len(chosen))
    shape = tuple(sizes.values())
    inner = (1, *shape[1:])
    grid = np.concatenate(
        [
            mesh_utils.create_device_mesh(
                inner if sizes["slice"] > 1 else shape, group, allow_split_physical_axes=True
            )
            for group in _slices(chosen, sizes["slice"])
        ]
    )
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _slices(devices: Sequence[jax.Device], count: int) -> list[list[jax.Device]]:
    """The devices in `count` groups of neighbours.

    A TPU says which slice it is in. Elsewhere a slice is one or several nodes of GPUs or processes;
    one process is as many slices as it is asked to be, which emulates them.
    """
    granules, kind = _granules(devices)
    tpu = devices[0].platform == "tpu"
    if tpu and len(granules) > 1 and len(granules) != count:
        raise ShardingError(
            f"the devices are in {len(granules)} slices and the mesh has slice={count}; set "
            f"`mesh.slice` to {len(granules)}: only that axis crosses the network between slices"
        )
    even = len({len(granule) for granule in granules}) == 1
    if count > 1 and len(granules) > 1 and (len(granules) % count or not even):
        raise ShardingError(
            f"mesh.slice={count} over {len(granules)} {kind}: a slice is one or several whole "
            f"{kind}, with as many devices each; set `mesh.slice` to a divisor of {len(granules)}"
        )
    ordered = [device for granule in granules for device in granule] if count > 1 else devices
    size = len(devices) // count
    return [list(ordered[n * size : (n + 1) * size]) for n in range(count)]


def _granules(devices: Sequence[jax.Device]) -> tuple[list[list[jax.Device]], str]:
    """The devices by the closest group that jax names, and what such groups are."""
    groups: dict[int, list[jax.Device]] = {}
    for device in devices:
        groups.setdefault(getattr(device, "slice_index", 0) or 0, []).append(device)
    kind = "slices" if devices[0].platform == "tpu" else "nodes"
    if len(groups) == 1 and devices[0].platform != "tpu":
        groups, kind = {}, "processes"
        for device in devices:
            groups.setdefault(device.process_index, []).append(device)
    return [groups[number] for number in sorted(groups)], kind
