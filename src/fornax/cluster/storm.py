"""A storm of drills: random faults, one after the other, each once the run makes steps again."""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fornax.cluster.drill import Fault, drill
from fornax.cluster.files import ClusterFiles
from fornax.config import worker_record
from fornax.config.errors import ClusterError
from fornax.config.jsonl import read_json_lines

__all__ = ["STORM", "Weathered", "storm"]

STORM: tuple[Fault, ...] = ("kill", "kill", "stop", "lose", "preempt")
"""What a storm draws from: a kill as often as two of the others."""

_GOOD_STEPS = 5
_MORE_STEPS = 5
_TICK_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Weathered:
    """A fault of a storm that the run got over; seconds after the signal."""

    fault: Fault
    rank: int
    step: int
    """The step that the rank worked on."""
    named: float
    """When the run said who was at fault."""
    stepped: float
    """When all ranks had made a step again."""

    def __str__(self) -> str:
        return (
            f"{self.fault} {self.rank} at step {self.step}: named after {self.named:.1f} s, "
            f"a step made after {self.stepped:.1f} s"
        )


def storm(
    run_dir: str | Path, count: int, seed: int, faults: Sequence[Fault] = STORM
) -> Iterator[Weathered]:
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
    draw = random.Random(seed)
    for _ in range(count):
        hosts = run.wait_for_steps(_GOOD_STEPS + draw.randint(0, _MORE_STEPS))
        fault, rank = draw.choice(faults), draw.randrange(hosts)
        epoch, at = run.group()["epoch"], time.time()
        drill(run.files.run_dir, fault, rank)
        torn = run.wait_for(epoch, "teardown")
        run.wait_for_steps(1, after=epoch)
        step = next(e["step"] for e in reversed(run.events()) if e.get("drill") == fault)
        named, stepped = torn["time"] - at, time.time() - at
        yield Weathered(fault=fault, rank=rank, step=step, named=named, stepped=stepped)


class _Run:
    """A run, as its files show it."""

    def __init__(self, files: ClusterFiles) -> None:
        self.files = files

    def events(self) -> list[dict[str, Any]]:
        return read_json_lines(self.files.events)

    def group(self) -> dict[str, Any]:
        """How the newest group began to make steps; nothing where it has not."""
        states = [event for event in self.events() if "state" in event]
        began = [e for e in states if e["state"] == "running" and "step" in e]
        return began[-1] if began and began[-1]["epoch"] == states[-1]["epoch"] else {}

    def wait_for_steps(self, count: int, after: int = 0) -> int:
        """Until all ranks have made so many steps in a group later than `after`; how many ranks."""
        while True:
            group = self.group()
            if group and group["epoch"] > after:
                states = [worker_record.read(path) for path in self.files.records().values()]
                of_group = [s for s in states if s is not None and s.epoch == group["epoch"]]
                done = group["step"] + count
                whole = of_group and len(of_group) == of_group[0].hosts
                if whole and all(state.entered_step >= done for state in of_group):
                    return len(of_group)
            self._tick()

    def wait_for(self, epoch: int, state: str) -> Mapping[str, Any]:
        """The event of a group's coming into a state."""
        while True:
            for event in self.events():
                if event["epoch"] == epoch and event.get("state") == state:
                    return event
            self._tick()

    def _tick(self) -> None:
        latest = [event for event in self.events() if "state" in event][-1:]
        if not latest or latest[0]["state"] == "ended" or not self.files.is_held():
            raise ClusterError(
                f"{self.files.run_dir} does not run, or ended before the storm did; launch it with "
                "more steps"
            )
        time.sleep(_TICK_SECONDS)
