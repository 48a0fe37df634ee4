"""A serving plan as one self-contained page: latency over batch, the memory bar, the tables."""

from collections.abc import Iterator
from pathlib import Path

from markupsafe import Markup

from fornax.plan.report.file import make_folder
from fornax.plan.report.words import nbytes, seconds
from fornax.plan.serving.data import ServePlan
from fornax.plan.serving.words import BOUNDS, LIMITS, facts_of, parts_of, verdicts
from fornax.train.report import INK, SOFT, Section, bullets, figure, render, svg, table

__all__ = ["write_page"]

_PARTS = ("#c2410c", "#047857", "#7c3aed", "#60a5fa", "#94a3b8")
_LINES = ("#c2410c", "#1d4ed8", "#047857", "#7c3aed", "#b45309")
_GIB = 1 << 30


def write_page(plan: ServePlan, path: Path) -> Path:
    """Write the page to `path`; it fetches nothing.

    Raises:
      ConfigError: when the file cannot be written.
    """
    make_folder(path)
    return render(
        path,
        title=f"Serving {plan.name} on {plan.topology}",
        subtitle=f"fornax plan serve · {plan.origin} · {plan.how}",
        figures=_figures(plan),
        sections=list(_sections(plan)),
    )


def _figures(plan: ServePlan) -> list[tuple[str, str]]:
    memory, first = plan.memory, plan.decode[0] if plan.decode else None
    best = max((p.tokens_per_second_per_chip for p in plan.decode), default=0.0)
    found = [
        (
            "fits" if memory.fits else "DOES NOT FIT",
            f"{memory.total / memory.usable:.0%} of {nbytes(memory.usable)}",
        ),
        ("full sequences in the cache", f"{memory.sequences:.1f}"),
        ("cache a token and chip", nbytes(memory.bytes_per_token)),
        ("tokens/s/chip at best", f"{best:,.0f}"),
    ]
    if first is not None:
        found.insert(1, (f"between tokens, batch {first.batch}", seconds(first.seconds)))
    return found


def _sections(plan: ServePlan) -> Iterator[Section]:
    lead = ". ".join(f"{line[0].upper()}{line[1:]}" for line in verdicts(plan)) + "."
    body = _memory_picture(plan)
    if plan.advice:
        body += Markup("<h3>The cheapest changes that would fit</h3>") + table(
            ("change", "flags", "memory"),
            [(one.change, one.flags, nbytes(one.bytes)) for one in plan.advice],
        )
    yield Section(title="Does it fit?", lead=lead, body=body)
    yield Section(
        title="Time between tokens",
        lead="Every sequence of the batch is at the same context; at least: at published rates.",
        body=_latency_picture(plan) + _decode_table(plan),
    )
    yield Section(
        title="Time to the first token",
        lead="Of a prompt that comes to an idle engine.",
        body=table(
            ("prompt", "steps", "time", "at least", "tokens/s/chip", "waits for", "origin"),
            [
                (
                    f"{p.tokens:,}",
                    p.steps,
                    seconds(p.seconds),
                    seconds(p.least_seconds),
                    f"{p.tokens_per_second_per_chip:,.0f}",
                    BOUNDS[p.bound],
                    p.origin,
                )
                for p in plan.prompts
            ],
        ),
    )
    if plan.itl_seconds is not None:
        yield _largest(plan, plan.itl_seconds)
    yield Section(title="The engine", body=bullets(facts_of(plan)) + _cache_table(plan))
    if plan.buckets:
        yield _programs(plan)
    yield Section(title="Notes", body=bullets(plan.notes))


def _memory_picture(plan: ServePlan) -> Markup:
    title = "Memory of one chip, GiB"
    picture, axes = figure(7.6, 1.7)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    left = 0.0
    for (name, size), colour in zip(parts_of(plan.memory), _PARTS, strict=True):
        axes.barh(
            [""], [size / _GIB], left=left, color=colour, height=0.6, label=f"{name} {nbytes(size)}"
        )
        left += size / _GIB
    usable = plan.memory.usable / _GIB
    axes.axvline(
        usable,
        color=INK if plan.memory.fits else "#b91c1c",
        linewidth=1.5,
        linestyle=(0, (4, 2)),
        label=f"usable {usable:.1f} GiB",
    )
    axes.set_xlim(0, max(usable, left) * 1.1)
    axes.grid(axis="y", visible=False)
    axes.legend(
        frameon=False, fontsize=9, labelcolor=SOFT, ncols=3, loc="upper left",
        bbox_to_anchor=(0, -0.25),
    )  # fmt: skip
    return svg(picture, title)


def _latency_picture(plan: ServePlan) -> Markup:
    title = "Time between tokens over batch, ms"
    picture, axes = figure(7.2, 3.2)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    contexts = sorted({p.context for p in plan.decode})
    for context, colour in zip(contexts, _LINES * len(contexts), strict=False):
        points = [p for p in plan.decode if p.context == context]
        batches = [p.batch for p in points]
        axes.plot(
            batches,
            [p.seconds * 1e3 for p in points],
            color=colour,
            linewidth=1.5,
            marker="o",
            markersize=3.5,
            label=f"context {context:,}",
        )
        axes.plot(
            batches,
            [p.least_seconds * 1e3 for p in points],
            color=colour,
            linewidth=1,
            linestyle=(0, (2, 2)),
        )
    if plan.itl_seconds is not None:
        axes.axhline(plan.itl_seconds * 1e3, color=SOFT, linewidth=1, linestyle=(0, (4, 2)))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("sequences (dotted: at least, at published rates)", fontsize=9, color=SOFT)
    axes.set_ylabel("ms", fontsize=9, color=SOFT)
    axes.legend(frameon=False, fontsize=9, labelcolor=SOFT)
    return svg(picture, title)


def _decode_table(plan: ServePlan) -> Markup:
    head = ("context", "batch", "time", "at least", "weights", "cache", "arithmetic", "links")
    return table(
        (*head, "choosing", "tokens/s/chip", "waits for", "origin"),
        [
            (
                f"{p.context:,}",
                f"{p.batch:,}",
                seconds(p.seconds),
                seconds(p.least_seconds),
                seconds(p.weights_seconds),
                seconds(p.cache_seconds),
                seconds(p.compute_seconds),
                seconds(p.exchange_seconds),
                seconds(p.sampling_seconds),
                f"{p.tokens_per_second_per_chip:,.0f}",
                BOUNDS[p.bound],
                p.origin,
            )
            for p in plan.decode
        ],
    )


def _largest(plan: ServePlan, limit: float) -> Section:
    return Section(
        title=f"The largest batch within {seconds(limit)} between tokens",
        body=table(
            ("context", "batch", "time", "tokens/s/chip", "limited by"),
            [
                (
                    f"{one.context:,}",
                    f"{one.batch:,}",
                    seconds(one.seconds),
                    f"{one.tokens_per_second_per_chip:,.0f}",
                    LIMITS[one.limited_by],
                )
                for one in plan.largest
            ],
        ),
    )


def _cache_table(plan: ServePlan) -> Markup:
    return table(
        ("layers", "attention", "bytes a token", "pages", "pages of a full sequence"),
        [
            (
                group.layers,
                "full" if group.window is None else f"window {group.window:,}",
                nbytes(group.bytes_per_token),
                f"{group.pages:,}",
                f"{group.pages_per_sequence:,}",
            )
            for group in plan.memory.groups
        ],
    )


def _programs(plan: ServePlan) -> Section:
    return Section(
        title="Compiled programs",
        lead="A step's time is that without attention.",
        body=table(
            ("program", "size", "time", "closed form", "temporaries", "code", "exchanges"),
            [
                (
                    one.program,
                    f"{one.size:,}",
                    seconds(one.seconds),
                    seconds(one.predicted_seconds),
                    nbytes(one.temporaries),
                    nbytes(one.code),
                    ", ".join(one.exchanges),
                )
                for one in plan.buckets
            ],
        ),
    )
