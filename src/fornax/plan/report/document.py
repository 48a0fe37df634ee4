"""What a report consists of, however it is shown: sections of tables, lines and charts; figures."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from markupsafe import Markup

from fornax.config import ConfigError
from fornax.config.files import write_whole

Medium = Literal["both", "terminal", "page"]


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table that a terminal shows otherwise than a page."""

    title: str
    medium: Medium = "both"
    width: int | None = None
    """Most characters on a terminal."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under a head; cells are text."""

    head: Sequence[str | Column]
    rows: Sequence[Sequence[str]]
    title: str = ""
    total: bool = False
    """Whether the last row is a sum."""
    most: int | None = None
    """Most rows on a terminal."""
    fold: str = ""
    """A page hides the table behind this line."""
    medium: Medium = "both"

    @property
    def columns(self) -> list[Column]:
        """The head, every column as one."""
        return [Column(title=one) if isinstance(one, str) else one for one in self.head]


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Paragraphs, a list on a page."""

    lines: Sequence[str]
    prefix: str = ""
    """Of each line on a terminal."""
    most: int | None = None
    """Most lines on a terminal."""
    medium: Medium = "both"
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class MemoryBar:
    """One program's memory of a chip by owner, in bytes."""

    name: str
    parts: Sequence[tuple[str, int]]
    usable: int

    @property
    def total(self) -> int:
        """Of all owners."""
        return sum(size for _, size in self.parts)


@dataclass(frozen=True, kw_only=True)
class MemoryChart:
    """Stacked bars against the usable memory; a terminal shows the first as a table."""

    bars: Sequence[MemoryBar]
    whole: int
    """Bytes that the shares on a terminal are of."""
    medium: Medium = "both"
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture; pages only."""

    draw: Callable[[], Markup]
    medium: Medium = "page"
    title: str = ""


Block = Table | Lines | MemoryChart | Chart


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a report."""

    title: str
    heading: str = ""
    """The title on a terminal, where that is another."""
    lead: str = ""
    blocks: Sequence[Block] = ()


@dataclass(frozen=True, kw_only=True)
class Document:
    """A whole report."""

    title: str
    place: str
    """After the title on a terminal: ` on v5p:4x4x4: 64 chips`."""
    page_title: str
    subtitle: str
    how: str
    """One sentence on where the figures come from."""
    facts: Sequence[str]
    """What would run."""
    verdicts: Sequence[str]
    """Speed, fit, price: a sentence each. The lead of a page's first section."""
    figures: Sequence[tuple[str, str]]
    """Label and value of a page's largest figures."""
    sections: Sequence[Section]


def write_figures(values: Mapping[str, object], path: Path) -> Path:
    """Write a plan's figures as JSON in one replacement.

    Raises:
      ConfigError: when the file cannot be written.
    """
    text = json.dumps(values, indent=1, allow_nan=False) + "\n"
    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(
            f"cannot write the plan to {path}: {error.strerror or error}; name a file in a folder "
            "that can be written"
        ) from error
    return path
