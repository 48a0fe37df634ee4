"""Captures as files: refuse what is not whole, decode lines into columns.

Legend: E events of a line.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from fornax.config.errors import ProfileError
from fornax.profile.facts import Ints
from fornax.profile.schema import XSpace

_UNIX = 10**15
"""A line's time stamp above this is Unix nanoseconds; below, since the capture began."""
_NAMED = re.compile(r"%?(\S+) = ")


def read_space(path: Path, size: int | None = None) -> Any:
    """Read one XSpace.

    Args:
        path: the file.
        size: bytes that it had when it was written, where that is known.

    Raises:
        ProfileError: it is empty, shorter than it was, or not an XSpace.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror}") from error
    if not data:
        raise ProfileError(
            f"{path} is empty: the capture was larger than the 2 GB that one message may have, or "
            "its process was killed while it wrote; capture fewer steps or seconds"
        )
    if size is not None and len(data) != size:
        raise ProfileError(
            f"{path} has {len(data)} bytes of the {size} that were written: it was cut off while "
            "it was written or copied; copy it again, or capture again"
        )
    try:
        space = XSpace.FromString(data)
    except DecodeError as error:
        raise ProfileError(
            f"{path} is truncated or no XSpace ({len(data)} bytes): copy it again from where it "
            "was made, or capture again"
        ) from error
    if not space.planes:
        raise ProfileError(
            f"{path} holds no planes, only {len(data)} bytes of other fields; capture again"
        )
    return space


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    """One line of a plane, its events in the order of their begin."""

    id: int
    name: str
    begin: Ints
    """Unix nanoseconds [E]."""
    duration: Ints
    metadata: Ints
    """Ids of the events' metadata [E]."""
    events: list[Any]
    """The messages, for their statistics [E]."""


class Plane:
    """One plane of an XSpace: its lines, and what the numbers in its events mean."""

    def __init__(self, message: Any, start: int) -> None:
        """`start` is the capture's begin in Unix nanoseconds."""
        self.name: str = message.name
        self._message = message
        self._start = start
        self._keys = {entry.key: entry.value.name for entry in message.stat_metadata}
        self.metadata: Mapping[int, Any] = {
            entry.key: entry.value for entry in message.event_metadata
        }

    @property
    def stats(self) -> dict[str, Any]:
        """Statistics of the plane itself."""
        return self.values(self._message)

    def values(self, holder: Any) -> dict[str, Any]:
        """Statistics of an event, its metadata or a plane: {"run_id": 7, …}."""
        found = {}
        for stat in holder.stats:
            field = stat.WhichOneof("value")
            if field is not None:
                value = getattr(stat, field)
                found[self._keys.get(stat.metadata_id, "")] = (
                    self._keys.get(value, "") if field == "ref_value" else value
                )
        return found

    def label(self, metadata: int) -> str:
        """The name of an event; of an HLO instruction given as text, the instruction's."""
        known = self.metadata.get(metadata)
        if known is None:
            return f"event {metadata}"
        named = _NAMED.match(known.name)
        return known.display_name or (named.group(1) if named else known.name)

    def lines(self) -> Iterator[Line]:
        """The lines that have events; lines of one id are one line."""
        joined: dict[int, list[Any]] = {}
        for line in self._message.lines:
            joined.setdefault(line.id, []).append(line)
        for number, parts in joined.items():
            events = [event for part in parts for event in part.events]
            if events:
                yield self._line(number, parts, events)

    def _line(self, number: int, parts: list[Any], events: list[Any]) -> Line:
        count = len(events)
        bases = np.array([self._base(part.timestamp_ns) for part in parts], np.int64)
        base = np.repeat(bases, [len(part.events) for part in parts])
        begin = np.fromiter((e.offset_ps for e in events), np.int64, count)
        duration = np.fromiter((e.duration_ps for e in events), np.int64, count)
        metadata = np.fromiter((e.metadata_id for e in events), np.int64, count)
        end, begin = base + (begin + duration) // 1000, base + begin // 1000
        order = np.lexsort((begin - end, begin))
        return Line(
            id=number,
            name=parts[0].display_name or parts[0].name,
            begin=begin[order],
            duration=(end - begin)[order],
            metadata=metadata[order],
            events=[events[at] for at in order],
        )

    def _base(self, timestamp: int) -> int:
        return timestamp if timestamp > _UNIX else timestamp + self._start


def own_time(begin: Ints, duration: Ints) -> Ints:
    """Duration of each event of one row without those that it encloses.

    Args:
        begin: sorted, an event before those that it encloses [E].
        duration: the same order [E].
    """
    own = duration.copy()
    end = begin + duration
    if len(begin) < 2 or bool((begin[1:] >= np.maximum.accumulate(end)[:-1]).all()):
        return own
    open_: list[int] = []
    starts, ends = begin.tolist(), end.tolist()
    for at, start in enumerate(starts):
        while open_ and ends[open_[-1]] <= start:
            open_.pop()
        if open_:
            # Of two that cross, the inner part counts for the one that began later.
            own[open_[-1]] -= min(ends[at], ends[open_[-1]]) - start
        open_.append(at)
    return np.maximum(own, 0)
