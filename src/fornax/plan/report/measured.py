"""The part of a plan's report that has a capture of the same program beside it."""

from collections.abc import Iterator, Sequence

from fornax.plan.format import format_bytes, format_count, format_seconds, short_source
from fornax.plan.measured import Beside, BesideRow
from fornax.plan.report.document import Block, Column, Lines, Section, Table

_MOST_OPERATIONS = 12


def beside_section(found: Beside) -> Section:
    """Planned and measured: the step, its classes, its operations."""
    step = found.measured_seconds / found.planned_seconds if found.planned_seconds else 0.0
    return Section(
        title="Planned and measured",
        lead=(
            f"A step is planned at {format_seconds(found.planned_seconds)} and took "
            f"{format_seconds(found.measured_seconds)} in the capture {found.capture}, {step:.2f} "
            f"times as long (median of {found.steps} steps); operations of a chip took "
            f"{format_seconds(found.busy_seconds)} of it, each at its fastest."
        ),
        blocks=list(_blocks(found)),
    )


def _blocks(found: Beside) -> Iterator[Block]:
    if found.notes:
        yield Lines(lines=found.notes, prefix="- ")
    yield Table(
        head=("class", "planned", "measured", "measured / planned", "FLOPs", "bytes"),
        rows=[
            *(_class_cells(row) for row in found.classes),
            (
                "all",
                format_seconds(found.planned_seconds),
                format_seconds(found.busy_seconds),
                f"{found.busy_seconds / found.planned_seconds:.2f}"
                if found.planned_seconds
                else "—",
                format_count(found.measured_flops),
                "—",
            ),
        ],
        total=True,
    )
    yield Table(
        title="Operations and their roofline at the shares that the plan assumes",
        head=(
            "operation",
            "planned",
            "measured",
            "measured / planned",
            Column(title="line", width=36),
        ),
        rows=[
            (
                row.name,
                _time(row.planned_seconds),
                _time(row.measured_seconds),
                _ratio(row),
                short_source(row.source),
            )
            for row in found.operations
        ],
        most=_MOST_OPERATIONS,
        fold=f"{len(found.operations)} operations",
    )


def _class_cells(row: BesideRow) -> Sequence[str]:
    return (
        row.name.replace("_", " "),
        _time(row.planned_seconds),
        _time(row.measured_seconds),
        _ratio(row),
        format_count(row.flops) if row.flops else "—",
        format_bytes(row.bytes),
    )


def _time(seconds: float | None) -> str:
    return "—" if seconds is None else format_seconds(seconds)


def _ratio(row: BesideRow) -> str:
    return "—" if row.ratio is None else f"{row.ratio:.2f}"
