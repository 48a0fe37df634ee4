"""What a simulated run is: its hosts, how they fail, and the storage it restores from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fornax.config import ConfigError

__all__ = [
    "KINDS",
    "TIERS",
    "Kind",
    "Name",
    "Policy",
    "RunSpec",
    "Tier",
]

Kind = Literal["process", "host", "slice", "restart"]
KINDS: tuple[Kind, ...] = ("process", "host", "slice", "restart")
"""What fails: a worker process, a host, all hosts of a slice at once, every process of the run."""

Name = Literal["memory", "peer", "disk", "store"]
TIERS: tuple[Name, ...] = ("memory", "peer", "disk", "store")


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Where snapshots lie, each host's share of the state written and read by all hosts at once."""

    name: Name
    write_seconds: float
    """Until a snapshot, once copied to host memory, is whole there; training continues
    meanwhile."""
    read_seconds: float
    """To bring the state back from there to the devices."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run: times in seconds, sizes in bytes, rates in bytes/s, mean times between failures.

    Raises:
      ConfigError: for counts that do not fit together.
    """

    hosts: int
    step: float
    state: float
    """Of all hosts together, spread evenly: parameters, optimizer, what else a restart needs."""
    rates: Mapping[Kind, float]
    """Failures per second of the whole run, by kind."""
    memory_rate: float
    """A host's, from its devices into its own memory and back: training stands still for a copy."""
    peer_rate: float
    """Between two hosts, while all send."""
    disk_rate: float
    """A host's local disk, synced."""
    store_rate: float
    """The object store's, all hosts together."""
    detection: float
    recovery: float
    """From the verdict to a group that is formed again, without the reading of the state."""
    compile: float = 0.0
    """Until the step is compiled there."""
    repair: float
    """Until a host that failed is a spare."""
    slice_hosts: int

    def __post_init__(self) -> None:
        """Check that slices divide the hosts."""
        if self.hosts < 1:
            raise ConfigError(f"hosts={self.hosts} is not a run; give 1 or more")
        if self.slice_hosts < 1 or self.hosts % self.slice_hosts:
            raise ConfigError(
                f"slice_hosts={self.slice_hosts} does not divide {self.hosts} hosts into slices; "
                "give a divisor of the hosts"
            )

    @property
    def slices(self) -> int:
        """Groups of hosts that fail together."""
        return self.hosts // self.slice_hosts

    @property
    def partner(self) -> int:
        """How far from a host the one is that holds its replica: in the next slice, if any."""
        return self.slice_hosts if self.slices > 1 else self.hosts // 2

    @property
    def mtbf(self) -> float:
        """Mean seconds between two failures of the run, of any kind; infinite without failures."""
        rate = sum(self.rates.values())
        return 1 / rate if rate else math.inf

    @property
    def copy_seconds(self) -> float:
        """How long training stands still for a snapshot."""
        return self.state / self.hosts / self.memory_rate

    def tier(self, name: Name) -> Tier:
        """A tier's times for this run's state; what is read passes through the host's memory."""
        share = self.state / self.hosts
        seconds = {
            "memory": 0.0,
            "peer": share / self.peer_rate,
            "disk": share / self.disk_rate,
            "store": self.state / self.store_rate,
        }[name]
        return Tier(name=name, write_seconds=seconds, read_seconds=seconds + self.copy_seconds)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What is decided: how often a snapshot is taken, and which tiers take which of them."""

    steps: int
    """Steps between two snapshots."""
    every: Mapping[Name, int]
    """Tier to which snapshots it takes: 1 for each, 3 for each third."""
    spares: int
