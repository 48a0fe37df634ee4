"""A report on a terminal: headings, paragraphs and tables, a hundred columns at most."""

import io
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from fornax.plan.format import format_bytes, shorten
from fornax.plan.report.document import Block, Document, Lines, MemoryChart, Table

WIDTH = 100
_BAR = 24
_ACCENT = "dark_orange3"


def print_document(document: Document) -> None:
    """Print as wide as the terminal, up to a hundred columns; as plain text elsewhere."""
    console = Console(highlight=False)
    if not console.is_terminal:
        print(render_document(document), end="")  # noqa: T201
        return
    console.width = min(console.width, WIDTH)
    for part in _parts(document):
        console.print(part)


def render_document(document: Document, width: int = WIDTH) -> str:
    """The report as plain text, without spaces at the ends of lines."""
    out = io.StringIO()
    width = min(width, WIDTH)
    console = Console(file=out, width=width, color_system=None, legacy_windows=False)
    for part in _parts(document):
        console.print(part)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def _parts(document: Document) -> Iterator[RenderableType]:
    yield Text.assemble((document.title, "bold"), document.place)
    yield Text(document.how)
    yield ""
    yield from map(_paragraph, (*document.facts, *document.verdicts))
    for section in document.sections:
        blocks = [block for block in section.blocks if block.medium != "page"]
        if not blocks:
            continue
        yield _heading(section.heading or section.title)
        if section.lead:
            yield _paragraph(section.lead)
        for block in blocks:
            if block.title:
                yield _heading(block.title)
            yield from _block(block)


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style=f"bold {_ACCENT}")


def _paragraph(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 1), expand=False)


def _block(block: Block) -> Iterator[RenderableType]:
    match block:
        case Table():
            yield _table(block)
        case Lines():
            for line in block.lines[: block.most]:
                yield _paragraph(f"{block.prefix}{line}")
            left = 0 if block.most is None else len(block.lines) - block.most
            if left > 0:
                yield _paragraph(f"and {left} more in --json")
        case MemoryChart():
            yield _memory(block)


def _table(table: Table) -> RenderableType:
    """Columns that are all empty are left out, those of numbers align right."""
    rows = table.rows[: table.most]
    shown = [
        index
        for index, column in enumerate(table.columns)
        if column.medium != "page" and (not rows or any(row[index] for row in rows))
    ]
    columns = [table.columns[index] for index in shown]
    body = [[_cell(row[index], table.columns[index].width) for index in shown] for row in rows]
    numeric = [all(_numeric(row[index]) for row in body) for index in range(len(columns))]
    made = _empty_table([column.title for column in columns], numeric)
    for number, row in enumerate(body):
        if table.total and number == len(body) - 1:
            made.add_section()
        made.add_row(*row)
    return made


def _cell(text: str, width: int | None) -> str:
    return text if width is None else shorten(text, width)


def _numeric(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell in ("—", "-")


def _memory(chart: MemoryChart) -> RenderableType:
    bar = chart.bars[0]
    made = _empty_table(("", "bytes", "share", ""), (False, True, True, False))
    for name, size in bar.parts:
        if size:
            share = size / max(chart.whole, 1)
            made.add_row(
                name, format_bytes(size), f"{share:.1%}", Text("█" * round(share * _BAR), _ACCENT)
            )
    made.add_section()
    made.add_row("all", format_bytes(bar.total), f"{bar.total / max(chart.whole, 1):.1%}", "")
    made.add_row("usable", format_bytes(bar.usable), "", "")
    return made


def _empty_table(head: Sequence[str], numeric: Sequence[bool]) -> RichTable:
    made = RichTable(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), expand=False
    )
    for title, right in zip(head, numeric, strict=True):
        made.add_column(title, justify="right" if right else "left", overflow="fold")
    return made
