"""Pieces of a report on a terminal."""

from collections.abc import Sequence

from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

__all__ = ["ACCENT", "columns", "heading", "line"]

ACCENT = "dark_orange3"


def heading(text: str) -> Text:
    """Above a part."""
    return Text(f"\n{text}", style=f"bold {ACCENT}")


def line(text: str) -> Padding:
    """A sentence of a part."""
    return Padding(Text(text), (0, 0, 0, 1), expand=False)


def columns(head: Sequence[str], sides: str) -> Table:
    """An empty table; `sides` has "l" or "r" for each column."""
    made = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), collapse_padding=True
    )
    for title, side in zip(head, sides, strict=False):
        made.add_column(title, justify="right" if side == "r" else "left", overflow="fold")
    return made
