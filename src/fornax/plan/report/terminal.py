"""A plan as tables for a terminal, one hundred columns wide."""

import io
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from fornax.plan.report.data import Plan, Run
from fornax.plan.report.gather import Exchange, exchanges
from fornax.plan.report.program import Memory, ProgramReport
from fornax.plan.report.say import TITLES, link_words, paid, verdicts
from fornax.plan.report.words import count, nbytes, rate, seconds, shorten, sides, where

__all__ = ["print_plan", "render_table"]

WIDTH = 100
_BAR = 24
_ROWS = 8


def render_table(plan: Plan, width: int = WIDTH) -> str:
    """The plan as plain text."""
    out = io.StringIO()
    print_plan(plan, Console(file=out, width=width, color_system=None, legacy_windows=False))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print the plan: as wide as the terminal up to a hundred columns, as plain text elsewhere."""
    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal:
            print(render_table(plan), end="")  # noqa: T201
            return
    console.width = min(console.width, WIDTH)
    for part in _parts(plan):
        console.print(part)


def _parts(plan: Plan) -> Iterator[RenderableType]:
    main = plan.main
    yield from _head(plan)
    yield _title("Memory of one chip" + (f", {main.name}" if len(plan.programs) > 1 else ""))
    yield _memory(main.memory)
    if main.memory.buffers:
        yield _title("The largest at the peak")
        yield _buffers(main.memory)
    if main.work:
        hardware = plan.hardware
        yield _title(
            f"Work of a step, one chip (peak {rate(hardware.peak_flops)}, "
            f"{count(hardware.memory_bandwidth, 'B/s')})"
        )
        yield _work(main)
    yield from _communication(main, plan.hardware.platform)
    yield from _findings(main)
    yield from _others(plan)
    yield from _compilation(main)
    yield from _options(plan)
    for table in plan.tables:
        yield _title(table.title)
        if table.lead:
            yield _indented(table.lead)
        yield _grid(table.head, table.rows)
    yield from _notes(plan)


def _head(plan: Plan) -> Iterator[RenderableType]:
    hardware = plan.hardware
    slices = f"{hardware.slices} slices, " if hardware.slices > 1 else ""
    chips = _plural(hardware.chips, "chip")
    yield Text.assemble(
        (plan.name, "bold"),
        f" on {hardware.topology}: {slices}{chips}, {_plural(hardware.hosts, 'host')}",
    )
    yield Text(plan.how)
    yield ""
    if plan.run:
        yield _indented(_run(plan.run))
    yield from map(_indented, verdicts(plan))
    if plan.money:
        yield _indented(paid(plan.money))


def _run(run: Run) -> str:
    mesh = " ".join(f"{axis}={size}" for axis, size in run.mesh.items()) or "one device"
    micro = f" in {run.accumulate} micro-batches" if run.accumulate > 1 else ""
    return (
        f"{count(run.parameters)} parameters in {run.params_dtype}, computed in "
        f"{run.compute_dtype}; {run.batch_size:,} rows of {run.seq_len:,} tokens a step{micro}; "
        f"mesh {mesh}; remat {run.remat}"
    )


def _memory(memory: Memory) -> Grid:
    total = max(memory.total, 1)
    grid = _columns(("", "bytes", "share", ""))
    for part in memory.parts:
        if part.bytes:
            share = part.bytes / total
            grid.add_row(part.owner, nbytes(part.bytes), f"{share:.1%}", _bar(share))
    grid.add_section()
    grid.add_row("all", nbytes(memory.total), "", "")
    grid.add_row("usable", nbytes(memory.usable), "", "")
    return grid


def _bar(share: float) -> Text:
    filled = round(share * _BAR)
    return Text("█" * filled, style="dark_orange3")


def _buffers(memory: Memory) -> RenderableType:
    rows = [
        (
            nbytes(buffer.bytes) + (f" (x{buffer.padding:.1f})" if buffer.padding > 1.05 else ""),
            buffer.owner,
            shorten(buffer.shape, 24),
            shorten(where(buffer.source) or buffer.name, 42),
        )
        for buffer in memory.buffers[:_ROWS]
    ]
    last = "made at" if any(buffer.source for buffer in memory.buffers) else "what"
    return _grid(("bytes", "owner", "shape", last), rows)


def _work(program: ProgramReport) -> RenderableType:
    whole = sum(work.seconds for work in program.work) or 1.0
    rows = [
        (
            work.name.replace("_", " "),
            count(work.flops),
            nbytes(work.bytes),
            f"{work.intensity:,.0f}" if work.flops else "—",
            rate(work.flops / work.seconds) if work.flops and work.seconds else "—",
            seconds(work.seconds),
            f"{work.seconds / whole:.0%}",
            work.bound,
        )
        for work in sorted(program.work, key=lambda work: -work.seconds)
    ]
    rows.append(
        ("all", count(program.flops), nbytes(program.bytes), "", "", seconds(whole), "", "")
    )
    head = ("class", "FLOPs", "bytes", "FLOP/B", "FLOP/s", "time", "", "bound by")
    return _grid(head, rows, total=True)


def _communication(program: ProgramReport, platform: str) -> Iterator[RenderableType]:
    rows = exchanges(program.collectives)
    if not rows:
        return
    yield _title("Communication of a step, one chip")
    yield _grid(
        ("exchange", "over", "link", "times", "bytes", "time", "exposed"),
        (_exchange(row, platform) for row in rows),
    )


def _exchange(row: Exchange, platform: str) -> tuple[str, ...]:
    return (
        row.kind,
        sides(row.axes),
        link_words(row.link, platform),
        f"{row.count:,}",
        nbytes(row.moved),
        seconds(row.seconds),
        seconds(row.exposed_seconds),
    )


def _findings(program: ProgramReport) -> Iterator[RenderableType]:
    for kind, title in TITLES.items():
        found = [finding for finding in program.findings if finding.kind == kind]
        if not found:
            continue
        yield _title(title)
        for finding in found[:_ROWS]:
            place = f" at {where(finding.source)}" if finding.source else ""
            cost = f", {seconds(finding.seconds)}" if finding.seconds else ""
            fix = f": {finding.fix}" if finding.fix else ""
            yield _indented(f"{nbytes(finding.bytes)}{cost}  {finding.what}{place}{fix}")
        if len(found) > _ROWS:
            yield _indented(f"and {len(found) - _ROWS} more in --json")


def _others(plan: Plan) -> Iterator[RenderableType]:
    if len(plan.programs) < 2:
        return
    yield _title("All programs")
    rows = [
        (
            program.name,
            nbytes(program.memory.total),
            "yes" if program.memory.fits else "NO",
            count(program.flops),
            seconds(program.step_seconds),
            seconds(program.exposed_seconds),
            program.bound,
        )
        for program in plan.programs
    ]
    yield _grid(("program", "memory", "fits", "FLOPs", "time", "exposed", "bound by"), rows)


def _compilation(program: ProgramReport) -> Iterator[RenderableType]:
    made = program.compilation
    if made is None:
        return
    when = " (kept from an earlier plan)" if made.cached else ""
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    yield _title("Compilation")
    yield _indented(
        f"traced in {seconds(made.lower_seconds)}, compiled in {seconds(made.compile_seconds)}"
        f"{when}; {nbytes(made.code_bytes)} of code, {nbytes(made.hlo_bytes)} of HLO text"
        + (f"; {versions}" if versions else "")
    )


def _options(plan: Plan) -> Iterator[RenderableType]:
    if plan.searched:
        yield _title("Search")
        yield _indented(plan.searched)
    for number, option in enumerate(plan.options, 1):
        origin = "compiled" if option.compiled else "estimated"
        yield _indented(
            f"{number}. {seconds(option.step_seconds)} a step, "
            f"{option.tokens_per_second_per_chip:,.0f} tokens/s/chip, "
            f"{nbytes(option.total_bytes)} ({origin})"
        )
        yield Padding(Text(option.changes.strip() or "as given", style="bold"), (0, 0, 0, 5))
        yield Padding(Text(option.reason), (0, 0, 0, 5))


def _notes(plan: Plan) -> Iterator[RenderableType]:
    notes = [*plan.notes, *(note for program in plan.programs for note in program.notes)]
    if notes:
        yield _title("Notes")
    for note in dict.fromkeys(notes):
        yield _indented(f"- {note}")


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold dark_orange3")


def _indented(text: str) -> Padding:
    return Padding(Text(text), (0, 0, 0, 1), expand=False)


def _grid(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, total: bool = False
) -> RenderableType:
    body = [tuple(row) for row in rows]
    shown = [c for c in range(len(head)) if not body or any(row[c] for row in body)]
    head, body = [head[c] for c in shown], [tuple(row[c] for c in shown) for row in body]
    grid = _columns(head, [all(_numeric(row[c]) for row in body) for c in range(len(head))])
    for number, row in enumerate(body):
        if total and number == len(body) - 1:
            grid.add_section()
        grid.add_row(*row)
    return grid


def _columns(head: Sequence[str], numeric: Sequence[bool] = (False, True, True, False)) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), expand=False)
    for title, right in zip(head, numeric, strict=True):
        grid.add_column(title, justify="right" if right else "left", overflow="fold")
    return grid


def _numeric(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell in ("—", "-")


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
