"""XSpaces as profilers document their planes, built event by event."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fornax.profile.schema import XSpace

MS = 1_000_000
START = 1_800_000_000 * 10**9
"""Unix nanoseconds at which built captures begin."""


@dataclasses.dataclass(frozen=True)
class Event:
    """Times in nanoseconds since the capture began."""

    name: str
    begin: int
    duration: int
    stats: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    of_name: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Statistics of its metadata: what all events of the name have."""
    display: str = ""


def space(
    planes: Mapping[str, Mapping[str, Sequence[Event]]],
    stats: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    start: int = START,
    programs: Mapping[str, tuple[int, bytes]] | None = None,
) -> Any:
    """An XSpace: plane -> line -> events; `stats` of planes; name -> (id, HloProto) of programs."""
    made = XSpace()
    for name, lines in planes.items():
        _Plane(made.planes.add(name=name)).fill(lines, (stats or {}).get(name, {}))
    held = _Plane(made.planes.add(name="/host:metadata"))
    for name, (number, proto) in (programs or {}).items():
        held.metadata(f"{name}({number})", {"Hlo Proto": proto, "program_id": number})
    environment = _Plane(made.planes.add(name="Task Environment"))
    environment.fill({}, {"profile_start_time": start, "profile_stop_time": start + 10**9})
    return made


def write(message: Any, directory: Path, host: str = "vm", folder: str = "one") -> Path:
    """Write an XSpace where a capture of the directory lies; the file."""
    path = directory / "plugins" / "profile" / folder / f"{host}.xplane.pb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(message.SerializeToString())
    return path


class _Plane:
    def __init__(self, message: Any) -> None:
        self._message = message
        self._keys: dict[str, int] = {}
        self._names: dict[str, int] = {}

    def fill(self, lines: Mapping[str, Sequence[Event]], stats: Mapping[str, Any]) -> None:
        self._add(self._message, stats)
        for number, (name, events) in enumerate(lines.items(), start=1):
            line = self._message.lines.add(id=number, name=name)
            for event in events:
                known = self.metadata(event.name, event.of_name, event.display)
                added = line.events.add(
                    metadata_id=known,
                    offset_ps=event.begin * 1000,
                    duration_ps=event.duration * 1000,
                )
                self._add(added, event.stats)

    def metadata(self, name: str, stats: Mapping[str, Any], display: str = "") -> int:
        if name not in self._names:
            number = self._names[name] = len(self._names) + 1
            entry = self._message.event_metadata.add(key=number)
            entry.value.id, entry.value.name = number, name
            entry.value.display_name = display
            self._add(entry.value, stats)
        return self._names[name]

    def _add(self, holder: Any, stats: Mapping[str, Any]) -> None:
        for key, value in stats.items():
            stat = holder.stats.add(metadata_id=self._key(key))
            if isinstance(value, bytes):
                stat.bytes_value = value
            elif isinstance(value, str):
                stat.str_value = value
            else:
                stat.int64_value = value

    def _key(self, name: str) -> int:
        if name not in self._keys:
            number = self._keys[name] = len(self._keys) + 1
            entry = self._message.stat_metadata.add(key=number)
            entry.value.id, entry.value.name = number, name
        return self._keys[name]
