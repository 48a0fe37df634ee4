"""Device memory: what each loaded model has set aside, and whether one more fits."""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import jax

from fornax.config.errors import ServingCode, ServingError

__all__ = ["Memory", "Reservation", "limit_of"]

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
            self._change(reservation, wanted, what)

    def _change(self, reservation: Reservation, wanted: Mapping[str, int], what: str) -> None:
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
        reservation.bytes = {account: count for account, count in wanted.items() if count}
        if reservation.bytes:
            self._held[reservation] = None
        else:
            self._held.pop(reservation, None)

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
