"""A serving plan as tables for a terminal, one hundred columns wide, and as JSON."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from fornax.config import to_mapping
from fornax.plan.report.file import write_values
from fornax.plan.report.layout import WIDTH, bar, columns, grid, heading, indented, plain
from fornax.plan.report.words import nbytes, seconds
from fornax.plan.serving.data import MemoryReport, ServePlan
from fornax.plan.serving.words import BOUNDS, LIMITS, facts_of, parts_of, verdicts

__all__ = ["print_plan", "render_table", "too_large_words", "write_json"]


def render_table(plan: ServePlan, width: int = WIDTH) -> str:
    """The plan as plain text."""
    return plain(lambda console: print_plan(plan, console), width)


def print_plan(plan: ServePlan, console: Console | None = None) -> None:
    """Print the plan, never wider than a hundred columns."""
    console = console or Console(highlight=False)
    console.width = min(console.width, WIDTH)
    for part in _parts(plan):
        console.print(part)


def write_json(plan: ServePlan, path: Path) -> Path:
    """Write every figure to `path` in one replacement.

    Raises:
      ConfigError: when the file cannot be written.
    """
    return write_values({"format": 1, **to_mapping(plan)}, path)


def too_large_words(plan: ServePlan) -> str | None:
    """By how much a plan does not fit and what would mend it, in a paragraph; None if it fits."""
    memory = plan.memory
    if memory.fits:
        return None
    over = memory.total - memory.usable
    ways = "; ".join(f"{a.flags} ({a.change}): {nbytes(a.bytes)}" for a in plan.advice)
    fix = f"the cheapest changes that would fit: {ways}" if ways else "use more or larger chips"
    return (
        f"{plan.name} does not fit {plan.topology}: with the cache that the engine would make it "
        f"takes {nbytes(memory.total)} of a chip's {nbytes(memory.usable)}, {nbytes(over)} too "
        f"much; {fix}"
    )


def _parts(plan: ServePlan) -> Iterator[RenderableType]:
    chips = f"{plan.num_chips:,} chip{'' if plan.num_chips == 1 else 's'}"
    yield Text.assemble((f"Serving {plan.name}", "bold"), f" on {plan.topology}: {chips}")
    yield Text.assemble((f"{plan.origin.capitalize()}. ", "bold"), plan.how)
    yield ""
    yield from (indented(line) for line in (*facts_of(plan), *verdicts(plan)))
    yield heading("Memory of one chip")
    yield _memory(plan.memory)
    yield heading("Cache")
    yield _cache(plan.memory)
    yield heading("Time between tokens, every sequence of the batch at the same context")
    yield grid(
        ("context", "batch", "time", "at least", "tokens/s/chip", "waits for", ""),
        (
            (
                f"{p.context:,}",
                f"{p.batch:,}",
                seconds(p.seconds),
                seconds(p.least_seconds),
                f"{p.tokens_per_second_per_chip:,.0f}",
                BOUNDS[p.bound],
                p.origin,
            )
            for p in plan.decode
        ),
    )
    yield heading("Time to the first token of a prompt on an idle engine")
    yield grid(
        ("prompt", "steps", "time", "at least", "tokens/s/chip", "waits for", ""),
        (
            (
                f"{p.tokens:,}",
                f"{p.steps}",
                seconds(p.seconds),
                seconds(p.least_seconds),
                f"{p.tokens_per_second_per_chip:,.0f}",
                BOUNDS[p.bound],
                p.origin,
            )
            for p in plan.prompts
        ),
    )
    yield from _largest(plan)
    yield from _programs(plan)
    if plan.notes:
        yield heading("Notes")
    yield from (indented(f"- {note}") for note in plan.notes)


def _memory(memory: MemoryReport) -> RenderableType:
    shown = columns(("", "bytes", "share", ""))
    for name, size in parts_of(memory):
        if size:
            share = size / memory.usable
            shown.add_row(name, nbytes(size), f"{share:.1%}", bar(share))
    shown.add_section()
    shown.add_row("all", nbytes(memory.total), f"{memory.total / memory.usable:.1%}", "")
    shown.add_row("usable", nbytes(memory.usable), "", "")
    return shown


def _cache(memory: MemoryReport) -> RenderableType:
    return grid(
        ("layers", "attention", "a token", "pages", "pages of a full sequence"),
        (
            (
                f"{group.layers}",
                "full" if group.window is None else f"window {group.window:,}",
                nbytes(group.bytes_per_token),
                f"{group.pages:,}",
                f"{group.pages_per_sequence:,}",
            )
            for group in memory.groups
        ),
    )


def _largest(plan: ServePlan) -> Iterator[RenderableType]:
    if plan.itl_seconds is None:
        return
    yield heading(f"The largest batch within {seconds(plan.itl_seconds)} between tokens")
    yield grid(
        ("context", "batch", "time", "tokens/s/chip", "limited by"),
        (
            (
                f"{one.context:,}",
                f"{one.batch:,}",
                seconds(one.seconds),
                f"{one.tokens_per_second_per_chip:,.0f}",
                LIMITS[one.limited_by],
            )
            for one in plan.largest
        ),
    )


def _programs(plan: ServePlan) -> Iterator[RenderableType]:
    if not plan.buckets:
        return
    yield heading("Compiled programs (a step's time is that without attention)")
    yield grid(
        ("program", "size", "time", "closed form", "temporaries", "code", "trace + compile"),
        (
            (
                one.program,
                f"{one.size:,}",
                seconds(one.seconds),
                seconds(one.predicted_seconds),
                nbytes(one.temporaries),
                nbytes(one.code),
                f"{seconds(one.lower_seconds)} + {seconds(one.compile_seconds)}",
            )
            for one in plan.buckets
        ),
    )
    for one in plan.buckets:
        if one.exchanges:
            yield indented(f"{one.program} {one.size}: {', '.join(one.exchanges)}")
