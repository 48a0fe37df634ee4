"""A capture as read: rows of events and what they mean, and the questions asked of it."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from fornax.config.errors import ProfileError
from fornax.profile.facts import (
    By,
    CaptureInfo,
    Causes,
    Counters,
    Host,
    Memory,
    Operation,
    Program,
    Row,
    Sample,
    Skew,
    Stage,
    Step,
    Table,
    TableRow,
)
from fornax.profile.served import Serving


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """One capture, of one rank or many."""

    info: CaptureInfo
    names: Sequence[str]
    """Names of events."""
    rows: tuple[Row, ...]
    steps: tuple[Step, ...]
    """By rank, then by time."""
    operations: tuple[Operation, ...]
    programs: tuple[Program, ...]
    memory: tuple[Memory, ...]
    """Of the programs that ran and carry a buffer assignment."""
    samples: tuple[Sample, ...]
    """Of allocators, where devices have `memory_stats`."""
    host: Host
    input: tuple[Stage, ...]
    """Stages of the input pipeline, the one that was waited for longest first."""
    counters: Counters
    """Of hardware."""
    serving: Serving
    """Requests and batches of a server; empty for captures of anything else."""

    def ops(self, by: By = "op", steps: Iterable[int] | None = None) -> Table:
        """Measured time of operations beside what they do, the longest first.

        Args:
            by: one row an operation, a class of operations, a module of the model, or a line of
                source.
            steps: numbers of the steps to count; None counts all that ran, in a step or not.

        Raises:
            ProfileError: `by` is not one of these, or a step is not in the capture.
        """
        if by not in get_args(By):
            raise ProfileError(f"by={by!r} is not a grouping; use one of {', '.join(get_args(By))}")
        chosen = self._numbers(steps)
        seconds, counts = self._measured(chosen, everything=steps is None)
        groups: dict[tuple[str, str], list[int]] = {}
        for index in np.flatnonzero(counts):
            groups.setdefault(self._key(by, int(index)), []).append(int(index))
        totals = seconds.sum(axis=0)
        whole = math.fsum(totals)
        rows = [
            (self._row(key, members, totals, counts, whole), seconds[:-1, members].sum(axis=1))
            for key, members in groups.items()
        ]
        rows.sort(key=lambda pair: pair[0].seconds, reverse=True)
        columns = [column for _, column in rows] or [np.zeros(len(chosen))]
        matrix = np.stack(columns, axis=1)[:, : len(rows)]
        return Table(by=by, rows=tuple(row for row, _ in rows), steps=chosen, matrix=matrix)

    def step_times(self) -> list[tuple[Step, Causes]]:
        """Each step of each rank, and its wall time by cause."""
        return [(step, step.causes) for step in self.steps]

    def skew(self) -> list[Skew]:
        """For each step that several ranks made: how far apart they were, and who was late.

        A rank's own time in a step is all but what it spent in exchanges: those end together, so
        that a late rank makes the others wait there.
        """
        found = []
        for number in self._numbers(None):
            ranks = {step.rank: step for step in self.steps if step.number == number}
            if len(ranks) < 2:
                continue
            own = {
                rank: step.seconds - step.causes.nanoseconds["exchange"] / 1e9
                for rank, step in ranks.items()
            }
            late = max(own, key=lambda rank: own[rank])
            gap = own[late] - min(own.values())
            found.append(Skew(number=number, seconds=gap, late_rank=late, own_seconds=own))
        return found

    def _numbers(self, steps: Iterable[int] | None) -> tuple[int, ...]:
        known = tuple(dict.fromkeys(step.number for step in self.steps))
        if steps is None:
            return known
        chosen = tuple(steps)
        missing = [number for number in chosen if number not in known]
        if missing:
            raise ProfileError(
                f"step {missing[0]} is not in this capture; it holds "
                + (f"steps {min(known)} to {max(known)}" if known else "no steps")
            )
        return chosen

    def _measured(
        self, chosen: tuple[int, ...], *, everything: bool
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Self seconds of each operation in each chosen step, the last row outside of those
        [S + 1, operations], and runs of each operation."""
        place = {number: at for at, number in enumerate(chosen)}
        outside = len(chosen)
        at_step = np.array([place.get(s.number, outside) for s in self.steps] + [outside])
        seconds = np.zeros((outside + 1, len(self.operations)))
        counts = np.zeros(len(self.operations), np.int64)
        for row in self.rows:
            if row.kind not in ("operations", "exchange"):
                continue
            known = row.events.operation >= 0
            operation = row.events.operation[known]
            step = at_step[row.events.step[known]]
            own = row.events.own[known] / 1e9
            if not everything:
                inside = step < outside
                operation, step, own = operation[inside], step[inside], own[inside]
            np.add.at(seconds, (step, operation), own)
            np.add.at(counts, operation, 1)
        return seconds, counts

    def _key(self, by: By, index: int) -> tuple[str, str]:
        """What an operation is grouped under: (program, key)."""
        operation = self.operations[index]
        keys: Mapping[By, Callable[[], str]] = {
            "op": lambda: operation.name,
            "class": lambda: operation.category,
            "module": lambda: "/".join(operation.scope),
            "source": lambda: operation.source,
        }
        program = str(operation.program) if by == "op" else ""
        return program, keys[by]()

    def _row(
        self,
        key: tuple[str, str],
        members: list[int],
        totals: NDArray[np.float64],
        counts: NDArray[np.int64],
        whole: float,
    ) -> TableRow:
        operations = [self.operations[index] for index in members]
        runs = [int(counts[index]) for index in members]
        longest = self.operations[max(members, key=lambda index: totals[index])]
        bounded = [index for index in members if self.operations[index].bound_seconds is not None]
        seconds = math.fsum(totals[members])
        known = key[0] not in ("", "-1")
        return TableRow(
            key=key[1],
            program=self.programs[int(key[0])].name if known else "",
            operations=tuple(members),
            category=longest.category,
            source=longest.source,
            count=sum(runs),
            seconds=seconds,
            share=seconds / whole if whole else 0.0,
            flops=sum(o.flops * n for o, n in zip(operations, runs, strict=True)),
            bytes=sum(o.bytes * n for o, n in zip(operations, runs, strict=True)),
            bound_seconds=_sum([o.bound_seconds for o in operations], runs),
            bounded_seconds=math.fsum(totals[bounded]),
            planned_seconds=_sum([o.planned_seconds for o in operations], runs),
        )


def _sum(once: list[float | None], runs: list[int]) -> float | None:
    known = [value * n for value, n in zip(once, runs, strict=True) if value is not None]
    return math.fsum(known) if known else None
