"""One rank's capture as rows of events, before its programs are looked up.

Legend: E events of a row.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fornax.profile.facts import Ints, Kind

__all__ = ["Annotation", "Execution", "Key", "Mark", "Raw", "RawRow"]

Key = tuple[int, str, str]
"""Program id (0: not said), name of the module, name of the operation."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RawRow:
    """A row whose operations are not looked up yet; times are Unix nanoseconds."""

    rank: int
    device: str
    name: str
    kind: Kind
    begin: Ints
    duration: Ints
    names: tuple[str, ...]
    """Of each event [E]."""
    keys: tuple[Key | None, ...]
    """Of each event [E]."""
    helped: Ints | None = None
    """Nanoseconds that other threads worked on each, where that is known [E]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mark:
    """A step as its annotation, or a device's line of steps, has it."""

    rank: int
    thread: str
    """The host's row; empty for a step of a device."""
    name: str
    number: int
    begin: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Annotation:
    """A server's annotation and what it says: {"request": "a", "tokens": 7}."""

    name: str
    begin: int
    end: int
    facts: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """One run of a program on one device."""

    rank: int
    device: str
    program: str
    run: int
    begin: int
    end: int


@dataclasses.dataclass(kw_only=True)
class Raw:
    """All rows of one rank, and what marks steps in them."""

    rank: int
    rows: list[RawRow] = dataclasses.field(default_factory=list)
    marks: list[Mark] = dataclasses.field(default_factory=list)
    device_marks: list[Mark] = dataclasses.field(default_factory=list)
    executions: list[Execution] = dataclasses.field(default_factory=list)
    annotations: list[Annotation] = dataclasses.field(default_factory=list)
    """Of servers."""
    counters: dict[tuple[str, str], tuple[list[int], list[float]]] = dataclasses.field(
        default_factory=dict
    )
    """Device and name of a hardware counter -> times and values of its samples."""
    busy: dict[str, list[tuple[Ints, Ints]]] = dataclasses.field(default_factory=dict)
    """Device -> begins and ends of what runs its operations: executors and modules."""
    programs: dict[int, tuple[str, bytes]] = dataclasses.field(default_factory=dict)
    """Program id -> its name and serialized HloProto."""
    begin: int = 0
    """Unix nanoseconds."""
    whole: bool = False
    """Whether it has the plane that is written last, and says when the session ended."""
    end: int = 0
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    kinds: list[str] = dataclasses.field(default_factory=list)
    """What device planes say their kind is."""
