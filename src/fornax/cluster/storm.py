"""Drills one after the other, each followed until the run makes steps again, and their limits."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fornax.cluster.drill import Fault, drill, drill_beside
from fornax.cluster.files import ClusterFiles, RoleName
from fornax.cluster.verdict import Limits
from fornax.config import worker_record
from fornax.config.errors import ClusterError
from fornax.config.jsonl import read_json_lines

__all__ = [
    "LIMITS",
    "STORM",
    "DrillOutcome",
    "FaultLimits",
    "Replaced",
    "Target",
    "drills",
    "follow",
    "storm",
]

Target = RoleName | Literal["rank"]
"""What a fault is done to."""

STORM: tuple[Fault, ...] = (
    *("kill", "kill", "stop", "lose", "preempt", "partition", "slow"),
    "controller",
)
"""What a storm draws from: a kill as often as two of the others."""

_GOOD_STEPS = 5
_MORE_STEPS = 5
_TICK_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class FaultLimits:
    """What a run must do about a fault; None where nothing is asked.

    Seconds are of a machine that does nothing else, and count from the signal; the steps and the
    verdict hold on any.
    """

    verdict: str
    """The kind that the run names."""
    named: float | None
    """Seconds until the verdict."""
    stepped: float | None
    """Seconds until all ranks have made a step again."""
    steps: int | None
    """Steps that all ranks enter between the signal and the verdict."""
    again: int | None = None
    """Steps that the new group makes and the old one had entered."""


LIMITS: Mapping[Fault, FaultLimits] = {
    "kill": FaultLimits(verdict="killed", named=1.0, stepped=8.0, steps=1),
    "stop": FaultLimits(verdict="stopped", named=2.0, stepped=10.0, steps=1),
    "lose": FaultLimits(verdict="agent", named=1.0, stepped=10.0, steps=1),
    "preempt": FaultLimits(verdict="preempted", named=1.0, stepped=None, steps=None, again=0),
    "partition": FaultLimits(
        verdict="partition",
        named=Limits().silence + 1.0,
        stepped=Limits().silence + 11.0,
        steps=None,
    ),
    "controller": FaultLimits(verdict="controller", named=1.0, stepped=20.0, steps=1),
    "slow": FaultLimits(verdict="slow", named=None, stepped=None, steps=20, again=0),
}
"""By drill. A partition's seconds begin with those in which the host's own agent ends its worker; a
host that is to go, or is slow, is named first, and left when another is ready."""


@dataclass(frozen=True, kw_only=True)
class DrillOutcome:
    """What a run did about a fault; seconds after the signal."""

    fault: Fault
    rank: int | None
    """None of the controller."""
    step: int
    """The step that the rank worked on."""
    verdict: str
    faulty: int | None
    """The rank that the run named."""
    named: float
    """When it did: when the rank was torn down, or, of one that is slow or leaving, was
    notified."""
    stepped: float
    """When all ranks had made a step again."""
    steps: int
    """Steps that all ranks had entered since, when it was named."""
    again: int
    """Steps that the new group made again; 0 where the group stayed."""

    @property
    def over(self) -> tuple[str, ...]:
        """What is over the limits that hold on any machine, in words."""
        limit = LIMITS[self.fault]
        found = []
        if (self.verdict, self.faulty) != (limit.verdict, self.rank):
            whose = "" if self.faulty is None else f" of rank {self.faulty}"
            found.append(f"the verdict is {self.verdict}{whose}")
        if limit.steps is not None and self.steps > limit.steps:
            found.append(f"named {self.steps} steps later, limit {limit.steps}")
        if limit.again is not None and self.again > limit.again:
            found.append(f"{self.again} steps made again, limit {limit.again}")
        return tuple(found)

    def late(self, slowdown: float = 1.0) -> tuple[str, ...]:
        """What is over the limits in seconds, in words.

        Args:
          slowdown: how many times as long everything takes as on a machine that does nothing else.
        """
        limit = LIMITS[self.fault]
        times = (("named", self.named, limit.named), ("a step", self.stepped, limit.stepped))
        return tuple(
            f"{what} after {seconds:.1f} s, limit {most * slowdown:.3g} s"
            for what, seconds, most in times
            if most is not None and seconds > most * slowdown
        )

    def __str__(self) -> str:
        wrong = (*self.over, *self.late())
        whose = "" if self.rank is None else f" {self.rank}"
        return (
            f"{self.fault}{whose} at step {self.step}: named after {self.named:.1f} s, "
            f"a step made after {self.stepped:.1f} s, {self.again} made again; "
            f"{'OVER: ' + '; '.join(wrong) if wrong else 'within its limits'}"
        )


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """A sampler or data worker that another one took the place of."""

    fault: Fault
    role: RoleName
    number: int
    pid: int
    """The process that got the signal."""
    seconds: float
    """From the signal until the other one worked."""

    def __str__(self) -> str:
        return (
            f"{self.fault} {self.role} {self.number}, process {self.pid}: another took its place "
            f"after {self.seconds:.1f} s"
        )


def storm(
    run_dir: str | Path, count: int, seed: int, faults: Sequence[Fault] = STORM
) -> Iterator[DrillOutcome]:
    """Inject random faults into a launched run of this machine, and yield each it got over.

    At least five steps are made by all ranks between two faults, and up to five more.

    Args:
      run_dir: the run.
      count: how many faults.
      seed: which of them, whose, and after how many steps.
      faults: what to draw from.

    Raises:
      ClusterError: when the run ends before.
    """
    run = _Run(ClusterFiles(Path(run_dir).expanduser()))
    if run.files.controller_pid() is None:  # it is a thread of a Cluster's process
        faults = [fault for fault in faults if fault != "controller"]
    draw = random.Random(seed)
    for _ in range(count):
        hosts = run.wait_for_steps(_GOOD_STEPS + draw.randint(0, _MORE_STEPS))
        fault, rank = draw.choice(faults), draw.randrange(hosts)
        yield run.follow(fault, None if fault == "controller" else rank)


def drills(
    run_dir: str | Path, faults: Iterable[tuple[Fault, Target, int | None]]
) -> Iterator[DrillOutcome | Replaced]:
    """Inject these faults, with five steps or more between two, and yield each it got over.

    Args:
      run_dir: the run.
      faults: each with what it is done to, and the number of that, None of the controller. A
        sampler or data worker is killed or stopped.

    Raises:
      ClusterError: when the run ends before, or see `drill`.
    """
    run = _Run(ClusterFiles(Path(run_dir).expanduser()))
    for position, (fault, target, number) in enumerate(faults):
        if position:
            run.wait_for_steps(_GOOD_STEPS)
        if target == "rank" or number is None:
            yield run.follow(fault, number)
        else:
            yield run.follow_beside(fault, target, number)


def follow(run_dir: str | Path, fault: Fault, rank: int | None = None) -> DrillOutcome:
    """Inject a fault and wait until the run makes steps again; see `drill`.

    Raises:
      ClusterError: when the run ends before, or see `drill`.
    """
    return _Run(ClusterFiles(Path(run_dir).expanduser())).follow(fault, rank)


_TOLD: Mapping[Fault, str] = {"preempt": "going", "slow": "slow"}
"""Facts of the events that name a rank which is replaced later, or stays."""


class _Run:
    """A run, as its files show it."""

    def __init__(self, files: ClusterFiles) -> None:
        self.files = files
        self._epoch = self._after = 0
        """Where all were when this last waited for steps."""

    def follow(self, fault: Fault, rank: int | None) -> DrillOutcome:
        """Inject a fault and wait until the run is over it."""
        before = len(self.events())
        drill(self.files.run_dir, fault, rank)
        at = self._wait_for(lambda e: e.get("drill") == fault, before)
        said = self._wait_for(
            lambda e: (
                e.get("state") == "teardown"
                or (e.get("slow") == rank and not e.get("evict") and fault == "slow")
            ),
            before,
        )
        told = said
        if fault in _TOLD:  # before the group leaves it
            told = self._wait_for(lambda e: e.get(_TOLD[fault]) == rank, before)
        named_at = told["entered"] if "entered" in told else told["at_step"]
        stays = said["state"] == "running"
        epoch = said["epoch"]
        if stays:
            entered, began = said["at_step"], said["at_step"] + 1
            self.wait_for_steps(1, begins=began)
        else:
            entered = said["entered"]
            later = self._wait_for(
                lambda e: e["epoch"] > epoch and e.get("state") == "running" and "step" in e,
                before,
            )
            began = later["step"]
            self.wait_for_steps(1, after=epoch)
        return DrillOutcome(
            fault=fault,
            rank=rank,
            step=at["step"],
            verdict="slow" if stays else said["kind"],
            faulty=said["slow"] if stays else said["rank"],
            named=told["time"] - at["time"],
            stepped=time.time() - at["time"],
            steps=max(0, named_at - at["step"]),
            again=max(0, entered + 1 - began),
        )

    def follow_beside(self, fault: Fault, role: RoleName, number: int) -> Replaced:
        """Kill or stop a sampler or data worker, and wait until another works in its place."""
        began = time.time()
        pid = drill_beside(self.files.run_dir, fault, role, number)
        while True:
            path = self.files.beside_records(role).get(number)
            state = None if path is None else worker_record.read(path)
            if state is not None and state.pid not in (0, pid):
                break
            self._tick()
        ranks = [worker_record.read(path) for path in self.files.records().values()]
        entered = max((state.entered_step for state in ranks if state is not None), default=0)
        self.wait_for_steps(0, begins=entered)
        return Replaced(fault=fault, role=role, number=number, pid=pid, seconds=time.time() - began)

    def events(self) -> list[dict[str, Any]]:
        return read_json_lines(self.files.events)

    def group(self) -> dict[str, Any]:
        """How the newest group began to make steps; nothing where it has not."""
        states = [event for event in self.events() if "state" in event]
        began = [e for e in states if e["state"] == "running" and "step" in e]
        return began[-1] if began and began[-1]["epoch"] == states[-1]["epoch"] else {}

    def wait_for_steps(self, count: int, *, after: int = 0, begins: int = 0) -> int:
        """Until all ranks have made steps in a group later than `after`; how many ranks.

        Args:
          count: of steps, since the group began and since the last that this waited for.
          after: an epoch.
          begins: count no step before this one.
        """
        while True:
            group = self.group()
            if group and group["epoch"] > after:
                states = [worker_record.read(path) for path in self.files.records().values()]
                of_group = [s for s in states if s is not None and s.epoch == group["epoch"]]
                seen = self._after if self._epoch == group["epoch"] else 0
                done = max(group["step"], begins, seen) + count
                whole = of_group and len(of_group) == of_group[0].hosts
                if whole and all(state.entered_step >= done for state in of_group):
                    self._epoch, self._after = group["epoch"], done
                    return len(of_group)
            self._tick()

    def _wait_for(
        self, wanted: Callable[[Mapping[str, Any]], bool], begin: int
    ) -> Mapping[str, Any]:
        """The first such event from the one numbered `begin` on."""
        while True:
            for event in self.events()[begin:]:
                if wanted(event):
                    return event
            self._tick()

    def _tick(self) -> None:
        latest = [event for event in self.events() if "state" in event][-1:]
        if not latest or latest[0]["state"] == "ended" or not self.files.is_held():
            raise ClusterError(
                f"{self.files.run_dir} does not run, or ended before the drill was over; launch it "
                "with more steps"
            )
        time.sleep(_TICK_SECONDS)
