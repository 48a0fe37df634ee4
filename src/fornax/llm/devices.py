"""What an engine is made for: a platform, its devices, and what one of them can hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from fornax.mesh import MESH_AXES, MeshConfig, make_mesh

__all__ = ["DeviceSpec", "attached_devices"]


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """Devices that are attached, that only a compiler knows, or that are merely counted."""

    platform: str
    """cpu, gpu or tpu."""
    num_devices: int
    memory: int | None
    """Bytes that a device's allocator gives out; None where it does not say, as on CPU."""
    devices: Sequence[jax.Device] = ()
    """The devices, attached or of a topology; none where they are merely counted."""
    attached: bool = False
    """Whether arrays can be made on the devices."""

    def mesh(self, tensor: int) -> Mesh:
        """The first `tensor` devices as a mesh that divides layers over them."""
        config = MeshConfig(fsdp=1, tensor=tensor)
        if self.devices:
            return make_mesh(config, self.devices[:tensor])
        sizes = config.resolved_sizes(tensor)
        types = (AxisType.Auto,) * len(MESH_AXES)
        # Its shapes are a mesh's; there is nothing that could run on it.
        return cast("Mesh", AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types))

    @property
    def elsewhere(self) -> bool:
        """Whether its devices are attached, and JAX's default device is not the first of them."""
        return self.attached and self.devices[0] != jax.devices()[0]

    @property
    def single(self) -> NamedSharding | None:
        """Where the arrays of an engine on one device lie; None for JAX's default device."""
        if self.attached or not self.devices:
            return None
        return NamedSharding(self.mesh(1), PartitionSpec())


def attached_devices(devices: Sequence[jax.Device] | None = None) -> DeviceSpec:
    """These devices, or all that JAX has."""
    first = jax.local_devices()[0] if devices is None else devices[0]
    devices = jax.devices() if devices is None else devices
    stats = first.memory_stats() or {}
    return DeviceSpec(
        platform=jax.default_backend(),
        num_devices=len(devices),
        memory=stats.get("bytes_limit"),
        devices=devices,
        attached=True,
    )
