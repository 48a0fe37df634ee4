"""The report of a serving plan."""

from collections.abc import Iterator, Mapping

from fornax.plan.format import format_bytes, format_count, format_plural, format_seconds
from fornax.plan.report.charts import latency_picture
from fornax.plan.report.document import (
    Chart,
    Column,
    Document,
    Lines,
    MemoryBar,
    MemoryChart,
    Section,
    Table,
)
from fornax.plan.serving_facts import MemoryReport, ServePlan

_BOUNDS: Mapping[str, str] = {
    "weights": "reading weights",
    "cache": "reading the cache",
    "compute": "arithmetic",
    "exchange": "links between chips",
    "sampling": "choosing tokens",
}
_LIMITS: Mapping[str, str] = {
    "latency": "latency",
    "cache": "the cache",
    "max_num_seqs": "max_num_seqs",
}


def serving_document(plan: ServePlan) -> Document:
    """The report of a serving plan."""
    return Document(
        title=f"Serving {plan.name}",
        place=f" on {plan.topology}: {format_plural(plan.num_chips, 'chip')}",
        page_title=f"Serving {plan.name} on {plan.topology}",
        subtitle=f"fornax plan serve · {plan.origin} · {plan.how}",
        how=f"{plan.origin.capitalize()}. {plan.how}",
        facts=_facts(plan),
        verdicts=_verdicts(plan),
        figures=_figures(plan),
        sections=list(_sections(plan)),
    )


def too_large(plan: ServePlan) -> str | None:
    """By how much a plan does not fit and what would fix it, in a paragraph; None if it fits."""
    memory = plan.memory
    if memory.fits:
        return None
    over = memory.total - memory.usable
    ways = "; ".join(f"{a.flags} ({a.change}): {format_bytes(a.bytes)}" for a in plan.advice)
    fix = f"the cheapest changes that would fit: {ways}" if ways else "use more or larger chips"
    return (
        f"{plan.name} does not fit {plan.topology}: with the cache that the engine would make it "
        f"takes {format_bytes(memory.total)} of a chip's {format_bytes(memory.usable)}, "
        f"{format_bytes(over)} too much; {fix}"
    )


def _facts(plan: ServePlan) -> list[str]:
    engine = plan.engine
    devices = format_plural(engine.tensor_parallel_size, "device")
    side = f", {engine.engines} engines side by side" if engine.engines > 1 else ""
    return [
        f"{format_count(plan.parameters)} parameters in {engine.dtype}, computed in "
        f"{engine.compute_dtype}, cache in {engine.cache_dtype}; each layer divided over "
        f"{devices}{side}",
        f"at most {engine.max_num_seqs:,} sequences of {engine.max_model_len:,} tokens, steps of "
        f"at most {engine.max_num_batched_tokens:,} tokens; kernel {engine.attention}",
        f"as: {engine.command}",
    ]


def _verdicts(plan: ServePlan) -> list[str]:
    """Fit and room, one sentence each."""
    memory = plan.memory
    share = f"{format_bytes(memory.total)} of {format_bytes(memory.usable)} usable"
    cost = _cost(plan)
    over = f"{format_bytes(memory.total - memory.usable)} too much"
    return [
        f"fits: {share}" if memory.fits else f"DOES NOT FIT: {share}, {over}",
        f"cache: {format_bytes(memory.bytes_per_token)} per token and chip, "
        f"{format_bytes(memory.bytes_per_sequence)} a sequence of {plan.engine.max_model_len:,} "
        f"tokens; the engine's holds {memory.cache_tokens:,} tokens, {memory.sequences:.1f} such "
        "sequences",
        f"the largest cache that would fit: {format_bytes(memory.most_cache)}, "
        f"{memory.most_tokens:,} tokens, {memory.most_sequences:.1f} such sequences",
        *([cost] if cost else []),
    ]


def _cost(plan: ServePlan) -> str | None:
    """The least that tokens cost, and what is assumed for that; None without a price."""
    price = plan.price
    outputs = [p.per_million_tokens for p in plan.decode if p.per_million_tokens is not None]
    prompts = [p.per_million_tokens for p in plan.prompts if p.per_million_tokens is not None]
    if price is None or not outputs or not prompts:
        return None
    return (
        f"at best {min(outputs):,.4g} {price.currency} per million output tokens, while all "
        f"sequences of the batch decode, and {min(prompts):,.4g} {price.currency} per million "
        f"prompt tokens (at {price.chip_hour:g} {price.currency} per chip-hour, without idle time)"
    )


def _figures(plan: ServePlan) -> list[tuple[str, str]]:
    memory, best = plan.memory, 0.0
    share = f"{memory.total / memory.usable:.0%} of {format_bytes(memory.usable)}"
    found = [("fits" if memory.fits else "DOES NOT FIT", share)]
    if plan.decode:
        first = plan.decode[0]
        best = max(point.tokens_per_second_per_chip for point in plan.decode)
        found.append((f"between tokens, batch {first.batch}", format_seconds(first.seconds)))
    return [
        *found,
        ("full sequences in the cache", f"{memory.sequences:.1f}"),
        ("cache per token and chip", format_bytes(memory.bytes_per_token)),
        ("tokens/s/chip at best", f"{best:,.0f}"),
    ]


def _sections(plan: ServePlan) -> Iterator[Section]:
    yield _memory(plan)
    cache = _cache(plan.memory)
    yield Section(title="Cache", blocks=[cache])
    yield _decode(plan)
    yield _prompts(plan)
    if plan.itl_seconds is not None:
        yield _largest(plan, plan.itl_seconds)
    yield Section(title="The engine", blocks=[Lines(lines=_facts(plan), medium="page")])
    if plan.buckets:
        yield _programs(plan)
    yield Section(title="Notes", blocks=[Lines(lines=plan.notes, prefix="- ")])


def _memory(plan: ServePlan) -> Section:
    memory = plan.memory
    parts = [
        ("weights", memory.weights),
        ("cache", memory.cache),
        ("sampler and hidden states", memory.sampler),
        *([("states of linear layers", memory.states)] if memory.states else []),
        ("temporaries", memory.temporaries),
        ("programs", memory.code),
    ]
    bar = MemoryBar(name="engine", parts=parts, usable=memory.usable)
    blocks: list[MemoryChart | Table] = [MemoryChart(bars=[bar], whole=memory.usable)]
    if plan.advice:
        blocks.append(
            Table(
                title="The cheapest changes that would fit",
                head=("change", "flags", "memory"),
                rows=[(a.change, a.flags, format_bytes(a.bytes)) for a in plan.advice],
                medium="page",
            )
        )
    return Section(title="Does it fit?", heading="Memory of one chip", blocks=blocks)


def _cache(memory: MemoryReport) -> Table:
    return Table(
        head=("layers", "attention", "bytes per token", "pages", "pages of a full sequence"),
        rows=[
            (
                f"{group.layers}",
                "full" if group.window is None else f"window {group.window:,}",
                format_bytes(group.bytes_per_token),
                f"{group.pages:,}",
                f"{group.pages_per_sequence:,}",
            )
            for group in memory.groups
        ],
    )


def _decode(plan: ServePlan) -> Section:
    contexts = sorted({point.context for point in plan.decode})
    series = [
        (
            context,
            [(p.batch, p.seconds, p.least_seconds) for p in plan.decode if p.context == context],
        )
        for context in contexts
    ]
    parts = ("weights", "cache", "arithmetic", "links", "choosing")
    per_million = _per_million_head(plan)
    return Section(
        title="Time between tokens",
        lead="Every sequence of the batch is at the same context; at least: at published rates.",
        blocks=[
            Chart(draw=lambda: latency_picture(series, plan.itl_seconds)),
            Table(
                head=(
                    *("context", "batch", "time", "at least"),
                    *(Column(title=title, medium="page") for title in parts),
                    *("tokens/s/chip", *per_million, "waits for", "origin"),
                ),
                rows=[
                    (
                        f"{p.context:,}",
                        f"{p.batch:,}",
                        format_seconds(p.seconds),
                        format_seconds(p.least_seconds),
                        format_seconds(p.weights_seconds),
                        format_seconds(p.cache_seconds),
                        format_seconds(p.compute_seconds),
                        format_seconds(p.exchange_seconds),
                        format_seconds(p.sampling_seconds),
                        f"{p.tokens_per_second_per_chip:,.0f}",
                        *_per_million(plan, p.per_million_tokens),
                        _BOUNDS[p.bound],
                        p.origin,
                    )
                    for p in plan.decode
                ],
            ),
        ],
    )


def _prompts(plan: ServePlan) -> Section:
    per_million = _per_million_head(plan)
    head = (
        *("prompt", "steps", "time", "at least", "tokens/s/chip"),
        *(*per_million, "waits for", "origin"),
    )
    rows = [
        (
            f"{p.tokens:,}",
            f"{p.steps}",
            format_seconds(p.seconds),
            format_seconds(p.least_seconds),
            f"{p.tokens_per_second_per_chip:,.0f}",
            *_per_million(plan, p.per_million_tokens),
            _BOUNDS[p.bound],
            p.origin,
        )
        for p in plan.prompts
    ]
    return Section(
        title="Time to the first token",
        lead="Of a prompt that comes to an idle engine.",
        blocks=[Table(head=head, rows=rows)],
    )


def _largest(plan: ServePlan, limit: float) -> Section:
    rows = [
        (
            f"{one.context:,}",
            f"{one.batch:,}",
            format_seconds(one.seconds),
            f"{one.tokens_per_second_per_chip:,.0f}",
            *_per_million(plan, one.per_million_tokens),
            _LIMITS[one.limited_by],
        )
        for one in plan.largest
    ]
    per_million = _per_million_head(plan)
    head = ("context", "batch", "time", "tokens/s/chip", *per_million, "limited by")
    return Section(
        title=f"The largest batch within {format_seconds(limit)} between tokens",
        blocks=[Table(head=head, rows=rows)],
    )


def _per_million_head(plan: ServePlan) -> tuple[str, ...]:
    return () if plan.price is None else (f"{plan.price.currency} per 1M tokens",)


def _per_million(plan: ServePlan, cost: float | None) -> tuple[str, ...]:
    if plan.price is None:
        return ()
    return ("-" if cost is None else f"{cost:,.4g}",)


def _programs(plan: ServePlan) -> Section:
    rows = [
        (
            one.program,
            f"{one.size:,}",
            format_seconds(one.seconds),
            format_seconds(one.predicted_seconds),
            format_bytes(one.temporaries),
            format_bytes(one.code),
            f"{format_seconds(one.lower_seconds)} + {format_seconds(one.compile_seconds)}",
        )
        for one in plan.buckets
    ]
    head = ("program", "size", "time", "closed form", "temporaries", "code", "trace + compile")
    exchanges = [
        f"{one.program} {one.size}: {', '.join(one.exchanges)}"
        for one in plan.buckets
        if one.exchanges
    ]
    blocks: list[Table | Lines] = [Table(head=head, rows=rows)]
    if exchanges:
        blocks.append(Lines(lines=exchanges))
    return Section(
        title="Compiled programs",
        lead="A step's time is that without attention.",
        blocks=blocks,
    )
