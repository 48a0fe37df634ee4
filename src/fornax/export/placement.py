"""Where a bundle's function runs: a placement gives every array its sharding."""

import dataclasses
from typing import Any, Protocol

import jax

__all__ = ["OneDevice", "Placement", "platform_of"]


class Placement(Protocol):
    """One device, or a mesh of them."""

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices, in the mesh's order."""
        ...

    def sharding(
        self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...] | None
    ) -> jax.sharding.Sharding:
        """The sharding of a weight with these logical axes; ShardingError where it cannot be."""
        ...

    def spread(
        self, shape: tuple[int, ...], axes: tuple[str | None, ...] | None, batch: int | None
    ) -> jax.sharding.Sharding:
        """The sharding of an input of a bucket's shape; `batch` is its dimension of rows."""
        ...


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """One device; None is jax's first."""

    device: Any = None

    @property
    def devices(self) -> tuple[Any, ...]:
        """The device."""
        return (self.device if self.device is not None else jax.local_devices()[0],)

    def sharding(
        self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...] | None
    ) -> jax.sharding.Sharding:
        """The device, whatever the array."""
        del name, shape, axes
        return jax.sharding.SingleDeviceSharding(self.devices[0])

    def spread(
        self, shape: tuple[int, ...], axes: tuple[str | None, ...] | None, batch: int | None
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
