"""A capture as samples: the self time of each run of each operation, step by step.

Legend: S steps, U runs of one operation in a step.
"""

import dataclasses
import itertools
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fornax.config.errors import ProfileError
from fornax.profile.facts import Cause, Operation, Step
from fornax.profile.profile import Profile

LEAST_STEPS = 5
_MOST_RUNS = 32
"""Runs of one operation that are looked at one by one; of more, neighbours are added."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """One operation's times."""

    operation: Operation
    program: str
    seconds: NDArray[np.float64]
    """Self time of each run, parts of it on other threads included [S, U]; of all runs together
    [S, 1] where their number varies."""
    runs: float
    """In a step."""
    beside: bool
    """Whether it is an exchange on a row of its own, which runs beside operations."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """All operations of a capture, in the steps after its warm-up."""

    steps: int
    warm_up: int
    operations: tuple[Sampled, ...]
    waited_seconds: NDArray[np.float64]
    """What the devices of all ranks waited in each step: for input, and for exchanges that lie on
    rows of their own and that no operation hid [S]."""


def sample(profile: Profile) -> Samples:
    """The samples of a capture.

    The first step and all up to the last one that compiled are warm-up, and left out.

    Raises:
      ProfileError: fewer than five steps are left.
    """
    ordered = list(dict.fromkeys(map(_key, sorted(profile.steps, key=lambda step: step.begin))))
    compiled = {_key(step) for step in profile.steps if step.causes.nanoseconds["compile"] > 0}
    last = max((at for at, key in enumerate(ordered) if key in compiled), default=0)
    warm, kept = ordered[: last + 1], ordered[last + 1 :]
    if len(kept) < LEAST_STEPS:
        raise ProfileError(
            f"the capture {profile.info.folder} has {len(kept)} steps after its warm-up (the first "
            f"and those up to the last that compiled: {len(warm)}), and a comparison needs "
            f"{LEAST_STEPS}; capture at least {LEAST_STEPS + len(warm)} steps, better 30"
        )
    place = {key: at for at, key in enumerate(kept)}
    apart = any(row.kind == "exchange" for row in profile.rows)
    causes: tuple[Cause, ...] = ("input", "exchange") if apart else ("input",)
    devices = profile.info.devices / max(1, len(profile.info.ranks))
    waits = np.zeros(len(kept))
    for step in profile.steps:
        if _key(step) in place:
            waited = sum(step.causes.nanoseconds[cause] for cause in causes)
            waits[place[_key(step)]] += waited * devices / 1e9
    return Samples(
        steps=len(kept),
        warm_up=len(warm),
        operations=_operations(profile, place),
        waited_seconds=waits,
    )


def _key(step: Step) -> tuple[str, int]:
    return step.name, step.number


def _operations(profile: Profile, place: Mapping[tuple[str, int], int]) -> tuple[Sampled, ...]:
    """Of each operation that ran in the steps of `place`, their names and numbers to positions."""
    at_step = np.array([place.get(_key(step), -1) for step in profile.steps] + [-1])
    columns: list[list[NDArray[np.int64]]] = [[], [], [], [], []]
    beside: set[int] = set()
    devices: dict[tuple[int, str], int] = {}
    for row in profile.rows:
        if row.kind not in ("operations", "exchange"):
            continue
        events = row.events
        step = at_step[events.step]
        held = (step >= 0) & (events.operation >= 0)
        device = np.full(len(events), devices.setdefault((row.rank, row.device), len(devices)))
        if row.kind == "exchange":
            beside |= set(events.operation[held].tolist())
        own = events.own if events.helped is None else events.own + events.helped
        values = (events.operation, step, device, events.begin, own)
        for column, value in zip(columns, values, strict=True):
            column.append(value[held].astype(np.int64))
    if not devices:
        return ()
    operation, step, device, begin, own = (np.concatenate(column) for column in columns)
    order = np.lexsort((begin, device, step, operation))
    operation, step, own = operation[order], step[order], own[order] / 1e9
    edges = np.flatnonzero(np.diff(operation)) + 1
    bounds = [0, *edges.tolist(), len(operation)] if len(operation) else []
    found = []
    for first, last in itertools.pairwise(bounds):
        known = profile.operations[operation[first]]
        found.append(
            Sampled(
                operation=known,
                program=profile.programs[known.program].name if known.program >= 0 else "",
                seconds=_matrix(step[first:last], own[first:last], len(place)),
                runs=(last - first) / len(place),
                beside=int(operation[first]) in beside,
            )
        )
    return tuple(found)


def _matrix(
    steps: NDArray[np.int64], seconds: NDArray[np.float64], count: int
) -> NDArray[np.float64]:
    """Runs by step and order, or their sums where steps differ in how many they have."""
    runs = np.bincount(steps, minlength=count)
    if runs.min() == runs.max():
        found = seconds.reshape(count, runs.max())
        parts = np.arange(0, found.shape[1], -(-found.shape[1] // _MOST_RUNS))
        return np.add.reduceat(found, parts, axis=1)
    sums = np.bincount(steps, weights=seconds, minlength=count)
    return sums.astype(np.float64)[:, None]
