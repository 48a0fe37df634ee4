"""A profile on a terminal, a hundred columns at most, and as JSON."""

import dataclasses
import io
import statistics
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.text import Text

from fornax.cli.profile_activity import activity
from fornax.cli.profile_text import ACCENT, columns, heading, line
from fornax.plan.format import (
    format_bytes,
    format_count,
    format_plural,
    format_seconds,
    short_source,
    shorten,
)

if TYPE_CHECKING:
    from fornax.profile import By, Memory, Profile, Table

WIDTH = 100
_BAR = 24
_NAMES = {
    "op": ("operation", "operations"),
    "class": ("class", "classes"),
    "module": ("module", "modules"),
    "source": ("line", "lines"),
}
_LAST = {"op": ("line", 24), "class": ("", 40), "module": ("class", 32), "source": ("class", 32)}
"""The last column of a table, and the width of its first."""
_EMPTY = {"module": "(no module)", "source": "(no line)", "op": "", "class": ""}
_BUFFERS = 5


def print_profile(
    profile: "Profile", by: "By" = "op", steps: Iterable[int] | None = None, rows: int = 20
) -> None:
    """Print as wide as the terminal, up to a hundred columns; as plain text elsewhere.

    Args:
        profile: what was read.
        by: what its operations are grouped by.
        steps: numbers of the steps whose operations count; None for all that ran.
        rows: most rows of the table of operations.

    Raises:
        ProfileError: a step is not in the capture.
    """
    parts = list(_parts(profile, profile.ops(by, steps), rows))
    console = Console(highlight=False)
    if console.is_terminal:
        console.width = min(console.width, WIDTH)
        for part in parts:
            console.print(part)
        return
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None, legacy_windows=False)
    for part in parts:
        console.print(part)
    for each in out.getvalue().splitlines():
        print(each.rstrip())  # noqa: T201


def figures(profile: "Profile", by: "By", steps: Iterable[int] | None) -> dict[str, Any]:
    """Every figure of a profile as JSON's types: the table of operations, steps by cause, memory,
    input, host."""
    table = profile.ops(by, steps)
    return {
        "info": dataclasses.asdict(profile.info),
        "steps": [
            {
                "rank": step.rank,
                "number": step.number,
                "name": step.name,
                "begin_ns": step.begin,
                "end_ns": step.end,
                "causes_ns": dict(causes.nanoseconds),
            }
            for step, causes in profile.step_times()
        ],
        "by": by,
        "rows": [
            {
                **{k: v for k, v in dataclasses.asdict(row).items() if k != "operations"},
                "flops_rate": row.flops_rate,
                "bytes_rate": row.bytes_rate,
                "times_bound": row.times_bound,
                "seconds_of_steps": table.matrix[:, at].tolist(),
            }
            for at, row in enumerate(table.rows)
        ],
        "skew": [dataclasses.asdict(each) for each in profile.skew()],
        "memory": [
            {
                "program": profile.programs[memory.program].name,
                "owners": dict(memory.owners),
                "peak": dataclasses.asdict(memory.peak),
                "course": [dict(moment.bytes) for moment in memory.course],
            }
            for memory in profile.memory
        ],
        "allocator": [dataclasses.asdict(sample) for sample in profile.samples],
        "input": [dataclasses.asdict(stage) for stage in profile.input],
        "host": dataclasses.asdict(profile.host),
        "counters": [
            {
                "rank": each.rank,
                "device": each.device,
                "name": each.name,
                "total": each.total,
                "time_ns": each.time.tolist(),
                "value": each.value.tolist(),
            }
            for each in profile.counters.series
        ],
        "counters_absent": dict(profile.counters.absent),
        "requests": [
            {**dataclasses.asdict(each), "phases": each.phases} for each in profile.serving.requests
        ],
        "batches": [dataclasses.asdict(each) for each in profile.serving.batches],
    }


def _parts(profile: "Profile", table: "Table", rows: int) -> Iterator[RenderableType]:
    yield from _head(profile)
    if profile.steps:
        yield heading("Where a step's time goes")
        yield _causes(profile)
        yield from _skew(profile)
    singular, plural = _NAMES[table.by]
    yield heading(f"Time by {singular}")
    if table.rows:
        yield _operations(table, singular, rows)
        left = table.rows[rows:]
        if left:
            share = sum(row.share for row in left)
            yield line(f"and {len(left):,} more {plural}, {share:.1%} of the time (--rows)")
    else:
        yield line(
            "no operation ran on a device while this was captured; capture longer, and wait for "
            "results inside (jax.block_until_ready)"
        )
    memory = max(profile.memory, key=lambda each: each.peak.bytes, default=None)
    if memory:
        yield from _memory(profile, memory)
    yield from activity(profile, rows)
    if profile.info.notes:
        yield ""
        yield from (line(f"note: {note}") for note in profile.info.notes)


def _head(profile: "Profile") -> Iterator[RenderableType]:
    info = profile.info
    device = f"{info.device_kind} x {info.devices}" if info.devices > 1 else info.device_kind
    ranks = f", {format_plural(len(info.ranks), 'rank')}" if len(info.ranks) > 1 else ""
    yield Text.assemble((info.folder, "bold"), f"  {device}{ranks}")
    numbers = sorted({step.number for step in profile.steps})
    steps = f"{format_plural(len(numbers), 'step')} of {profile.steps[0].name}" if numbers else ""
    span = f" ({numbers[0]} to {numbers[-1]})" if len(numbers) > 1 else ""
    versions = ", ".join(f"{name} {version}" for name, version in info.versions.items())
    parts = (f"{format_seconds(info.seconds)} captured", f"{steps}{span}", versions)
    yield Text("; ".join(part for part in parts if part))
    if info.truncated:
        yield Text("The capture ended at its limit of time or size, before it was asked to.")


def _causes(profile: "Profile") -> RenderableType:
    causes = [causes.seconds for _, causes in profile.step_times()]
    times = [step.seconds for step in profile.steps]
    whole = statistics.fmean(times)
    made = columns(("", "mean", "share", "least", "most", ""), "lrrrrl")
    for cause in causes[0]:
        values = [each[cause] for each in causes]
        mean = statistics.fmean(values)
        if not any(values):
            continue
        share = mean / whole if whole else 0.0
        bar = Text("█" * round(share * _BAR), ACCENT)
        made.add_row(
            cause,
            format_seconds(mean),
            f"{share:.1%}",
            format_seconds(min(values)),
            format_seconds(max(values)),
            bar,
        )
    made.add_section()
    made.add_row(
        "step",
        format_seconds(whole),
        "",
        format_seconds(min(times)),
        format_seconds(max(times)),
        "",
    )
    return made


def _skew(profile: "Profile") -> Iterator[RenderableType]:
    skew = profile.skew()
    if not skew:
        return
    late = [each.late_rank for each in skew]
    rank = statistics.mode(late)
    gap = statistics.median(each.seconds for each in skew)
    yield line(
        f"rank {rank} is the last in {late.count(rank)} of {len(late)} steps; ranks are "
        f"{format_seconds(gap)} apart (median)"
    )


def _operations(table: "Table", singular: str, rows: int) -> RenderableType:
    last, width = _LAST[table.by]
    head = [singular, "runs", "time", "share", "FLOP/s", "bytes/s", "x bound", "x plan"]
    made = columns([*head, last] if last else head, "lrrrrrrrl")
    for row in table.rows[:rows]:
        key = row.key or _EMPTY[table.by]
        cells = [
            shorten(short_source(key) if table.by == "source" else key, width),
            f"{row.count:,}",
            format_seconds(row.seconds),
            f"{row.share:.1%}",
            format_count(row.flops_rate) if row.flops else "",
            format_count(row.bytes_rate) if row.bytes else "",
            _times(row.bounded_seconds, row.bound_seconds),
            _times(row.bounded_seconds, row.planned_seconds),
        ]
        ending = {"line": _short_line(row.source), "class": row.category, "": ""}[last]
        made.add_row(*cells, *([ending] if last else []))
    return made


def _times(measured: float, expected: float | None) -> str:
    return f"{measured / expected:,.2f}" if expected else ""


def _short_line(source: str) -> str:
    """The file's own name and the line of "folder/file.py:88 (f)"."""
    return shorten(source.partition(" (")[0].rpartition("/")[2], 17)


def _memory(profile: "Profile", memory: "Memory") -> Iterator[RenderableType]:
    peak = memory.peak
    name = profile.programs[memory.program].name
    yield heading(f"Memory of {name} at its peak, {format_bytes(peak.bytes)} per device")
    made = columns(("", "bytes", "share", ""), "lrrl")
    for owner, size in memory.owners.items():
        if size:
            share = size / max(peak.bytes, 1)
            bar = Text("█" * round(share * _BAR), ACCENT)
            made.add_row(owner, format_bytes(size), f"{share:.1%}", bar)
    yield made
    if peak.instruction:
        yield line(f"the peak is at {peak.instruction}; largest buffers:")
    buffers = columns(("buffer", "owner", "bytes", "shape", "line"), "llrll")
    pairs = list(zip(peak.buffers, memory.buffer_owners, strict=True))
    for buffer, owner in pairs[:_BUFFERS]:
        named = buffer.op_name if buffer.kind == "argument" and buffer.op_name else buffer.name
        buffers.add_row(
            shorten(named, 30),
            owner,
            format_bytes(buffer.bytes),
            shorten(buffer.shape.partition("{")[0], 24),
            _short_line(buffer.source),
        )
    yield buffers
