"""The devices of the process: their memory, which model goes where, and what schedules them."""

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from fornax.config.errors import ConfigError, ServingCode, ServingError
from fornax.export.bundle import Bundle
from fornax.export.placement import OneDevice, Placement
from fornax.export.undivided import undivided_device
from fornax.mesh import make_mesh
from fornax.mesh.group import Leader
from fornax.serving.execution.group import OtherParts
from fornax.serving.execution.scheduler import DeviceScheduler
from fornax.serving.settings import OnMesh, Replicas

__all__ = ["DevicePool", "Memory", "Place", "Reservation", "limit_of", "on_mesh"]

_HOST_SHARE = 0.8
_CGROUPS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""What a container may have, by the new and the old rules."""
_DEVICE_SHARE = 0.95
"""Of what XLA has set aside there: a little is lost between arrays."""


def limit_of(device: jax.Device) -> int:
    """Bytes that models may take of a device: most of what it has."""
    stats = None if device.platform == "cpu" else device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(_DEVICE_SHARE * stats["bytes_limit"])
    return int(_HOST_SHARE * _host_bytes())


def _host_bytes() -> int:
    """What the machine has, or the container may have if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUPS:
        with contextlib.suppress(OSError):
            limit = path.read_text().strip()
            total = min(total, int(limit)) if limit.isdecimal() else total
    return total


def account_of(device: jax.Device) -> str:
    """Whose memory a device uses: its own, or the host's, which all CPU devices share."""
    return "cpu" if device.platform == "cpu" else f"{device.platform}:{device.id}"


@dataclasses.dataclass(eq=False)
class Reservation:
    """What one model has set aside, by account; `release` gives it back."""

    memory: "Memory"
    name: str
    bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    released: bool = False

    @property
    def total(self) -> int:
        """Bytes over all accounts."""
        return sum(self.bytes.values())

    def change(self, wanted: Mapping[str, int], what: str) -> None:
        """Set aside `wanted` bytes by account in place of what was.

        Raises:
          ServingError: RESOURCE_EXHAUSTED, with figures, when one does not fit; nothing changes.
            CANCELLED after `release`: the load was given up.
        """
        self.memory.change(self, wanted, what)

    def release(self) -> None:
        """Give all of it back; nothing can be set aside by this one any more."""
        self.released = True
        self.memory.change(self, {}, "")


class Memory:
    """The accounts."""

    def __init__(self, limits: Mapping[str, int]):
        """`limits` in bytes by account."""
        self.limits = dict(limits)
        self._held: dict[Reservation, None] = {}
        self._lock = threading.Lock()

    def reserve(self, name: str, wanted: Mapping[str, int], what: str) -> Reservation:
        """Set memory aside for a model.

        Raises:
          ServingError: RESOURCE_EXHAUSTED when it does not fit.
        """
        reservation = Reservation(self, name)
        self.change(reservation, wanted, what)
        return reservation

    def used(self, account: str) -> int:
        """Bytes set aside."""
        # Of a copy, made at once: a thread that loads may set aside or give back meanwhile.
        return sum(each.bytes.get(account, 0) for each in tuple(self._held))

    def free(self, account: str) -> int:
        """Bytes left."""
        return self.limits[account] - self.used(account)

    def change(self, reservation: Reservation, wanted: Mapping[str, int], what: str) -> None:
        """See `Reservation.change`; models may load in several threads."""
        with self._lock:
            self._check(reservation, wanted, what)
            reservation.bytes = {account: count for account, count in wanted.items() if count}
            if reservation.bytes:
                self._held[reservation] = None
            else:
                self._held.pop(reservation, None)

    def _check(self, reservation: Reservation, wanted: Mapping[str, int], what: str) -> None:
        if reservation.released and wanted:
            raise ServingError(ServingCode.CANCELLED, f"{reservation.name} is not loaded any more")
        for account, count in wanted.items():
            others = self.used(account) - reservation.bytes.get(account, 0)
            if others + count > self.limits[account]:
                raise ServingError(
                    ServingCode.RESOURCE_EXHAUSTED,
                    f"{reservation.name} needs {_size(count)} of {account} memory ({what}), and "
                    f"{_size(self.limits[account] - others)} of {_size(self.limits[account])} are "
                    f"free{self._holders(account, reservation)}; unload a model, leave out large "
                    "buckets, or raise model_memory",
                )

    def _holders(self, account: str, asking: Reservation) -> str:
        held = [
            f"{each.name} {_size(each.bytes[account])}"
            for each in self._held
            if each is not asking and account in each.bytes
        ]
        return f" (held: {', '.join(held)})" if held else ""


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one copy of a model goes."""

    placement: Placement
    scheduler: DeviceScheduler
    devices: tuple[jax.Device, ...]
    others: Callable[[Bundle, Mapping[str, Any]], OtherParts] | None = None
    """Of a mesh over several processes: has the others load a bundle, with compiler options."""

    @property
    def own(self) -> list[jax.Device]:
        """The devices of this process."""
        return [each for each in self.devices if each.process_index == jax.process_index()]

    def spread(self, total: int) -> dict[str, int]:
        """Bytes by account of this process, for `total` bytes laid evenly over the devices."""
        return self.on_each(-(-total // len(self.devices)))

    def on_each(self, count: int) -> dict[str, int]:
        """Bytes by account of this process, for `count` bytes on each device."""
        found: dict[str, int] = {}
        for device in self.own:
            account = account_of(device)
            found[account] = found.get(account, 0) + count
        return found


class DevicePool:
    """Devices, schedulers and memory, shared by all models of a process."""

    def __init__(
        self,
        *,
        numbers: Sequence[int] = (),
        memory_limit: int | None = None,
        leader: Leader | None = None,
    ):
        """The devices `numbers` of this process (none: all).

        Args:
          numbers: positions in `jax.local_devices()`.
          memory_limit: bytes that models may take of each device (CPU: of the host, by all CPU
            devices together); None: most of what it has.
          leader: tells other processes, over whose devices meshes go too. Then devices have their
            positions in `jax.devices()`, of which the first are those of this process.

        Raises:
          ConfigError: for a number that no device has.
        """
        # Where jax has not begun yet: CPU programs run in the thread that calls them. The hop to
        # a thread of XLA's and back cost 30 us of the 45 that a small program took.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        every = jax.local_devices() if leader is None else jax.devices()
        if any(device.platform == "cpu" for device in every):
            undivided_device()  # now, before threads load models
        for number in numbers:
            if not 0 <= number < len(every):
                raise ConfigError(
                    f"devices has {number}; this process has {len(every)} devices, numbered from 0"
                )
        self._leader = leader
        self._devices = {number: every[number] for number in numbers or range(len(every))}
        here = jax.process_index()
        self._own = {n: each for n, each in self._devices.items() if each.process_index == here}
        self.memory = Memory(
            {
                account_of(device): limit_of(device) if memory_limit is None else memory_limit
                for device in self._own.values()
            }
        )
        self._schedulers: dict[tuple[int, ...], DeviceScheduler] = {}

    @property
    def several(self) -> bool:
        """Whether there are devices of other processes."""
        return len(self._own) < len(self._devices)

    def places(self, wanted: Replicas | OnMesh, total: int) -> list[Place]:
        """Where a model whose weights take `total` bytes goes.

        Raises:
          ServingError: INVALID_ARGUMENT for devices that are not there.
        """
        if isinstance(wanted, OnMesh):
            numbers = wanted.devices or tuple(self._devices)
            devices = [self._device(number) for number in numbers]
            others = None
            if self._leader is not None and not set(numbers) <= self._own.keys():
                self._check_all(numbers)
                others = functools.partial(OtherParts, self._leader, wanted)
            placement = on_mesh(wanted, devices)
            return [Place(placement, self._scheduler(numbers), tuple(devices), others)]
        return [
            Place(
                OneDevice(self._device(number)), self._scheduler((number,)), (self._device(number),)
            )
            for number in self._replicas(wanted)
        ]

    def _replicas(self, wanted: Replicas) -> Sequence[int]:
        for number in wanted.devices:
            if self._device(number) not in self._own.values():
                raise ServingError(
                    ServingCode.INVALID_ARGUMENT,
                    f"devices has {number}, a device of another process; a replica is on one of "
                    f"process 0's, {', '.join(map(str, self._own))}",
                )
        if wanted.devices:
            return wanted.devices
        if wanted.count > len(self._own):
            raise ServingError(
                ServingCode.INVALID_ARGUMENT,
                f"devices.count={wanted.count} and the server has {len(self._own)} devices; "
                "ask for no more, or 0 for all",
            )
        free = {number: self._free(device) for number, device in self._own.items()}
        ranked = sorted(self._own, key=lambda number: (-free[number], self._claims(number)))
        return ranked[: wanted.count or len(ranked)]

    def _check_all(self, numbers: Sequence[int]) -> None:
        """Refuse a mesh in which a process would have no part."""
        if tuple(numbers) != tuple(self._devices):
            raise ServingError(
                ServingCode.INVALID_ARGUMENT,
                f"devices={list(numbers)} of a mesh are neither all {len(self._devices)} of the "
                f"server's processes, in order, nor process 0's, "
                f"{', '.join(map(str, self._own))}; leave devices out for all",
            )

    def _free(self, device: jax.Device) -> int:
        return self.memory.free(account_of(device))

    def _claims(self, number: int) -> int:
        return sum(
            len(scheduler.shares)
            for numbers, scheduler in self._schedulers.items()
            if number in numbers
        )

    def _device(self, number: int) -> jax.Device:
        if number not in self._devices:
            raise ServingError(
                ServingCode.INVALID_ARGUMENT,
                f"devices has {number}; the server's devices are "
                f"{', '.join(map(str, self._devices))}",
            )
        return self._devices[number]

    def _scheduler(self, numbers: Sequence[int]) -> DeviceScheduler:
        key = tuple(numbers)
        if key not in self._schedulers:
            devices = [self._device(number) for number in key]
            name = f"{devices[0].platform}:{','.join(map(str, key))}"
            self._schedulers[key] = DeviceScheduler(
                name,
                on_host=devices[0].platform == "cpu",
                devices=len(devices),
            )
        return self._schedulers[key]


def on_mesh(wanted: OnMesh, devices: Sequence[jax.Device]) -> Placement:
    """The placement on a mesh of these devices."""
    from fornax.export import OnMesh as MeshPlacement

    return MeshPlacement(make_mesh(wanted.mesh, devices), wanted.mesh.resolved_rules())
