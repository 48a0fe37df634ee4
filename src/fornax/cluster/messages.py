"""What controller and agents say to each other: JSON objects, one dataclass each.

Each message names the epoch it belongs to; the controller drops those of an earlier one.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["CLEAN", "Assignment", "Observation", "decode", "encode"]

CLEAN = (0, 130, 143)
"""Exit codes of a run that is done, or saved and stopped because it was asked to."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """To an agent: start this worker."""

    epoch: int
    rank: int
    hosts: int
    coordinator: str
    """host:port of the epoch's coordination service."""
    program: str
    """`package.module:NAME`, called with the words; it returns an exit code."""
    words: list[str]
    mtbf: float
    """Mean seconds between failures of the whole run."""
    lease: float
    """Seconds without an answer of the controller after which the agent ends the worker."""
    environment: dict[str, str]
    """Further variables of the worker's environment."""
    credentials: dict[str, str] = field(repr=False)
    """Of the run, for what the worker connects to: fields of `Credentials`."""
    holders: list[str]
    """host:port of the agents that hold snapshots of a rank whose host has none: where to fetch
    them before the worker starts, the first to be asked first."""
    leaving: dict[str, str]
    """By rank, host:port of agents that leave a group that continues with fewer: their snapshots
    are fetched before the worker starts too, and held as replicas are."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Of an agent: how its worker fares, seen from outside. Ages are seconds."""

    epoch: int
    rank: int
    host: str
    pid: int
    agent_pid: int
    code: int | None = None
    """The exit code of a worker that ended, minus the signal's number where one ended it; of one
    that left, 143 when all saved and stopped, None when it lost another."""
    left: bool = False
    """Whether the worker has left the group and waits in its process for the next."""
    preempted: bool = False
    """Whether the host is to go: the agent got SIGTERM."""
    fenced: bool = False
    """Whether the agent ended the worker, because it did not reach the controller."""
    stopped: float = 0.0
    """How long the kernel has held the process stopped (SIGSTOP)."""
    silent: float = 0.0
    """Since the worker's heartbeat, without the time for which it waited for a processor."""
    unchanged: float = 0.0
    """Since it last changed phase or step."""
    changed_at: float = 0.0
    """Wall time of that change, seconds since 1970."""
    step: int = -1
    phase: str = "start"
    entered_step: int = -1
    entered_ns: int = 0
    """Monotonic time of the host at which it started that step's program, ns."""
    data_seconds: float = 0.0
    """What it had spent by then on waiting for data in all steps."""
    code_seconds: float = 0.0
    """And on its own code in them, outside the devices' programs."""
    program_seconds: float = 0.0
    """And in these programs: processor time, and time in which the kernel kept it from running."""
    unsaved: int = -1
    """The step after which a checkpoint last had no room on the disk; -1 for none."""
    kept: int = -1
    """The step after which it stopped, kept in the agents' memory only; -1 for none."""
    batch: int = -1
    """The number of the step's batch, as in `data.skip_steps`; -1 where none is known."""
    record: int = -1
    """The index in its source of the record of data that a function of the user's has; -1: none."""
    part: str = ""
    """The name of that record's part of a mixture."""


def encode(kind: str, value: object | None = None) -> dict[str, object]:
    """A message of a kind, with the fields of a dataclass."""
    return {"kind": kind, **({} if value is None else vars(value))}


def decode(cls: type[T], message: Mapping[str, Any]) -> T:
    """The dataclass whose fields a message has."""
    return cls(**{field.name: message[field.name] for field in dataclasses.fields(cls)})  # pyrefly: ignore
