"""What the page of a profile shows, as data that JSON takes, and the page itself in one file."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np

from fornax.config.errors import ProfileError
from fornax.config.files import write_whole
from fornax.pages import SCRIPTS, STYLES, modules, standalone
from fornax.profile.facts import By, Counters, Memory, Operation, Row, Table
from fornax.profile.page.columns import packed, packed_differences
from fornax.profile.page.graph import graph
from fornax.profile.page.sources import excerpts
from fornax.profile.profile import Profile
from fornax.profile.served import Serving

__all__ = ["page_data", "write_page"]

_STATIC = Path(__file__).parent / "static"
_EVENTS = 1_000_000
"""Of the time line; beyond that the shortest are left out, and the page says so."""
_BUFFERS = 300
_SERVED = 10_000
"""Requests and batches, the first ones."""


def page_data(
    profile: Profile,
    *,
    compared: Mapping[str, Any] | None = None,
    own_sources_only: bool = False,
) -> dict[str, Any]:
    """Everything that the page shows.

    Args:
      profile: what was read from a capture.
      compared: a comparison with the capture before a change: the fields of
        `fornax.profile.compare.Comparison` as plain data, as `figures` there gives them.
      own_sources_only: excerpts are of Fornax's own files alone, for captures of others and readers
        who are not the user of this machine.

    Returns:
      Plain data: seconds and bytes as numbers, the columns of events as base64 (`columns.py`). It
      holds excerpts of the Python files that operations come from (`sources.py`).
    """
    shortest = _shortest(profile)
    tables = {by: profile.ops(by) for by in get_args(By)}
    return {
        "info": dataclasses.asdict(profile.info),
        "names": list(profile.names),
        "rows": [_row(row, shortest) for row in profile.rows],
        "shortest": shortest,
        "steps": [
            {
                "rank": step.rank,
                "number": step.number,
                "name": step.name,
                "begin": step.begin,
                "end": step.end,
                "causes": step.causes.seconds,
            }
            for step in profile.steps
        ],
        "operations": _operations(profile.operations),
        "tables": {by: _table(table) for by, table in tables.items()},
        "excerpts": excerpts(
            _places(profile, tables["op"]),
            before=profile.info.begin,
            version=profile.info.versions.get("fornax", ""),
            own_only=own_sources_only,
        ),
        "programs": [
            {
                "name": program.name,
                "rank": program.rank,
                "flops": program.facts.flops if program.facts else None,
                "bytes": program.facts.bytes if program.facts else None,
                "graph": graph(program.text),
            }
            for program in profile.programs
        ],
        "memory": [_memory(memory) for memory in profile.memory],
        "samples": [dataclasses.asdict(sample) for sample in profile.samples],
        "threads": [dataclasses.asdict(thread) for thread in profile.host.threads],
        "waits": [dataclasses.asdict(each) for each in profile.host.waits],
        "locks_unknown": list(profile.host.unknown),
        "counters": _counters(profile.counters),
        "collections": [dataclasses.asdict(each) for each in profile.host.collections],
        "input": [dataclasses.asdict(stage) for stage in profile.input],
        "serving": _serving(profile.serving),
        "skew": [
            {
                **dataclasses.asdict(skew),
                "own_seconds": [list(pair) for pair in skew.own_seconds.items()],
            }
            for skew in profile.skew()
        ],
        "compared": compared,
    }


def _counters(counters: Counters) -> dict[str, Any]:
    return {
        "series": [
            {
                "rank": each.rank,
                "device": each.device,
                "name": each.name,
                "total": each.total,
                "time": each.time.tolist(),
                "value": [float(f"{value:.6g}") for value in each.value.tolist()],
            }
            for each in counters.series
        ],
        "absent": dict(counters.absent),
    }


def _serving(serving: Serving) -> dict[str, Any]:
    return {
        "requests": [
            {
                **dataclasses.asdict(each),
                "phases": {phase: list(span) for phase, span in each.phases.items()},
                "token_seconds": each.token_seconds,
            }
            for each in serving.requests[:_SERVED]
        ],
        "batches": [
            {**dataclasses.asdict(each), "fill": each.fill} for each in serving.batches[:_SERVED]
        ],
        "left_out": {
            "requests": len(serving.requests[_SERVED:]),
            "batches": len(serving.batches[_SERVED:]),
        },
    }


def write_page(
    profile: Profile,
    path: Path,
    *,
    compared: Mapping[str, Any] | None = None,
    own_sources_only: bool = False,
) -> Path:
    """Write the page to `path`, one HTML file that needs neither a server nor a network.

    Arguments are those of `page_data`.

    Raises:
      ProfileError: the file cannot be written.
    """
    text = standalone(
        title=f"Profile {profile.info.folder}",
        modules=modules(_STATIC, "profile"),
        entry="profile/main.js",
        styles=[*STYLES, _STATIC / "profile.css"],
        scripts=SCRIPTS,
        data=page_data(profile, compared=compared, own_sources_only=own_sources_only),
    )
    try:
        write_whole(path, text)
    except (OSError, ValueError) as error:  # "." has no name
        reason = getattr(error, "strerror", None) or error
        raise ProfileError(
            f"cannot write the page {path}: {reason}; name a file in a folder "
            "that may be written to"
        ) from error
    return path


def _shortest(profile: Profile) -> int:
    """Nanoseconds below which events are left out; 0 keeps all."""
    durations = np.concatenate([row.events.duration for row in profile.rows] or [np.zeros(0)])
    if len(durations) <= _EVENTS:
        return 0
    return int(np.partition(durations, len(durations) - _EVENTS)[len(durations) - _EVENTS]) + 1


def _row(row: Row, shortest: int) -> dict[str, Any]:
    events = row.events
    kept = events.duration >= shortest
    return {
        "rank": row.rank,
        "device": row.device,
        "name": row.name,
        "kind": row.kind,
        "count": int(kept.sum()),
        "left_out": int((~kept).sum()),
        "begin": packed_differences(events.begin[kept]),
        "duration": packed(events.duration[kept]),
        "event": packed(events.name[kept]),
        "operation": packed(events.operation[kept] + 1),
        "step": packed_differences(events.step[kept]),
    }


def _places(profile: Profile, table: Table) -> Iterator[str]:
    """Lines of source of operations, of the longest first."""
    for row in table.rows:
        for index in row.operations:
            yield profile.operations[index].source
            yield profile.operations[index].fornax_source


def _operations(operations: tuple[Operation, ...]) -> dict[str, list[Any]]:
    """One list a field, which is a third of the text of one object an operation."""
    fields = [field.name for field in dataclasses.fields(Operation)]
    columns = {name: [getattr(each, name) for each in operations] for name in fields}
    columns["scope"] = ["/".join(each.scope) for each in operations]
    return columns


def _table(table: Table) -> dict[str, Any]:
    return {
        "steps": list(table.steps),
        "rows": [
            {
                **dataclasses.asdict(row),
                "flops_rate": row.flops_rate,
                "bytes_rate": row.bytes_rate,
                "times_bound": row.times_bound,
                "by_step": [float(f"{value:.6g}") for value in table.matrix[:, at]],
            }
            for at, row in enumerate(table.rows)
        ],
    }


def _memory(memory: Memory) -> dict[str, Any]:
    peak = memory.peak
    pairs = list(zip(peak.buffers, memory.buffer_owners, strict=True))
    return {
        "program": memory.program,
        "bytes": peak.bytes,
        "temporaries": peak.temporaries,
        "instruction": peak.instruction,
        "owners": dict(memory.owners),
        "buffers": [
            {**dataclasses.asdict(buffer), "owner": owner} for buffer, owner in pairs[:_BUFFERS]
        ],
        "buffers_left_out": {
            "count": len(pairs[_BUFFERS:]),
            "bytes": sum(buffer.bytes for buffer, _ in pairs[_BUFFERS:]),
        },
        "course": {
            "position": [moment.position for moment in memory.course],
            "instruction": [moment.instruction for moment in memory.course],
            "owners": {
                owner: [moment.bytes.get(owner, 0) for moment in memory.course]
                for owner in memory.owners
            },
        },
    }
