"""The devices of the process: which model goes where, whether it fits, and the lanes they share."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from fornax.config.errors import ConfigError, ServingCode, ServingError
from fornax.export.placement import OneDevice, Placement
from fornax.export.undivided import undivided_device
from fornax.mesh import make_mesh
from fornax.serving.execution.lane import Lane
from fornax.serving.execution.memory import Memory, Reservation, account_of, limit_of
from fornax.serving.settings import OnMesh, Replicas

__all__ = ["DevicePool", "Place"]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one copy of a model goes."""

    placement: Placement
    lane: Lane
    devices: tuple[Any, ...]

    def spread(self, total: int) -> dict[str, int]:
        """Bytes by account, for `total` bytes laid evenly over the devices."""
        return self.on_each(-(-total // len(self.devices)))

    def on_each(self, count: int) -> dict[str, int]:
        """Bytes by account, for `count` bytes on each device."""
        found: dict[str, int] = {}
        for device in self.devices:
            account = account_of(device)
            found[account] = found.get(account, 0) + count
        return found


class DevicePool:
    """Devices, lanes and memory, shared by all models of a process."""

    def __init__(
        self,
        *,
        numbers: Sequence[int] = (),
        memory_limit: int | None = None,
        awake_seconds: float = 0.0,
    ):
        """The devices `numbers` of this process (none: all).

        Args:
          numbers: positions in `jax.local_devices()`.
          memory_limit: bytes that models may take of each device (CPU: of the host, by all CPU
            devices together); None: most of what it has.
          awake_seconds: how long the event loop looks for the next request after a lone one.

        Raises:
          ConfigError: for a number that no device has.
        """
        # Where jax has not begun yet: CPU programs run in the thread that calls them. The hop to
        # a thread of XLA's and back cost 30 us of the 45 that a small program took.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        every = jax.local_devices()
        if any(device.platform == "cpu" for device in every):
            undivided_device()  # now, before threads load models
        for number in numbers:
            if not 0 <= number < len(every):
                raise ConfigError(
                    f"devices has {number}; this process has {len(every)} devices, numbered from 0"
                )
        self._devices = {number: every[number] for number in numbers or range(len(every))}
        self.memory = Memory(
            {
                account_of(device): limit_of(device) if memory_limit is None else memory_limit
                for device in self._devices.values()
            }
        )
        self._awake_seconds = awake_seconds
        self._lanes: dict[tuple[int, ...], Lane] = {}

    @property
    def lanes(self) -> Mapping[tuple[int, ...], Lane]:
        """The lanes in use, by their devices' numbers."""
        return self._lanes

    def places(self, wanted: Replicas | OnMesh, total: int) -> list[Place]:
        """Where a model whose weights take `total` bytes goes.

        Raises:
          ServingError: INVALID_ARGUMENT for devices that are not there.
        """
        if isinstance(wanted, OnMesh):
            numbers = wanted.devices or tuple(self._devices)
            devices = [self._device(number) for number in numbers]
            return [Place(_on_mesh(wanted, devices), self._lane(numbers), tuple(devices))]
        return [
            Place(OneDevice(self._device(number)), self._lane((number,)), (self._device(number),))
            for number in self._replicas(wanted)
        ]

    def reserve(self, name: str, wanted: Mapping[str, int], what: str) -> Reservation:
        """Set memory aside, in bytes by account.

        Raises:
          ServingError: RESOURCE_EXHAUSTED, with figures, when it does not fit.
        """
        return self.memory.reserve(name, wanted, what)

    def _replicas(self, wanted: Replicas) -> Sequence[int]:
        if wanted.devices:
            return wanted.devices
        if wanted.count > len(self._devices):
            raise ServingError(
                ServingCode.INVALID_ARGUMENT,
                f"devices.count={wanted.count} and the server has {len(self._devices)} devices; "
                "ask for no more, or 0 for all",
            )
        free = {number: self._free(device) for number, device in self._devices.items()}
        ranked = sorted(self._devices, key=lambda number: (-free[number], self._claims(number)))
        return ranked[: wanted.count or len(ranked)]

    def _free(self, device: Any) -> int:
        return self.memory.free(account_of(device))

    def _claims(self, number: int) -> int:
        return sum(len(lane.shares) for numbers, lane in self._lanes.items() if number in numbers)

    def _device(self, number: int) -> Any:
        if number not in self._devices:
            raise ServingError(
                ServingCode.INVALID_ARGUMENT,
                f"devices has {number}; the server's devices are "
                f"{', '.join(map(str, self._devices))}",
            )
        return self._devices[number]

    def _lane(self, numbers: Sequence[int]) -> Lane:
        key = tuple(numbers)
        if key not in self._lanes:
            devices = [self._device(number) for number in key]
            name = f"{devices[0].platform}:{','.join(map(str, key))}"
            self._lanes[key] = Lane(
                name,
                on_host=devices[0].platform == "cpu",
                devices=len(devices),
                awake_seconds=self._awake_seconds,
            )
        return self._lanes[key]


def _on_mesh(wanted: OnMesh, devices: Sequence[Any]) -> Placement:
    from fornax.export import OnMesh as MeshPlacement

    return MeshPlacement(make_mesh(wanted.mesh, devices), wanted.mesh.resolved_rules())
