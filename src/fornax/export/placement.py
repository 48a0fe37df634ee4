"""Where a bundle's function runs: a placement gives every array its sharding.

A bundle names axes ("vocab", "mlp", or a mesh axis such as "tensor") and does not depend on
devices. The host brings a mesh and a table of rules; a mesh axis that the host does not have
divides nothing.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from fornax.config.errors import ShardingError
from fornax.mesh import DEFAULT_RULES, Rules, named_sharding

__all__ = ["OnMesh", "OneDevice", "Placement", "automatic", "platform_of", "rules_for"]

Axes = tuple[str | None, ...]


class Placement(Protocol):
    """One device, or a mesh of them."""

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices, in the mesh's order."""
        ...

    def sharding(
        self, name: str, shape: tuple[int, ...], axes: Axes | None
    ) -> jax.sharding.Sharding:
        """The sharding of a weight with these logical axes; ShardingError where it cannot be."""
        ...

    def spread(
        self, shape: tuple[int, ...], axes: Axes | None, batch: int | None
    ) -> jax.sharding.Sharding:
        """The sharding of an input of a bucket's shape; `batch` is its dimension of rows."""
        ...


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """One device; None is jax's first."""

    device: jax.Device | None = None

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The device."""
        return (self.device if self.device is not None else jax.local_devices()[0],)

    def sharding(
        self, name: str, shape: tuple[int, ...], axes: Axes | None
    ) -> jax.sharding.Sharding:
        """The device, whatever the array."""
        del name, shape, axes
        return jax.sharding.SingleDeviceSharding(self.devices[0])

    def spread(
        self, shape: tuple[int, ...], axes: Axes | None, batch: int | None
    ) -> jax.sharding.Sharding:
        """The device, whatever the input."""
        del shape, axes, batch
        return jax.sharding.SingleDeviceSharding(self.devices[0])


def platform_of(placement: Placement) -> str:
    """The platform by the name that exports have: cpu, cuda, rocm or tpu."""
    device = placement.devices[0]
    if device.platform == "gpu":
        return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    return device.platform


def automatic(mesh: Mesh) -> Mesh:
    """`mesh` with every axis left to the compiler, which is how a bundle's graph is divided.

    `jax.make_mesh` makes axes whose divisions are part of the types; an exported graph has none.
    """
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def rules_for(mesh: Mesh, rules: Rules | None) -> Rules:
    """The table to lay by: `rules` over the default ones, and each mesh axis under its own name.

    Mesh axes that `mesh` has not are left out.

    Raises:
      ShardingError: a rule of the caller's that names no axis of the mesh.
    """
    for logical, axes in (rules or {}).items():
        for axis in axes:
            if axis not in mesh.shape:
                raise ShardingError(
                    f"rule {logical!r} -> {axis!r}: the mesh has no axis {axis!r}; it has "
                    f"{', '.join(mesh.axis_names)}"
                )
    own = {axis: (axis,) for axis in mesh.axis_names}
    table = {**DEFAULT_RULES, **own, **(rules or {})}
    return {k: tuple(axis for axis in axes if axis in mesh.shape) for k, axes in table.items()}


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """A mesh of the host's, and the rules by which a bundle's axes are laid on it.

    Args:
      mesh: any mesh; its axes are taken as left to the compiler.
      rules: logical axis to mesh axes, over `fornax.mesh.DEFAULT_RULES`.
    """

    mesh: Mesh
    rules: Rules | None = None

    @cached_property
    def _auto(self) -> Mesh:
        return automatic(self.mesh)

    @cached_property
    def _table(self) -> Rules:
        return rules_for(self.mesh, self.rules)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices, in the mesh's order."""
        return tuple(self.mesh.devices.flat)

    def sharding(self, name: str, shape: tuple[int, ...], axes: Axes | None) -> NamedSharding:
        """Where a weight is; None for axes replicates.

        Raises:
          ShardingError: an axis without a rule, or a dimension that does not divide; it names the
            weight.
        """
        if axes is None:
            return NamedSharding(self._auto, PartitionSpec())
        return named_sharding(self._auto, axes, self._table, shape=shape, name=f"weight {name}")

    def spread(self, shape: Sequence[int], axes: Axes | None, batch: int | None) -> NamedSharding:
        """Where an input, or output, of a bucket's shape lies.

        A dimension that does not divide (a bucket of one row over two devices) is replicated:
        buckets are many, and one mesh serves them all.

        Args:
          shape: of the bucket.
          axes: those that the bundle names; None divides the rows only.
          batch: which dimension is the rows, if one is.

        Raises:
          ShardingError: an axis without a rule.
        """
        if axes is None:
            axes = tuple("batch" if dim == batch else None for dim in range(len(shape)))
        spec = named_sharding(self._auto, axes, self._table).spec
        pairs = zip(shape, spec, strict=True)
        divided = [_that_divide(size, entry, self._auto) for size, entry in pairs]
        return NamedSharding(self._auto, PartitionSpec(*divided))


def _that_divide(size: int, entry: str | tuple[str, ...] | None, mesh: Mesh) -> tuple | None:
    """The leading mesh axes of an entry over which `size` divides."""
    axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
    while axes and size % math.prod(mesh.shape[axis] for axis in axes):
        axes = axes[:-1]
    return axes or None
