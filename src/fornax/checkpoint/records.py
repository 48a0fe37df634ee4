"""The file that makes a step complete: one record per process, written last, checked on reading.

A step directory is Orbax's own, plus `fornax.<process>.json` from each process that saved it. The
record holds that process's data positions and the checksums of its share of the files; the record
of process 0 holds the config, metadata and the table of arrays too. A step is complete when the
records of all its processes are there, on disk, and nothing else says so.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fornax.config.errors import CheckpointError
from fornax.config.files import replacing, sync

__all__ = [
    "Record",
    "is_complete",
    "json_copy",
    "parse_record",
    "read_record",
    "read_records",
    "record_path",
    "write_record",
]

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one process says about a step."""

    step: int
    process: int
    processes: int
    saved_at: float
    """Seconds since the epoch."""
    data: Mapping[int, Any]
    """Data positions by virtual shard; those of this process."""
    files: Mapping[str, tuple[int, int]]
    """Size in bytes and CRC-32 by path inside the step directory; this process's share."""
    config_yaml: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    arrays: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    """Shape and dtype of each array of the state, by path."""
    epoch: int = 0
    """Of the group of processes that saved it, under `fornax launch`; 0 without one."""
    format: int = FORMAT


def record_path(directory: Path, process: int) -> Path:
    """Where a process's record lies."""
    return directory / f"fornax.{process}.json"


def write_record(directory: Path, record: Record) -> None:
    """Write a record so that it is there whole or not at all, even if the machine stops."""
    path = record_path(directory, record.process)
    body = json.dumps(vars(record), default=_plain)
    whole = json.dumps({"crc32": zlib.crc32(body.encode()), "body": body})
    with replacing(path, durable=True) as draft:
        draft.write_text(whole, encoding="utf-8")
    sync(directory.parent)


def json_copy(value: object) -> Any:
    """What a value becomes when it is written as JSON and read back; shares nothing with it."""
    return json.loads(json.dumps(value, default=_plain))


def _plain(value: object) -> Any:
    """NumPy scalars as Python numbers; everything else is the caller's mistake."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be written as JSON")


def read_record(directory: Path, process: int) -> Record:
    """Read one process's record.

    Raises:
      CheckpointError: when it is missing, damaged, or of another format.
    """
    path = record_path(directory, process)
    try:
        return parse_record(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing, so {directory} is not complete") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error


def parse_record(text: str, name: str) -> Record:
    """The record that a file's `text` holds.

    Raises:
      CheckpointError: when it is damaged, or of another format; names the file by `name`.
    """
    try:
        wrapper = json.loads(text)
        body = wrapper["body"]
        intact = zlib.crc32(body.encode()) == wrapper["crc32"]
        fields = json.loads(body) if intact else {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{name} cannot be read ({error})") from error
    if not intact:
        raise CheckpointError(f"{name} does not match its own checksum")
    if fields.get("format") != FORMAT:
        raise CheckpointError(
            f"{name} has format {fields.get('format')!r}, this version of Fornax reads {FORMAT}; "
            "use the version that wrote it"
        )
    return _from_fields(fields)


def _from_fields(fields: dict[str, Any]) -> Record:
    fields["data"] = {int(shard): state for shard, state in fields["data"].items()}
    fields["files"] = {name: tuple(pair) for name, pair in fields["files"].items()}
    fields["arrays"] = {
        name: (tuple(shape), dtype) for name, (shape, dtype) in fields["arrays"].items()
    }
    return Record(**fields)


def read_records(directory: Path) -> list[Record]:
    """The records of all processes that saved a step, process 0 first.

    Raises:
      CheckpointError: when one is missing or damaged.
    """
    first = read_record(directory, 0)
    return [first, *(read_record(directory, process) for process in range(1, first.processes))]


def is_complete(directory: Path) -> bool:
    """Whether every process's record is on disk.

    A damaged record counts as there: the step was complete once, and its damage is for `restore`
    to report, not for a clean-up to delete.
    """
    if not record_path(directory, 0).is_file():
        return False
    try:
        processes = read_record(directory, 0).processes
    except CheckpointError:
        return True
    return all(record_path(directory, process).is_file() for process in range(processes))
