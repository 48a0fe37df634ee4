"""Two captures compared: a table on a terminal."""

import math
from typing import TYPE_CHECKING

from fornax.plan.format import format_seconds, short_source, shorten

if TYPE_CHECKING:
    from fornax.profile.compare import Change, Comparison

_NAMES = {"op": "operation", "class": "class", "module": "module", "source": "line"}
_KEY, _SOURCE = 26, 19
"""Characters of the names of operations and lines on a terminal."""
_WIDTH = 100
_HEAD = ("", "before", "after", "ratio", "share", "p", "line")


def print_comparison(found: "Comparison", rows: int) -> None:
    """The table and the verdict."""
    import textwrap

    from fornax.profile.compare import verdict

    head, body = _rows(found, rows)
    for line in body:
        line[1] = shorten(line[1], _KEY if found.by != "source" else _KEY + _SOURCE)
        line[7:] = [shorten(_file_and_line(source), _SOURCE) for source in line[7:]]
    width = [max(len(line[at]) for line in (head, *body)) for at in range(len(head))]
    for line in (head, *body):
        cells = [
            cell.ljust(size) if at in (0, 1, len(head) - 1) else cell.rjust(size)
            for at, (cell, size) in enumerate(zip(line, width, strict=True))
        ]
        print(" ".join(cells).rstrip())  # noqa: T201
    print()  # noqa: T201
    print(textwrap.fill(verdict(found), _WIDTH))  # noqa: T201


def _rows(found: "Comparison", most: int) -> tuple[list[str], list[list[str]]]:
    """The head of the table and its rows, cells as text."""
    head = ["", _NAMES[found.by], *_HEAD[1:]]
    if found.by == "source":
        head.pop()
    body = [_row(change, found) for change in found.changes[:most]]
    waited = (found.before.waited_seconds, found.after.waited_seconds)
    if any(waited):
        body.append(_line("", "(waiting)", *waited, found.before.seconds))
    body.append(_line("", "whole step", found.before.seconds, found.after.seconds, 0.0))
    body[-1][4] = _ratio(found.step.value, found.step.low, found.step.high)
    body[-1][5] = _share(found.step.value - 1)
    return head, [line[: len(head)] for line in body]


def _line(kind: str, key: str, before: float, after: float, whole: float) -> list[str]:
    share = _share((after - before) / whole) if whole else ""
    times = (format_seconds(value) if value else "—" for value in (before, after))
    return [kind, key, *times, "—", share, "—", ""]


def _row(change: "Change", found: "Comparison") -> list[str]:
    ratio = change.ratio
    line = _line(
        "" if change.kind == "same" else change.kind,
        change.key,
        change.before_seconds,
        change.after_seconds,
        found.before.seconds,
    )
    if not math.isnan(ratio.value):
        line[4] = _ratio(ratio.value, ratio.low, ratio.high)
    line[6] = "<.001" if change.p_value < 0.001 else f"{change.p_value:.3f}"
    line[7] = short_source(change.source)
    return line


def _share(value: float) -> str:
    return f"{value:+.1%}" if abs(value) < 1 else f"{value:+.0%}"


def _ratio(value: float, low: float, high: float) -> str:
    digits = 2 if max(value, high) < 10 else 1 if max(value, high) < 100 else 0
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _file_and_line(source: str) -> str:
    """`mlp.py:56` of `models/mlp.py:56 (MLP.__call__)`."""
    return source.partition(" ")[0].rpartition("/")[2]
