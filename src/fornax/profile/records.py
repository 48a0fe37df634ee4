"""What a capture writes: names in its XSpace, and `capture-<rank>.json` with what that lacks."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from fornax.config.errors import ProfileError
from fornax.config.files import write_whole

SPACES = "*.xplane.pb"
COLLECTION = "garbage collection of generation "
"""Prefix of the annotation around one; the generation follows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureRecord:
    """One rank's capture."""

    rank: int
    ranks: int
    host: str
    space: str
    """Name of its XSpace, beside the record."""
    size: int
    """Bytes of that."""
    begin: float
    """Unix seconds."""
    seconds: float
    ended: str
    """"stopped", or the limit that ended it: "seconds", "bytes"."""
    platform: str
    device_kind: str
    devices: int
    """Local ones."""
    processor: str
    cores: int
    versions: dict[str, str]
    samples: list[tuple[int, str, int, int, int | None]]
    """Of allocators: Unix nanoseconds, device, bytes in use, most so far, limit."""
    counter_names: list[str] = dataclasses.field(default_factory=list)
    """Of CPUs."""
    counter_samples: list[list[float]] = dataclasses.field(default_factory=list)
    """Unix nanoseconds, and what each of them had counted by then."""
    counters_absent: dict[str, str] = dataclasses.field(default_factory=dict)
    """Those that are not counted, and why."""


def write_record(folder: Path, record: CaptureRecord) -> None:
    """Write it beside its XSpace, whole or not at all."""
    text = json.dumps(dataclasses.asdict(record), indent=1)
    write_whole(folder / f"capture-{record.rank}.json", text.encode())


def read_records(folder: Path) -> list[CaptureRecord]:
    """The records of a capture's folder, by rank; none of a capture that others made.

    Raises:
        ProfileError: one cannot be read.
    """
    found = []
    for path in sorted(folder.glob("capture-*.json")):
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            values["samples"] = [tuple(sample) for sample in values["samples"]]
            found.append(CaptureRecord(**values))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ProfileError(
                f"{path} is not a record of a capture ({error}); delete it to read the capture "
                "without, or capture again"
            ) from error
    return sorted(found, key=lambda record: record.rank)
