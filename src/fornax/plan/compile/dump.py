"""What the TPU compiler writes down while it works: the program's text and its allocations.

The figures of `memory_analysis()` are not the whole truth: libtpu 0.0.42 counts temporaries that do
not live at the same time, and a program that does not fit gives no executable to ask. Its buffer
assignment holds both.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(?:, color (\d+))?(.*):$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Dumped:
    """One program as the compiler wrote it down; bytes are a device's, in HBM."""

    hlo: str
    arguments: int
    outputs: int
    """Those that lie where an argument was included."""
    aliased: int
    temporaries: int
    """The arena that all temporaries share, its gaps included; constants."""

    @property
    def total(self) -> int:
        """All but the program's code."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def options(folder: Path, *, lines: bool) -> Mapping[str, object]:
    """Compiler options that make it write into `folder`.

    Args:
      folder: where to.
      lines: write source lines into the program's text too, which takes a fifth of the time of a
        compilation and says nothing new where the executable can be asked.
    """
    return {
        "xla_dump_to": str(folder),
        "xla_dump_hlo_as_text": True,
        "xla_dump_disable_metadata": not lines,
    }


def read(folder: Path) -> Dumped | None:
    """What the compiler wrote into `folder` about the largest program; None where it did not."""
    texts = list(folder.glob("*.after_optimizations.txt"))
    if not texts:
        return None
    text = max(texts, key=lambda path: path.stat().st_size)
    assigned = text.with_name(text.name.replace(".txt", "-buffer-assignment.txt"))
    if not assigned.is_file():
        return None
    sizes = {"arguments": 0, "outputs": 0, "aliased": 0, "temporaries": 0}
    for size, color, what in _ALLOCATION.findall(assigned.read_text(encoding="utf-8")):
        if color in ("", "0"):
            _count(int(size), what, sizes)
    return Dumped(hlo=text.read_text(encoding="utf-8"), **sizes)


def _count(size: int, what: str, sizes: dict[str, int]) -> None:
    given, live_out = "parameter" in what, "maybe-live-out" in what
    if given:
        sizes["arguments"] += size
    if live_out:
        sizes["outputs"] += size
    if given and live_out:
        sizes["aliased"] += size
    if "preallocated-temp" in what or "constant" in what:
        sizes["temporaries"] += size
