"""What plans on a terminal are made of: headings, indented lines, tables, bars."""

import io
from collections.abc import Callable, Iterable, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

__all__ = ["WIDTH", "bar", "columns", "grid", "heading", "indented", "plain"]

WIDTH = 100
_BAR = 24
_ACCENT = "dark_orange3"


def plain(show: Callable[[Console], None], width: int) -> str:
    """What `show` prints, as plain text without spaces at the ends of lines."""
    out = io.StringIO()
    show(Console(file=out, width=width, color_system=None, legacy_windows=False))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def heading(text: str) -> Text:
    """The title of a part, with an empty line above."""
    return Text(f"\n{text}", style=f"bold {_ACCENT}")


def indented(text: str) -> Padding:
    """A paragraph, one column in."""
    return Padding(Text(text), (0, 0, 0, 1), expand=False)


def bar(share: float) -> Text:
    """A share of one as a bar."""
    return Text("█" * round(share * _BAR), style=_ACCENT)


def grid(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, total: bool = False
) -> RenderableType:
    """A table whose columns of numbers align right; columns that are all empty are left out.

    Args:
      head: the columns' titles.
      rows: their cells.
      total: whether the last row is a sum, under a line.
    """
    body = [tuple(row) for row in rows]
    shown = [c for c in range(len(head)) if not body or any(row[c] for row in body)]
    head, body = [head[c] for c in shown], [tuple(row[c] for c in shown) for row in body]
    made = columns(head, [all(_numeric(row[c]) for row in body) for c in range(len(head))])
    for number, row in enumerate(body):
        if total and number == len(body) - 1:
            made.add_section()
        made.add_row(*row)
    return made


def columns(head: Sequence[str], numeric: Sequence[bool] = (False, True, True, False)) -> Grid:
    """An empty table; `numeric` says which columns align right."""
    made = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), expand=False)
    for title, right in zip(head, numeric, strict=True):
        made.add_column(title, justify="right" if right else "left", overflow="fold")
    return made


def _numeric(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell in ("—", "-")
