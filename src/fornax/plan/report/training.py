"""The report of a training plan."""

from collections.abc import Iterable, Iterator

from fornax.plan.facts import CollectiveTime, Money, Plan, ProgramReport, Round, Run
from fornax.plan.format import (
    format_axes,
    format_bound,
    format_bytes,
    format_count,
    format_plural,
    format_seconds,
    short_source,
)
from fornax.plan.report.charts import roofline_picture
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

_PLATFORM_LINKS = {
    "gpu": {"ici": "nvlink", "dcn": "network"},
    "cpu": {"ici": "memory", "dcn": "memory", "nvlink": "memory", "network": "memory"},
}
_FINDINGS = {
    "replicated": "Large arrays that every chip holds whole",
    "collective": "Exchanges that no rule asks for",
}
_MOST_ROWS = 8
_MOST_COLLECTIVES = 12


def too_large(plan: Plan) -> str | None:
    """By how much a plan does not fit and what would fix it, in a paragraph; None if it fits."""
    misfits = [program for program in plan.programs if not program.memory.fits]
    if not misfits:
        return None
    worst = max(misfits, key=lambda program: program.memory.over)
    memory = worst.memory
    text = (
        f"{plan.name} does not fit {plan.hardware.topology}: the {worst.name} needs "
        f"{format_bytes(memory.total)} of each chip's {format_bytes(memory.usable)} usable memory, "
        f"{format_bytes(memory.over)} too much; "
    )
    if not plan.advice:
        return (
            f"{text}no change of the config that was tried makes it fit; use a smaller batch_size "
            "or more chips"
        )
    changes = (
        f"({number}) {one.change}{f', {one.flags}' if one.flags else ''}: "
        f"{format_bytes(one.total_bytes)}, {format_seconds(one.step_seconds)} per step"
        for number, one in enumerate(plan.advice, 1)
    )
    return text + "the cheapest changes that would fit, by estimate: " + "; ".join(changes)


def training_document(plan: Plan) -> Document:
    """The report of a training plan."""
    hardware = plan.hardware
    slices = f"{hardware.slices} slices, " if hardware.slices > 1 else ""
    chips, hosts = format_plural(hardware.chips, "chip"), format_plural(hardware.hosts, "host")
    run = [_run_sentence(plan.run)] if plan.run else []
    return Document(
        title=plan.name,
        place=f" on {hardware.topology}: {slices}{chips}, {hosts}",
        page_title=f"{plan.name} on {hardware.topology}",
        subtitle=f"fornax plan. {plan.how}",
        how=plan.how,
        facts=[*run, *(f"kernel {choice}" for choice in plan.kernels)],
        verdicts=[*_verdicts(plan), *([_price(plan.money)] if plan.money else [])],
        figures=_figures(plan),
        sections=list(_sections(plan)),
    )


def _run_sentence(run: Run) -> str:
    micro = f" in {run.accumulate} micro-batches" if run.accumulate > 1 else ""
    return (
        f"{format_count(run.parameters)} parameters in {run.params_dtype}, computed in "
        f"{run.compute_dtype}; {run.batch_size:,} rows of {run.seq_len:,} tokens per step{micro}; "
        f"mesh {_mesh(run)}; remat {run.remat}"
    )


def _mesh(run: Run) -> str:
    return " ".join(f"{axis}={size}" for axis, size in run.mesh.items()) or "one device"


def _verdicts(plan: Plan) -> Iterator[str]:
    """Speed and fit, one sentence each."""
    main, memory, speed = plan.main, plan.main.memory, plan.speed
    bound = format_bound(main.bound, plan.hardware.platform)
    if speed:
        rates = (
            f"{speed.tokens_per_second_per_chip:,.0f} tokens/s/chip, "
            f"{format_count(speed.tokens_per_day)} tokens/day"
        )
        own = f", {rates}" if plan.round is None else ""
        yield (
            f"step {format_seconds(main.step_seconds)}, MFU {speed.mfu:.1%} (executed "
            f"{speed.hfu:.1%}){own}; bound by {bound}"
        )
        if plan.round:
            yield f"{_round_sentence(plan.round)}; {rates}"
    else:
        yield f"{main.name} {format_seconds(main.step_seconds)}; bound by {bound}"
    yield (
        f"between {format_seconds(main.optimistic_seconds)} with all communication hidden and "
        f"{format_seconds(main.pessimistic_seconds)} with none"
    )
    share = memory.total / memory.usable if memory.usable else 0.0
    usable = f"{format_bytes(memory.usable)} usable ({share:.0%})"
    figures = f"{format_bytes(memory.total)} of the {usable}"
    if memory.fits:
        yield f"fits: {figures}"
    else:
        yield f"DOES NOT FIT: {figures}, {format_bytes(memory.over)} too much"
    if memory.host:
        yield f"and {format_bytes(memory.host)} per chip in the host's memory"


def _round_sentence(found: Round) -> str:
    scored = f"{format_seconds(found.score_seconds)} to score them, " * (found.score_seconds > 0)
    steps = format_plural(found.steps, "step")
    return (
        f"round {format_seconds(found.seconds)}: {format_seconds(found.sample_seconds)} to draw "
        f"{found.completions:,} completions, {scored}{format_seconds(found.train_seconds)} in "
        f"{steps}"
    )


def _price(money: Money) -> str:
    unit, whole = money.currency, ""
    if money.whole_run is not None and money.days is not None:
        length = format_seconds(money.days * 86_400)
        whole = f", {money.whole_run:,.0f} {unit} for the whole run of {length}"
    return (
        f"{money.per_day:,.0f} {unit} per day, {money.per_billion_tokens:,.2f} {unit} for 1e9 "
        f"tokens{whole} (at {money.per_chip_hour:g} {unit} per chip-hour)"
    )


def _figures(plan: Plan) -> list[tuple[str, str]]:
    main, memory = plan.main, plan.main.memory
    share = memory.total / memory.usable if memory.usable else 0.0
    found = [("predicted step", format_seconds(main.step_seconds))]
    if plan.speed:
        found += [
            ("model FLOPs utilisation", f"{plan.speed.mfu:.1%}"),
            ("tokens/s/chip", f"{plan.speed.tokens_per_second_per_chip:,.0f}"),
            ("tokens per day", format_count(plan.speed.tokens_per_day)),
        ]
    fits = "fits" if plan.fits else "DOES NOT FIT"
    found += [
        ("bound by", format_bound(main.bound, plan.hardware.platform)),
        (fits, f"{share:.0%} of {format_bytes(memory.usable)}"),
    ]
    if plan.money:
        found.append(("a day", f"{plan.money.per_day:,.0f} {plan.money.currency}"))
    return found


def _sections(plan: Plan) -> Iterator[Section]:
    yield _memory(plan)
    if plan.main.work:
        yield _work(plan)
    if plan.main.collectives:
        yield _communication(plan.main, plan.hardware.platform)
    yield from _findings(plan.main)
    if plan.options or plan.searched:
        yield _search(plan)
    yield _run(plan)
    if len(plan.programs) > 1 or plan.main.compilation:
        yield _programs(plan)
    notes = dict.fromkeys([*plan.notes, *(n for p in plan.programs for n in p.notes)])
    if notes:
        yield Section(title="Notes", blocks=[Lines(lines=list(notes), prefix="- ")])


def _memory(plan: Plan) -> Section:
    memory, several = plan.main.memory, len(plan.programs) > 1
    bars = [
        MemoryBar(
            name=program.name,
            parts=[(part.owner, part.bytes) for part in program.memory.parts],
            usable=program.memory.usable,
        )
        for program in plan.programs
    ]
    blocks: list[MemoryChart | Table] = [MemoryChart(bars=bars, whole=memory.total)]
    if memory.buffers:
        blocks.append(_buffers(plan.main))
    if plan.advice:
        rows = [
            (a.change, a.flags, format_bytes(a.total_bytes), format_seconds(a.step_seconds))
            for a in plan.advice
        ]
        blocks.append(
            Table(
                title="The cheapest changes that would fit",
                head=("change", "flags", "memory", "step"),
                rows=rows,
                medium="page",
            )
        )
    return Section(
        title="Does it fit?",
        heading="Memory of one chip" + (f", {plan.main.name}" if several else ""),
        blocks=blocks,
    )


def _buffers(program: ProgramReport) -> Table:
    """A terminal has room for the name or the line that made it."""
    sources = any(buffer.source for buffer in program.memory.buffers)
    rows = [
        (
            format_bytes(buffer.bytes),
            f"x{buffer.padding:.2f}" if buffer.padding > 1.005 else "no",
            buffer.owner,
            buffer.shape,
            buffer.name,
            short_source(buffer.source),
        )
        for buffer in program.memory.buffers
    ]
    return Table(
        title="The largest at the peak",
        head=(
            "bytes",
            "padded",
            "owner",
            Column(title="shape", width=20),
            Column(title="array", width=42, medium="page" if sources else "both"),
            Column(title="made at", width=42),
        ),
        rows=rows,
        most=_MOST_ROWS,
    )


def _work(plan: Plan) -> Section:
    main, hardware = plan.main, plan.hardware
    whole = sum(work.seconds for work in main.work) or 1.0
    rows = [
        (
            work.name.replace("_", " "),
            format_count(work.flops),
            format_bytes(work.bytes),
            f"{work.intensity:,.1f}" if work.flops else "—",
            _rate(work.flops / work.seconds) if work.flops and work.seconds else "—",
            format_seconds(work.seconds),
            f"{work.seconds / whole:.1%}",
            work.bound,
        )
        for work in sorted(main.work, key=lambda work: -work.seconds)
    ]
    total = (format_count(main.flops), format_bytes(main.bytes), "", "", format_seconds(whole))
    bandwidth = format_count(hardware.memory_bandwidth, "B")
    return Section(
        title="What is the work?",
        heading="Work of a step, one chip",
        lead=f"{format_count(main.flops, 'FLOPs')} and {format_bytes(main.bytes)} of memory "
        "traffic per chip and step, each loop counted as often as it runs. The chip does "
        f"{_rate(hardware.peak_flops)} and moves {bandwidth}/s.",
        blocks=[
            Chart(draw=lambda: roofline_picture(main.work, hardware)),
            Table(
                head=("class", "FLOPs", "bytes", "FLOP/B", "FLOP/s", "time", "share", "bound by"),
                rows=[*rows, ("all", *total, "", "")],
                total=True,
            ),
        ],
    )


def _rate(flops_per_second: float) -> str:
    return format_count(flops_per_second, "FLOP/s")


def _communication(program: ProgramReport, platform: str) -> Section:
    longest = sorted(program.collectives, key=lambda one: -one.seconds)[:_MOST_COLLECTIVES]
    each = [
        (
            one.kind,
            format_axes(one.axes),
            f"{one.count:,} x {format_bytes(one.bytes)}",
            format_seconds(one.seconds),
            one.what,
            short_source(one.source),
        )
        for one in longest
    ]
    return Section(
        title="What is exchanged?",
        heading="Communication of a step, one chip",
        lead=f"{format_seconds(program.exposed_seconds)} of the step waits for other chips; the "
        "rest of the communication overlaps with the arithmetic. Bytes are those of the whole "
        "gathered or reduced arrays.",
        blocks=[
            Table(
                head=("exchange", "over", "link", "times", "bytes", "time", "exposed"),
                rows=list(_grouped(program.collectives, platform)),
            ),
            Table(
                title="The longest",
                head=("exchange", "over", "runs", "time", "for", "asked for at"),
                rows=each,
                medium="page",
            ),
        ],
    )


def _grouped(collectives: Iterable[CollectiveTime], platform: str) -> Iterator[tuple[str, ...]]:
    """A row for all exchanges of one kind over the same axes and link, most time first."""
    groups: dict[tuple[str, tuple[str, ...], str], list[CollectiveTime]] = {}
    for one in collectives:
        groups.setdefault((one.kind, one.axes, one.link), []).append(one)
    rows = [(key, sum(one.seconds for one in members), members) for key, members in groups.items()]
    for (kind, axes, link), seconds, members in sorted(
        rows, key=lambda row: (-row[1], row[0][0], row[0][1])
    ):
        yield (
            kind,
            format_axes(axes),
            _PLATFORM_LINKS.get(platform, {}).get(link, link),
            f"{sum(one.count for one in members):,}",
            format_bytes(sum(one.moved for one in members)),
            format_seconds(seconds),
            format_seconds(sum(one.exposed_seconds for one in members)),
        )


def _findings(program: ProgramReport) -> Iterator[Section]:
    for kind, title in _FINDINGS.items():
        lines = []
        for finding in program.findings:
            if finding.kind == kind:
                place = f" at {short_source(finding.source)}" if finding.source else ""
                cost = f", {format_seconds(finding.seconds)}" if finding.seconds else ""
                fix = f": {finding.fix}" if finding.fix else ""
                lines.append(f"{format_bytes(finding.bytes)}{cost}  {finding.what}{place}{fix}")
        if lines:
            yield Section(title=title, blocks=[Lines(lines=lines, most=_MOST_ROWS)])


def _search(plan: Plan) -> Section:
    lines = [
        f"{number}. {format_seconds(option.step_seconds)} per step, "
        f"{option.tokens_per_second_per_chip:,.0f} tokens/s/chip, "
        f"{format_bytes(option.total_bytes)} ({'compiled' if option.compiled else 'estimated'}): "
        f"{option.changes.strip() or 'as given'}. {option.reason}"
        for number, option in enumerate(plan.options, 1)
    ]
    blocks = [Lines(lines=lines)]
    return Section(title="What a search found", heading="Search", lead=plan.searched, blocks=blocks)


def _run(plan: Plan) -> Section:
    hardware, rows = plan.hardware, []
    if plan.run:
        run = plan.run
        rows += [
            ("parameters", f"{run.parameters:,} in {run.params_dtype}"),
            ("computed in", run.compute_dtype),
            ("a step", f"{run.batch_size:,} rows of {run.seq_len:,} tokens: {run.tokens:,}"),
            ("micro-batches", f"{run.accumulate}"),
            ("recomputation", run.remat),
            ("mesh", _mesh(run)),
            ("model FLOPs per step, all chips", format_count(run.model_flops, "FLOPs")),
            *(("kernel", choice) for choice in plan.kernels),
        ]
    rows += [
        ("topology", hardware.topology),
        ("chips", f"{hardware.chips:,} in {hardware.slices} slices on {hardware.hosts:,} hosts"),
        ("devices that JAX shows", f"{hardware.devices:,}"),
        ("memory of a chip", format_bytes(hardware.memory_bytes)),
        ("peak of a chip", f"{_rate(hardware.peak_flops)} in {hardware.peak_dtype}"),
    ]
    blocks = [Table(head=("", ""), rows=rows, medium="page")]
    if hardware.sources:
        blocks.append(
            Table(
                head=("figure", "published in"),
                rows=sorted(hardware.sources.items()),
                fold="Where the hardware's figures come from",
                medium="page",
            )
        )
    return Section(title="What would run, and on what", blocks=blocks)


def _programs(plan: Plan) -> Section:
    rows = []
    for program in plan.programs:
        made = program.compilation
        rows.append(
            (
                program.name,
                format_bytes(program.memory.total),
                "yes" if program.memory.fits else "NO",
                format_count(program.flops),
                format_seconds(program.step_seconds),
                format_seconds(program.exposed_seconds),
                program.bound,
                f"{format_seconds(made.lower_seconds)} + {format_seconds(made.compile_seconds)}"
                if made
                else "—",
                format_bytes(made.code_bytes) if made else "—",
                format_bytes(made.hlo_bytes) if made else "—",
            )
        )
    page_only = [
        Column(title=title, medium="page") for title in ("trace + compile", "code", "HLO text")
    ]
    head = ("program", "memory", "fits", "FLOPs", "time", "exposed", "bound by", *page_only)
    lead = _compilation(plan.main)
    return Section(title="Programs", lead=lead, blocks=[Table(head=head, rows=rows)])


def _compilation(program: ProgramReport) -> str:
    made = program.compilation
    if made is None:
        return ""
    when = " (kept from an earlier plan)" if made.cached else ""
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    return (
        f"traced in {format_seconds(made.lower_seconds)}, compiled in "
        f"{format_seconds(made.compile_seconds)}{when}; {format_bytes(made.code_bytes)} of code, "
        f"{format_bytes(made.hlo_bytes)} of HLO text" + (f"; {versions}" if versions else "")
    )
