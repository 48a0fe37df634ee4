"""A plan as tables for a terminal, one hundred columns wide."""

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from fornax.plan.report.data import Plan, Run
from fornax.plan.report.gather import exchanges
from fornax.plan.report.layout import WIDTH, bar, columns, grid, heading, indented, plain
from fornax.plan.report.program import Memory, ProgramReport
from fornax.plan.report.say import TITLES, exchange_cells, paid, verdicts
from fornax.plan.report.words import count, nbytes, rate, seconds, shorten, where

__all__ = ["print_plan", "render_table"]

_ROWS = 8


def render_table(plan: Plan, width: int = WIDTH) -> str:
    """The plan as plain text."""
    return plain(lambda console: print_plan(plan, console), width)


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
    yield heading("Memory of one chip" + (f", {main.name}" if len(plan.programs) > 1 else ""))
    yield _memory(main.memory)
    if main.memory.buffers:
        yield heading("The largest at the peak")
        yield _buffers(main.memory)
    if main.work:
        hardware = plan.hardware
        yield heading(
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
        yield heading(table.title)
        if table.lead:
            yield indented(table.lead)
        yield grid(table.head, table.rows)
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
        yield indented(_run(plan.run))
    yield from (indented(f"kernel {choice}") for choice in plan.kernels)
    yield from map(indented, verdicts(plan))
    if plan.money:
        yield indented(paid(plan.money))


def _run(run: Run) -> str:
    mesh = " ".join(f"{axis}={size}" for axis, size in run.mesh.items()) or "one device"
    micro = f" in {run.accumulate} micro-batches" if run.accumulate > 1 else ""
    return (
        f"{count(run.parameters)} parameters in {run.params_dtype}, computed in "
        f"{run.compute_dtype}; {run.batch_size:,} rows of {run.seq_len:,} tokens a step{micro}; "
        f"mesh {mesh}; remat {run.remat}"
    )


def _memory(memory: Memory) -> RenderableType:
    total = max(memory.total, 1)
    shown = columns(("", "bytes", "share", ""))
    for part in memory.parts:
        if part.bytes:
            share = part.bytes / total
            shown.add_row(part.owner, nbytes(part.bytes), f"{share:.1%}", bar(share))
    shown.add_section()
    shown.add_row("all", nbytes(memory.total), "", "")
    shown.add_row("usable", nbytes(memory.usable), "", "")
    return shown


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
    return grid(("bytes", "owner", "shape", last), rows)


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
    return grid(head, rows, total=True)


def _communication(program: ProgramReport, platform: str) -> Iterator[RenderableType]:
    rows = exchanges(program.collectives)
    if not rows:
        return
    yield heading("Communication of a step, one chip")
    yield grid(
        ("exchange", "over", "link", "times", "bytes", "time", "exposed"),
        (exchange_cells(row, platform) for row in rows),
    )


def _findings(program: ProgramReport) -> Iterator[RenderableType]:
    for kind, title in TITLES.items():
        found = [finding for finding in program.findings if finding.kind == kind]
        if not found:
            continue
        yield heading(title)
        for finding in found[:_ROWS]:
            place = f" at {where(finding.source)}" if finding.source else ""
            cost = f", {seconds(finding.seconds)}" if finding.seconds else ""
            fix = f": {finding.fix}" if finding.fix else ""
            yield indented(f"{nbytes(finding.bytes)}{cost}  {finding.what}{place}{fix}")
        if len(found) > _ROWS:
            yield indented(f"and {len(found) - _ROWS} more in --json")


def _others(plan: Plan) -> Iterator[RenderableType]:
    if len(plan.programs) < 2:
        return
    yield heading("All programs")
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
    yield grid(("program", "memory", "fits", "FLOPs", "time", "exposed", "bound by"), rows)


def _compilation(program: ProgramReport) -> Iterator[RenderableType]:
    made = program.compilation
    if made is None:
        return
    when = " (kept from an earlier plan)" if made.cached else ""
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    yield heading("Compilation")
    yield indented(
        f"traced in {seconds(made.lower_seconds)}, compiled in {seconds(made.compile_seconds)}"
        f"{when}; {nbytes(made.code_bytes)} of code, {nbytes(made.hlo_bytes)} of HLO text"
        + (f"; {versions}" if versions else "")
    )


def _options(plan: Plan) -> Iterator[RenderableType]:
    if plan.searched:
        yield heading("Search")
        yield indented(plan.searched)
    for number, option in enumerate(plan.options, 1):
        origin = "compiled" if option.compiled else "estimated"
        yield indented(
            f"{number}. {seconds(option.step_seconds)} a step, "
            f"{option.tokens_per_second_per_chip:,.0f} tokens/s/chip, "
            f"{nbytes(option.total_bytes)} ({origin})"
        )
        yield Padding(Text(option.changes.strip() or "as given", style="bold"), (0, 0, 0, 5))
        yield Padding(Text(option.reason), (0, 0, 0, 5))


def _notes(plan: Plan) -> Iterator[RenderableType]:
    notes = [*plan.notes, *(note for program in plan.programs for note in program.notes)]
    if notes:
        yield heading("Notes")
    for note in dict.fromkeys(notes):
        yield indented(f"- {note}")


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
