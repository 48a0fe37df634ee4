"""What a read capture holds: events on rows of time, steps, operations, causes, memory.

Times are integer nanoseconds since the capture began, on the clock of rank 0. Columns are NumPy
arrays of one length.

Legend: E events of a row, S steps, R rows of a table.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fornax.hlo import Category, Peak, ProgramFacts

Ints = NDArray[np.int64]
Kind = Literal["operations", "exchange", "host", "python"]
Cause = Literal["compute", "exchange", "input", "host", "compile", "idle"]
Owner = Literal["weights", "optimizer", "activations", "cache", "other"]
WaitKind = Literal["lock", "buffer", "threads", "device"]
By = Literal["op", "class", "module", "source"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
OWNERS: tuple[Owner, ...] = get_args(Owner)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """Events of one row, sorted by `begin`, an event before those that it encloses."""

    begin: Ints
    duration: Ints
    own: Ints
    """`duration` without the events of the row that this one encloses: self time."""
    name: NDArray[np.int32]
    """Positions in `Profile.names`."""
    operation: NDArray[np.int32]
    """Positions in `Profile.operations`; -1 for none."""
    step: NDArray[np.int32]
    """Positions in `Profile.steps`; -1 outside of all steps."""
    helped: Ints | None = None
    """Nanoseconds that other threads worked on parts of each event; None where that is not known.
    A CPU's operation that is divided over threads is over sooner the more of them are free."""

    def __len__(self) -> int:
        return len(self.begin)

    @property
    def end(self) -> Ints:
        """When each ends."""
        return self.begin + self.duration


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A thread, a stream, or a line of a device."""

    rank: int
    device: str
    """"cpu:0", "gpu:0", "tpu:0"; empty for a row of the host."""
    name: str
    kind: Kind
    """What its events are: a device's operations, a device's transfers (a row of their own on TPU
    and GPU; on CPU they lie among operations), the host's own work, Python calls."""
    events: Events


@dataclasses.dataclass(frozen=True, kw_only=True)
class Causes:
    """The wall time of one step of one rank, every nanosecond under one cause."""

    nanoseconds: Mapping[Cause, int]
    """All of `CAUSES`; they add up to the step's time."""

    @property
    def seconds(self) -> dict[Cause, float]:
        """The same in seconds."""
        return {cause: value / 1e9 for cause, value in self.nanoseconds.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One step of one rank."""

    rank: int
    number: int
    name: str
    """Of its annotation, "train" or "engine" say; of the program where no step was annotated."""
    begin: int
    end: int
    causes: Causes

    @property
    def seconds(self) -> float:
        """Wall time."""
        return (self.end - self.begin) / 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One HLO operation of one program; figures are those of one run on one device."""

    program: int
    """Position in `Profile.programs`; -1 if the capture does not hold its program."""
    name: str
    opcode: str
    """Empty where the program is not known."""
    category: Category | Literal["exchange"]
    scope: tuple[str, ...]
    """Modules of the model that asked for it, the outermost first: ("layers", "attention")."""
    backward: bool
    """Of a gradient: inside jax's `transpose(…)`."""
    op_name: str
    source: str
    """The line that asked for it: "model.py:88 (f)"."""
    fornax_source: str
    dtype: str
    flops: float
    """Of matrix products, convolutions and kernels; a multiplication and an addition are two."""
    bytes: int
    """Read from and written to main memory; of an exchange, of the array exchanged."""
    bound_seconds: float | None
    """Roofline: the longer of arithmetic at the device's peak and traffic at its bandwidth. None
    where the device's rates or the operation's work are not known, and of exchanges."""
    bound: Literal["compute", "memory"] | None
    planned_seconds: float | None
    """What `fornax plan` expects of one run: the roofline at the shares that programs reach."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """One compiled program that ran or was loaded during the capture."""

    name: str
    module_id: int
    rank: int
    """The first rank whose capture holds it."""
    proto: bytes
    """Serialized `xla.HloProto`: the module and its buffer assignment."""
    text: str
    """The module as HLO text, which `fornax.hlo.parse` takes."""
    facts: ProgramFacts | None
    """None where the text is not understood; `CaptureInfo.notes` says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes that are live while one instruction runs."""

    position: int
    """In the program's order; instructions of loops at the place of their loop."""
    instruction: str
    bytes: Mapping[Owner, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """What a device's allocator said at one time."""

    time: int
    rank: int
    device: str
    bytes_in_use: int
    peak_bytes: int
    limit_bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of one program on one device, as the compiler assigned it."""

    program: int
    """Position in `Profile.programs`."""
    peak: Peak
    owners: Mapping[Owner, int]
    """Bytes at the peak; they add up to `peak.bytes`."""
    buffer_owners: tuple[Owner, ...]
    """The owner of each of `peak.buffers`."""
    course: tuple[Moment, ...]
    """Over the program's order, thinned where it is long; the peak is always in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thread:
    """A thread of a host."""

    rank: int
    name: str
    busy_seconds: float
    """Under any event."""
    waiting_seconds: float
    """Of those, under events that wait: for a device, a lock, another thread."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collection:
    """One garbage collection of Python, which holds the interpreter's lock."""

    rank: int
    begin: int
    duration: int
    generation: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wait:
    """What threads of one rank waited for under events of one name."""

    rank: int
    kind: WaitKind
    """A lock of Python; a buffer that another run holds; other threads, as in a rendezvous; a
    device's results."""
    name: str
    """Of the event; of a lock the Python function that asked for it."""
    threads: int
    """How many waited."""
    count: int
    seconds: float
    """Summed over threads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """What the hosts' threads did."""

    threads: tuple[Thread, ...]
    collections: tuple[Collection, ...]
    waits: tuple[Wait, ...] = ()
    """By rank, the longest first."""
    unknown: tuple[str, ...] = ()
    """Locks that a capture of this kind does not show, and why: a sentence each."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Counter:
    """One counter of one device over time [N]."""

    rank: int
    device: str
    """"gpu:0"; "cpu" for all CPUs together, of what the process ran in user mode."""
    name: str
    time: Ints
    """Nanoseconds since the capture began [N]."""
    value: NDArray[np.float64]
    """[N]"""
    total: bool
    """Whether a value is all that was counted since the capture began; else a sample of its own."""

    @property
    def rate(self) -> float | None:
        """Of a total, the count a second; None where it was read once, and of samples."""
        seconds = (int(self.time[-1]) - int(self.time[0])) / 1e9
        if not self.total or seconds <= 0:
            return None
        return float(self.value[-1] - self.value[0]) / seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
    """All counters of a capture."""

    series: tuple[Counter, ...] = ()
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What is not counted, "cycles" or "gpu:0", and why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the input pipeline, from annotations `input/<stage>`."""

    name: str
    count: int
    seconds: float
    """Self time in it, summed over threads and ranks."""
    waited_seconds: float
    """Of that, on the threads that run steps, inside of steps: what a step waited."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Skew:
    """How far apart ranks finished their own part of one step."""

    number: int
    seconds: float
    """Between the least and the most of `own_seconds`."""
    late_rank: int
    own_seconds: Mapping[int, float]
    """Rank -> seconds of the step that it spent on anything but exchanges."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureInfo:
    """What was captured, where and with what."""

    folder: str
    """Name of the capture in its directory: "2026_11_28_14_59_52"."""
    begin: float
    """Unix seconds at time 0."""
    seconds: float
    platform: Literal["cpu", "gpu", "tpu"]
    device_kind: str
    devices: int
    """Of all ranks."""
    hosts: tuple[str, ...]
    """Of each rank, in order."""
    ranks: tuple[int, ...]
    versions: Mapping[str, str]
    """"jax", "jaxlib", "fornax", as far as known."""
    truncated: bool
    """The capture ended before it was asked to, at its limit of time or size."""
    bytes: int
    """Of the files."""
    notes: tuple[str, ...] = ()
    """What could not be read or joined, one sentence each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRow:
    """Operations with one key, summed over devices and the steps asked for."""

    key: str
    """Name of the operation, class, "layers/attention", or line; empty where there is none."""
    program: str
    """Of an operation's row, the name of its program; else empty."""
    operations: tuple[int, ...]
    """Positions in `Profile.operations`."""
    category: str
    """Of the part that took the most time."""
    source: str
    """The same."""
    count: int
    """Runs."""
    seconds: float
    """Self time."""
    share: float
    """Of the seconds of all rows."""
    flops: float
    """Of all runs."""
    bytes: float
    """The same."""
    bound_seconds: float | None
    """Of all runs that have a roofline bound, at that; None where none has."""
    bounded_seconds: float
    """Self time of those runs."""
    planned_seconds: float | None
    """What the planner expects of the same runs."""

    @property
    def flops_rate(self) -> float:
        """FLOP/s; 0 for rows that took no time."""
        return self.flops / self.seconds if self.seconds else 0.0

    @property
    def bytes_rate(self) -> float:
        """Bytes/s; 0 for rows that took no time."""
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def times_bound(self) -> float | None:
        """Self time over the roofline's, of runs that have a bound: 1 is as fast as the device can.

        Below 1 where data stayed in a CPU's caches, which the roofline of main memory leaves out.
        """
        return self.bounded_seconds / self.bound_seconds if self.bound_seconds else None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Operations grouped by something, the longest first."""

    by: By
    rows: tuple[TableRow, ...]
    steps: tuple[int, ...]
    """Numbers of the steps that it covers; empty for a capture without steps."""
    matrix: NDArray[np.float64]
    """Self time in seconds of each row in each step, summed over devices [S, R]."""

    @property
    def seconds(self) -> float:
        """Of all rows."""
        return math.fsum(row.seconds for row in self.rows)
