"""What hosts and servers did, for a report on a terminal: input, threads, what they waited for,
counters, requests, batches."""

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType

from fornax.cli.profile_text import columns, heading, line
from fornax.plan.format import format_count, format_plural, format_seconds, shorten

if TYPE_CHECKING:
    from fornax.profile import Counters, Profile, ServedBatch, ServedRequest

_THREADS = 6
_WAITS = 6
_ID = 24
"""Characters of a request's id."""


def activity(profile: "Profile", rows: int) -> Iterator[RenderableType]:
    """All of it, of what the capture holds; `rows` requests at most."""
    if profile.serving.requests:
        yield heading("Requests")
        yield from _requests(profile.serving.requests, rows)
    if profile.serving.batches:
        yield heading("Batches")
        yield _batches(profile.serving.batches)
    if profile.input:
        yield heading("Input pipeline")
        yield _input(profile)
    yield from _host(profile)
    yield heading("Hardware counters")
    yield from _counters(profile.counters, rows)


def _requests(requests: Sequence["ServedRequest"], rows: int) -> Iterator[RenderableType]:
    hosted = any(each.model for each in requests)
    phases = ("queued", "batch") if hosted else ("queued", "prefill", "decode")
    own = ["model"] if hosted else ["prompt", "tokens", "a token", "preempted"]
    made = columns(
        ["request", "came at", *phases, *own, "end"],
        "lr" + "r" * len(phases) + ("l" if hosted else "rrrr") + "l",
    )
    for each in requests[:rows]:
        spans = [_seconds(each.seconds(phase)) for phase in phases]
        facts = (
            [shorten(each.model, _ID)]
            if hosted
            else [
                _count(each.prompt_tokens),
                _count(each.tokens),
                _seconds(each.token_seconds),
                str(each.preempted or ""),
            ]
        )
        came = "" if each.queued is None else format_seconds(each.queued / 1e9)
        made.add_row(shorten(each.id, _ID), came, *spans, *facts, each.ending)
    made.add_section()
    known = [[s for each in requests if (s := each.seconds(p)) is not None] for p in phases]
    medians = [format_seconds(statistics.median(times)) if times else "" for times in known]
    made.add_row("median", "", *medians)
    yield made
    if len(requests) > rows:
        yield line(f"and {len(requests) - rows:,} more requests (--rows); the median is of all")


def _batches(batches: Sequence["ServedBatch"]) -> RenderableType:
    """A row per kind: means over its calls, of limits where they are known."""
    unit = "rows" if any("/" in each.kind for each in batches) else "tokens"
    made = columns(
        ("batch", "calls", "steps", "sequences", "of limit", unit, "of limit", "of program"),
        "lrrrrrrr",
    )
    kinds: dict[str, list[ServedBatch]] = {}
    for each in batches:
        kinds.setdefault(each.kind, []).append(each)
    for kind, same in kinds.items():
        sequences = statistics.fmean(each.sequences for each in same)
        rows = statistics.fmean(each.rows for each in same)
        made.add_row(
            shorten(kind, _ID),
            f"{len(same):,}",
            f"{sum(each.steps for each in same):,}",
            f"{sequences:,.1f}",
            _share([(each.sequences, each.most_sequences) for each in same]),
            f"{rows:,.1f}",
            _share([(each.rows, each.most_rows) for each in same]),
            f"{statistics.fmean(each.fill for each in same):.1%}",
        )
    return made


def _share(pairs: Sequence[tuple[int, int | None]]) -> str:
    """The mean of parts of what is known."""
    parts = [part / whole for part, whole in pairs if whole]
    return f"{statistics.fmean(parts):.1%}" if parts else ""


def _seconds(value: float | None) -> str:
    return "" if value is None else format_seconds(value)


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _input(profile: "Profile") -> RenderableType:
    made = columns(("stage", "runs", "time", "steps waited"), "lrrr")
    for stage in profile.input:
        made.add_row(
            stage.name,
            f"{stage.count:,}",
            format_seconds(stage.seconds),
            format_seconds(stage.waited_seconds),
        )
    return made


def _host(profile: "Profile") -> Iterator[RenderableType]:
    threads = [thread for thread in profile.host.threads if thread.busy_seconds > 0]
    if threads:
        several = len(profile.info.ranks) > 1
        yield heading("Threads of the host")
        made = columns(("thread", "under events", "of it waiting"), "lrr")
        for thread in threads[:_THREADS]:
            name = f"rank {thread.rank} {thread.name}" if several else thread.name
            made.add_row(
                name, format_seconds(thread.busy_seconds), format_seconds(thread.waiting_seconds)
            )
        yield made
        if len(threads) > _THREADS:
            yield line(f"and {len(threads) - _THREADS} more")
    yield from _waits(profile)
    collections = profile.host.collections
    if collections:
        total = sum(each.duration for each in collections) / 1e9
        longest = max(each.duration for each in collections) / 1e9
        yield line(
            f"{format_plural(len(collections), 'garbage collection')} of Python, "
            f"{format_seconds(total)}, the longest {format_seconds(longest)}"
        )


def _waits(profile: "Profile") -> Iterator[RenderableType]:
    yield heading("What threads waited for")
    waits = profile.host.waits
    if waits:
        made = columns(
            ("event, or who asked for the lock", "kind", "threads", "times", "time"), "llrrr"
        )
        several = len(profile.info.ranks) > 1
        for wait in sorted(waits, key=lambda each: each.seconds, reverse=True)[:_WAITS]:
            name = f"rank {wait.rank} {wait.name}" if several else wait.name
            made.add_row(
                shorten(name, 52),
                wait.kind,
                f"{wait.threads:,}",
                f"{wait.count:,}",
                format_seconds(wait.seconds),
            )
        yield made
        if len(waits) > _WAITS:
            yield line(f"and {len(waits) - _WAITS} more (--json)")
    else:
        yield line("the capture holds no event in which a thread waits")
    yield from (line(f"not known: {each}") for each in profile.host.unknown)


def _counters(counters: "Counters", rows: int) -> Iterator[RenderableType]:
    if counters.series:
        made = columns(("counter", "device", "total", "a second", "mean", "most"), "llrrrr")
        for each in counters.series[:rows]:
            rate = "" if each.rate is None else format_count(each.rate)
            figures = (
                [format_count(float(each.value[-1])), rate, "", ""]
                if each.total
                else [
                    "",
                    "",
                    format_count(float(each.value.mean())),
                    format_count(each.value.max()),
                ]
            )
            device = f"rank {each.rank} {each.device}" if each.rank else each.device
            made.add_row(shorten(each.name, 44), device, *figures)
        yield made
        if len(counters.series) > rows:
            yield line(f"and {len(counters.series) - rows} more (--rows)")
    reasons: dict[str, list[str]] = {}
    for name, why in counters.absent.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        yield line(f"absent: {', '.join(names)}: {why}")
