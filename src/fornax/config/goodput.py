"""Where the time of a run went, from the files of its run directory: every second has one cause.

`goodput.jsonl` is the first process's record, written by `fornax.train.goodput.Ledger`: one line a
flush, with the seconds since the line before by category and their order,

    {"attempt": 1, "step": 20, "time": 1763683200.0, "seconds": {"step": 3.9, "evaluate": 0.2},
     "spans": [["step", 3.9], ["evaluate", 0.2]]}

and each attempt (each time that processes formed a group, or one process began) opens with the step
that it started from, its chips, and the price of one for an hour where the user gave it. What an
earlier attempt computed beyond that step was computed again, and is lost. A line of a rewind names
the step that the run went back to; what the same attempt computed beyond it was lost to a loss
spike:

    {"attempt": 1, "rewind_to": 20, "step": 31, "batches": [30], "time": 1763683211.0}

`events.jsonl`, where the run was launched, says what happened between the attempts.
"""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from fornax.config.jsonl import read_json_lines
from fornax.config.price import Price

__all__ = [
    "CATEGORIES",
    "Account",
    "Category",
    "Fault",
    "Goodput",
    "Span",
    "attribute",
    "ledger_spans",
    "summarise",
]

Category = Literal[
    "initialise",
    "compile",
    "wait_for_data",
    "step",
    "snapshot",
    "checkpoint",
    "restore",
    "evaluate",
    "exchange",
    "profile",
    "spikes",
    "detection",
    "recovery",
    "waiting",
    "lost",
    "other",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
"""`snapshot` and `checkpoint` are the time training stood still for a copy in memory and for one on
disk; `exchange` that for the other slices of a DiLoCo run; `profile` that for a capture to begin
and to be written; `spikes` that of going back from loss spikes, and of the steps done again for
them.

The last five are found afterwards: `detection` is from a fault to its verdict, `recovery` from
there until a group has formed again, `waiting` that for hosts to join, `lost` what was computed
again, `other` the end of a launch."""

_REDONE = ("wait_for_data", "step", "snapshot", "checkpoint", "evaluate", "exchange", "profile")
_HANGS = ("stopped", "frozen", "stuck", "waiting")
_SAVED = ("preempted", "slow")
"""Kinds of verdicts that come after all ranks have saved."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """An unbroken time with one cause; wall times are seconds since 1970."""

    begin: float
    end: float
    cause: Category | None
    """None: no process worked on the run."""
    waited: float = 0.0
    """Share of a `step` that was spent waiting for data, between the steps."""

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of a launched run; wall times are seconds since 1970."""

    kind: str
    """That of the verdict, such as `killed`."""
    rank: int | None
    """None of the controller."""
    epoch: int
    drill: str | None
    """What was injected; None for a fault that happened by itself."""
    began: float
    """When: of a drill, else of the verdict; of a rank that hung, its last sign of progress."""
    named: float
    """When the verdict was."""
    formed: float | None
    """When the next group entered its first step; None where there was none."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """A run's time from its beginning to the last that is known of it, without a gap."""

    spans: Sequence[Span]
    """In order, each beginning where the one before ends."""
    faults: Sequence[Fault]
    attempts: int
    """How often processes began to work on the run."""
    steps: int
    """Steps that were made and kept."""
    chip_seconds: float | None = None
    """Seconds of the spans with a cause, each times the chips of its attempt; None of a run whose
    record does not say them."""
    price: Price | None = None
    """The price that the newest attempt with one was given."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Where the time of a run went, in seconds."""

    seconds: dict[Category, float]
    """Seconds a category over all attempts; they sum to `wall_seconds`."""
    wall_seconds: float
    """Time that processes, or a launch, spent on this run."""
    down_seconds: float
    """Time between the first start and the last end in which nothing worked on it."""
    attempts: int
    """How often processes began to work on the run."""
    chip_seconds: float | None = None
    """See `Account`."""
    price: Price | None = None
    """See `Account`."""

    @property
    def cost(self) -> float | None:
        """What the chips of `wall_seconds` cost, in the price's currency; None without a price."""
        if self.price is None or self.chip_seconds is None:
            return None
        return self.price.chip_hour * self.chip_seconds / 3600

    @property
    def goodput(self) -> float:
        """The share of the wall time that went into steps that were kept."""
        return self.seconds["step"] / self.wall_seconds if self.wall_seconds else 0.0


def summarise(path: Path) -> Goodput:
    """Seconds by cause.

    Args:
      path: `goodput.jsonl` of a run directory.
    """
    account = attribute(path.parent, path.name)
    seconds: dict[Category, float] = dict.fromkeys(CATEGORIES, 0.0)
    down = 0.0
    for span in account.spans:
        if span.cause is None:
            down += span.seconds
            continue
        seconds["wait_for_data"] += span.seconds * span.waited
        seconds[span.cause] += span.seconds * (1 - span.waited)
    return Goodput(
        seconds=seconds,
        wall_seconds=sum(seconds.values()),
        down_seconds=down,
        attempts=account.attempts,
        chip_seconds=account.chip_seconds,
        price=account.price,
    )


def attribute(run_dir: Path, name: str = "goodput.jsonl") -> Account:
    """Give every second of a run to a cause.

    Args:
      run_dir: of a launched run, or of one process.
      name: of the record to read there.
    """
    records = read_json_lines(run_dir / name)
    events = read_json_lines(run_dir / "events.jsonl")
    marks, downtimes, faults = _of_launch(events)
    recorded = _cut(_held_up(ledger_spans(records), run_dir), downtimes)
    spans = sorted([*recorded, *downtimes], key=lambda span: span.begin)
    starts = [r["start_step"] for r in records if "start_step" in r]
    newest = max((r["attempt"] for r in records), default=0)
    done = [r["step"] for r in records if "seconds" in r and r["attempt"] == newest]
    prices = [r for r in records if "chip_hour" in r]
    found = _without_gaps(_relabelled(spans, marks), marks)
    return Account(
        spans=found,
        faults=faults,
        attempts=len(starts),
        steps=max([*starts[-1:], *done], default=0) - min(starts, default=0),
        chip_seconds=_chip_seconds(found, records),
        price=(
            Price(chip_hour=prices[-1]["chip_hour"], currency=prices[-1]["currency"])
            if prices
            else None
        ),
    )


def _chip_seconds(spans: Iterable[Span], records: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds in which processes worked, times chips. An attempt has its chips from the end of the
    one before: what it needs to begin is its own."""
    chips = {r["attempt"]: r["chips"] for r in records if "chips" in r}
    if not chips:
        return None
    ends = {r["attempt"]: r["time"] for r in records if r["attempt"] in chips and "time" in r}
    until = sorted((end, chips[attempt]) for attempt, end in ends.items())
    until[-1] = (float("inf"), until[-1][1])
    total = 0.0
    for span in spans:
        begin = span.begin
        for end, count in until[bisect.bisect_right(until, (begin, float("inf"))) :]:
            if span.cause is None or begin >= span.end:
                break
            total += count * (min(end, span.end) - begin)
            begin = min(end, span.end)
    return total


def ledger_spans(records: Sequence[Mapping[str, Any]]) -> list[Span]:
    """What one process's record says, in order; work done again is `spikes` or `lost`."""
    starts = {r["attempt"]: r["start_step"] for r in records if "start_step" in r}
    kept = _kept(starts)
    back_to: dict[int, int] = {}  # by attempt, the earliest step that it went back to later
    found: list[Span] = []
    for record in reversed(records):
        attempt = record["attempt"]
        if "rewind_to" in record:
            back_to[attempt] = min(record["rewind_to"], back_to.get(attempt, record["rewind_to"]))
        if "seconds" not in record:
            continue
        instead: Category | None = None
        if record["step"] > back_to.get(attempt, record["step"]):
            instead = "spikes"
        elif record["step"] > kept.get(attempt, record["step"]):
            instead = "lost"
        found += _of_line(record, instead)
    found.reverse()
    return _cut(found, [])


def _held_up(spans: list[Span], run_dir: Path) -> list[Span]:
    """The first process's spans, where a step that waits for another rank to compile is compile."""
    paths = sorted((run_dir / "cluster").glob("rank-*.goodput.jsonl"))
    compiling: list[Span] = []
    for path in paths:
        compiling += [s for s in ledger_spans(read_json_lines(path)) if s.cause == "compile"]
    steps = [span for span in spans if span.cause == "step"]
    free = _cut(steps, _cut(compiling, []))
    held = [replace(span, cause="compile", waited=0.0) for span in _cut(steps, free)]
    return [*(span for span in spans if span.cause != "step"), *free, *held]


def _kept(starts: Mapping[int, int]) -> dict[int, int]:
    """By attempt, the earliest step that a later one started from."""
    kept: dict[int, int] = {}
    least: int | None = None
    for attempt in sorted(starts, reverse=True):
        if least is not None:
            kept[attempt] = least
        least = starts[attempt] if least is None else min(least, starts[attempt])
    return kept


def _of_line(record: Mapping[str, Any], instead: Category | None) -> list[Span]:
    """A line's spans, the last first; work that can be done again has the cause `instead`."""
    seconds = record["seconds"]
    found, end = [], record["time"]
    steps = seconds.get("step", 0.0) + seconds.get("wait_for_data", 0.0)
    waited = seconds.get("wait_for_data", 0.0) / steps if steps else 0.0
    for category, length in reversed(record.get("spans", list(seconds.items()))):
        again = instead is not None and category in _REDONE
        mixed = category == "step" and "spans" in record and not again
        found.append(
            Span(
                begin=end - length,
                end=end,
                cause=instead if again else category,
                waited=waited if mixed else 0.0,
            )
        )
        end -= length
    return found


def _of_launch(
    events: Sequence[Mapping[str, Any]],
) -> tuple[list[tuple[float, Category | None]], list[Span], list[Fault]]:
    """What events say: from when time that no process recorded has which cause; times in which
    nothing of what processes recorded counts; faults."""
    states = [event for event in events if "state" in event and "replicas" not in event]
    marks: list[tuple[float, Category | None]] = []
    downtimes: list[Span] = []
    faults: list[Fault] = []
    goes_on = False
    for number, event in enumerate(states):
        time, epoch = event["time"], event["epoch"]
        if event["state"] == "forming" and "waiting" in event:
            marks.append((time, "waiting"))
        elif event["state"] == "forming" and "free" in event:
            marks.append((time, "recovery" if goes_on else "initialise"))
            goes_on = False
        elif event["state"] == "running":
            here = [e for e in states if e["epoch"] == epoch]
            marks.append((time, _when_unrecorded(here, newest=here[-1] is states[-1])))
            goes_on = goes_on or "hosts" in event
        elif event["state"] == "ended":
            marks.append((time, None))
        elif event["state"] == "teardown":
            goes_on = True
            fault = _fault(event, events)
            before = downtimes[-1].end if downtimes else fault.began
            began = max(fault.began, before)
            fault = replace(fault, began=began, named=max(fault.named, began))
            faults.append(fault)
            until = [e["time"] for e in states[number + 1 :] if e["state"] in ("forming", "ended")]
            downtimes.append(Span(begin=fault.began, end=fault.named, cause="detection"))
            end = min(until, default=time)
            downtimes.append(Span(begin=fault.named, end=end, cause="recovery"))
    if states:
        marks.append((states[-1]["time"], marks[-1][1]))
    return marks, [span for span in downtimes if span.end > span.begin], faults


def _when_unrecorded(epoch: Sequence[Mapping[str, Any]], *, newest: bool) -> Category | None:
    """What the time of an epoch is that its first process did not live, or not yet, to record."""
    fault = next((event for event in epoch if event["state"] == "teardown"), None)
    if fault is not None:
        return "recovery" if fault["kind"] in _SAVED else "lost"
    if any("hosts" in event for event in epoch if event["state"] == "running"):
        return "recovery"
    return "other" if epoch[-1]["state"] == "ended" or newest else None


def _fault(teardown: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Fault:
    epoch, rank, kind = (teardown[name] for name in ("epoch", "rank", "kind"))
    here = [event for event in events if event["epoch"] == epoch]
    named = next((e["time"] for e in here if e.get("state") == "suspect"), teardown["time"])
    drills = [e for e in here if e.get("drill") and e.get("rank") == rank and e["time"] <= named]
    began = named
    if kind not in _SAVED and drills:
        began = drills[-1]["time"]
    elif kind in _HANGS:
        began = min(named, teardown["since"])
    later = (e for e in events if e["epoch"] > epoch and e.get("state") == "running")
    return Fault(
        kind=kind,
        rank=rank,
        epoch=epoch,
        drill=drills[-1]["drill"] if drills else None,
        began=began,
        named=named,
        formed=next((e["time"] for e in later), None),
    )


def _cut(spans: Iterable[Span], out: Sequence[Span]) -> list[Span]:
    """Spans in order, without what lies in one of `out` or before the end of the one before."""
    found: list[Span] = []
    ends = [span.end for span in out]
    now = float("-inf")
    for span in sorted(spans, key=lambda span: span.begin):
        begin = max(span.begin, now)
        now = max(now, span.end)
        for hole in out[bisect.bisect_right(ends, begin) :]:
            if hole.begin >= span.end or begin >= span.end:
                break
            if hole.begin > begin:
                found.append(replace(span, begin=begin, end=hole.begin))
            begin = max(begin, hole.end)
        if span.end > begin:
            found.append(replace(span, begin=begin))
    return found


def _relabelled(
    spans: Iterable[Span], marks: Sequence[tuple[float, Category | None]]
) -> list[Span]:
    """What a process needs to begin is `recovery` where a group forms again."""
    times = [time for time, _ in marks]
    found = []
    for span in spans:
        number = bisect.bisect_right(times, span.begin) - 1
        anew = span.cause == "initialise" and number >= 0 and marks[number][1] == "recovery"
        found.append(replace(span, cause="recovery") if anew else span)
    return found


def _without_gaps(
    spans: Sequence[Span], marks: Sequence[tuple[float, Category | None]]
) -> list[Span]:
    """Fill the times that nobody recorded by what the marks say of them."""
    if not spans and not marks:
        return []
    begin = min([*(s.begin for s in spans[:1]), *(time for time, _ in marks[:1])])
    end = max([*(s.end for s in spans[-1:]), *(time for time, _ in marks[-1:])])
    found: list[Span] = []
    for span in [*spans, Span(begin=end, end=end, cause=None)]:
        found += _gap(begin, span.begin, marks)
        begin = max(begin, span.end)
        if span.seconds > 0:
            found.append(span)
    return found


def _gap(begin: float, end: float, marks: Sequence[tuple[float, Category | None]]) -> list[Span]:
    found = []
    times = [time for time, _ in marks]
    while begin < end:
        number = bisect.bisect_right(times, begin)
        until = min(end, times[number]) if number < len(times) else end
        cause = marks[number - 1][1] if number else None
        found.append(Span(begin=begin, end=until, cause=cause))
        begin = until
    return found
