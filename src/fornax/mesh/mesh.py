"""Named device meshes: every mesh has all the axes, most of them of size one."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from fornax.config.errors import ConfigError, ShardingError
from fornax.mesh.capabilities import MESH_AXES, check_axes
from fornax.mesh.rules import DEFAULT_RULES, Rules, merge_rules

__all__ = ["MeshConfig", "make_mesh"]


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each kind of parallelism gets; one axis may be -1 and takes what is left."""

    slice: int = 1
    """Groups of devices joined only by the data-centre network; data parallel between them."""
    data: int = 1
    """Data parallelism: parameters replicated, batch divided."""
    stage: int = 1
    """Pipeline stages: not implemented, always 1."""
    fsdp: int = -1
    """Fully sharded data parallelism: parameters, optimizer state and batch divided."""
    expert: int = 1
    """Expert parallelism: not implemented, always 1."""
    context: int = 1
    """Sequence parallelism: the length of a batch divided."""
    tensor: int = 1
    """Tensor parallelism: heads, hidden width and vocabulary divided."""
    rules: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Overrides of the rule table: logical axis to the mesh axes that divide it."""

    def __post_init__(self) -> None:
        """Check sizes and rule names, and that each axis divides something."""
        sizes = self.axis_sizes()
        check_axes(sizes, self.rules)
        for axis, size in sizes.items():
            if size == 0 or size < -1:
                raise ConfigError(f"{axis}={size}: a mesh axis is a positive size, or -1 for rest")
        left = [axis for axis, size in sizes.items() if size == -1]
        if len(left) > 1:
            raise ConfigError(
                f"{' and '.join(left)} are both -1; only one mesh axis can take what is left"
            )
        merge_rules(DEFAULT_RULES, self.rules)

    def axis_sizes(self) -> dict[str, int]:
        """Mesh axis to its configured size, in mesh order."""
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    def resolved_rules(self) -> Rules:
        """The default rule table with this config's overrides."""
        return merge_rules(DEFAULT_RULES, self.rules)

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
      ShardingError: when the sizes do not multiply to the number of devices, or the axis `slice` is
        not the number of slices that they are in.
    """
    chosen = list(jax.devices() if devices is None else devices)
    sizes = config.resolved_sizes(len(chosen))
    shape = tuple(sizes.values())
    slices = len({getattr(d, "slice_index", 0) or 0 for d in chosen})
    # Nodes of GPUs count as slices to jax, and any axis may span them.
    if slices > 1 and (sizes["slice"] > 1 or chosen[0].platform == "tpu"):
        if sizes["slice"] != slices:
            raise ShardingError(
                f"the devices are in {slices} slices and the mesh has slice={sizes['slice']}; set "
                f"`mesh.slice` to {slices}: only that axis crosses the network between slices"
            )
        grid = mesh_utils.create_hybrid_device_mesh(
            (1, *shape[1:]),
            (slices, *(1 for _ in shape[1:])),
            chosen,
            allow_split_physical_axes=True,
        )
    else:
        grid = mesh_utils.create_device_mesh(shape, chosen, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
