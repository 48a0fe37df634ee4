"""One run with its failures: every second of it belongs to a cause.

A snapshot is copied to host memory every `Policy.steps` steps, while training stands still; each
tier takes some of them from there in the background. A failure throws the run back to the newest
snapshot that a surviving tier has whole. Then the failure is detected, hosts that are gone are
replaced by spares, the group forms again, the state is read and the step compiled; a failure in
this time begins it again. Between two failures nothing is stepped through: where a run is follows
from the time.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from fornax.plan.goodput.inputs import KINDS, Kind, Name, Policy, RunSpec

__all__ = ["CAUSES", "Cause", "Failure", "draw_failures", "simulate"]

Cause = Literal["step", "save", "detection", "waiting", "recovery", "restore", "compile", "lost"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
"""`step` and `save` are those that were kept; those that a failure undid are `lost`."""
_DOWN: tuple[Cause, ...] = ("detection", "waiting", "recovery", "restore", "compile")


@dataclass(frozen=True)
class Failure:
    """Something fails at `time`, in seconds: host or slice number `unit`."""

    time: float
    kind: Kind
    unit: int = 0


def draw_failures(run: RunSpec, horizon: float, seed: int) -> list[Failure]:
    """Independent Poisson processes, one per kind, over `horizon` seconds; in order of time."""
    rng = np.random.default_rng(seed)
    found = []
    for kind in KINDS:
        count = rng.poisson(run.rates.get(kind, 0.0) * horizon)
        units = {"host": run.hosts, "slice": run.slices}.get(kind, 1)
        times, numbers = rng.uniform(0, horizon, count), rng.integers(units, size=count)
        found += [Failure(float(t), kind, int(n)) for t, n in zip(times, numbers, strict=True)]
    return sorted(found, key=lambda failure: failure.time)


def simulate(
    run: RunSpec, policy: Policy, failures: Sequence[Failure], horizon: float
) -> dict[Cause, float]:
    """Seconds by cause; they sum to `horizon`.

    Args:
      run: what runs and on what.
      policy: snapshots, tiers and spares.
      failures: in order of time, all before `horizon`.
      horizon: seconds of wall time.
    """
    work = policy.steps * run.step
    cycle = work + run.copy_seconds
    seconds: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
    copies = _Copies(run, policy)
    spares = [0.0] * policy.spares
    base, start, running, lacking, number = 0, 0.0, 0.0, 0, 0
    while number < len(failures):
        begin = failures[number].time
        running += begin - start
        copies.advance(base, begin - start, cycle)
        while True:
            failure, number = failures[number], number + 1
            dead = copies.fail(failure)
            lacking += len(dead)
            for _ in dead:
                heapq.heappush(spares, failure.time + run.repair)
            known = begin + run.detection
            ready = max([known, *heapq.nsmallest(lacking, spares)])
            base, reading = copies.newest()
            formed = ready + run.recovery
            up = formed + reading + run.compile
            end = min([up, horizon, *(f.time for f in failures[number : number + 1])])
            if end >= ready:
                for _ in range(lacking):
                    heapq.heappop(spares)
                lacking = 0
            ends = (known, ready, formed, formed + reading, up)
            for cause, until in zip(_DOWN, ends, strict=True):
                seconds[cause] += max(0.0, min(until, end) - begin)
                begin = max(begin, min(until, end))
            if number == len(failures) or failures[number].time >= up:
                break
        copies.restored(base)
        start = min(up, horizon)
    running += horizon - start
    done, rest = divmod(horizon - start, cycle)
    seconds["step"] = (base + done) * work + min(rest, work)
    seconds["save"] = (base + done) * run.copy_seconds + max(0.0, rest - work)
    seconds["lost"] = max(0.0, running - seconds["step"] - seconds["save"])
    return seconds


@dataclass
class _Copies:
    """Which snapshot each tier has whole, and what failures took from it.

    A snapshot's number counts those from the start of the run; number 0 is the initial state.
    """

    run: RunSpec
    policy: Policy
    whole: dict[Name, int] = field(init=False)
    """Newest snapshot by tier; -1 for a tier that has none."""
    without_memory: set[int] = field(default_factory=set)
    """Hosts whose own copy is gone until the run is restored."""
    without_replica: set[int] = field(default_factory=set)
    """Hosts whose replica is gone until the next one is whole."""

    def __post_init__(self) -> None:
        self.whole = dict.fromkeys(self.policy.every, 0)
        self._tiers = {name: self.run.tier(name) for name in self.policy.every}

    def advance(self, base: int, elapsed: float, cycle: float) -> None:
        """Training resumed from snapshot `base` for `elapsed` seconds."""
        for name, every in self.policy.every.items():
            taken = base + math.floor((elapsed - self._tiers[name].write_seconds) / cycle)
            newest = taken // every * every
            if newest > base:
                self.whole[name] = newest
                if name == "peer":
                    self.without_replica.clear()

    def fail(self, failure: Failure) -> set[int]:
        """Take what a failure takes; the hosts that have to be replaced."""
        if failure.kind == "process":
            return set()
        if failure.kind == "restart":
            self._lose("memory", "peer")
            return set()
        size = 1 if failure.kind == "host" else self.run.slice_hosts
        dead = set(range(failure.unit * size, (failure.unit + 1) * size))
        self.without_memory |= dead
        self.without_replica |= {(host - self.run.partner) % self.run.hosts for host in dead}
        self._lose("memory", "disk")
        if self.without_memory & self.without_replica:
            self._lose("peer")
        return dead

    def _lose(self, *names: Name) -> None:
        for name in names:
            if name in self.whole:
                self.whole[name] = -1

    def newest(self) -> tuple[int, float]:
        """The newest snapshot that a tier has whole and the seconds to read it."""
        found = [(n, -self._tiers[name].read_seconds) for name, n in self.whole.items() if n >= 0]
        number, reading = max(found, default=(0, 0.0))
        return number, -reading

    def restored(self, base: int) -> None:
        """All hosts have snapshot `base` in their memory again."""
        self.without_memory.clear()
        if "memory" in self.whole:
            self.whole["memory"] = base
