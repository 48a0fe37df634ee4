"""A plan as one self-contained page, in the look of the other reports."""

from collections.abc import Iterable
from pathlib import Path

from markupsafe import Markup

from fornax.plan.report.data import Plan
from fornax.plan.report.file import make_folder
from fornax.plan.report.gather import exchanges
from fornax.plan.report.pictures import memory_picture, roofline_picture
from fornax.plan.report.program import ProgramReport
from fornax.plan.report.say import TITLES, bound_words, exchange_cells, verdicts
from fornax.plan.report.words import count, nbytes, rate, seconds, sides, where
from fornax.train.report import Section, bullets, render, table

__all__ = ["write_page"]


def write_page(plan: Plan, path: Path) -> Path:
    """Write the page to `path`; it fetches nothing.

    Raises:
      ConfigError: when the file cannot be written.
    """
    make_folder(path)
    return render(
        path,
        title=f"{plan.name} on {plan.hardware.topology}",
        subtitle=f"fornax plan. {plan.how}",
        figures=_figures(plan),
        sections=list(_sections(plan)),
    )


def _figures(plan: Plan) -> list[tuple[str, str]]:
    main, memory = plan.main, plan.main.memory
    share = memory.total / memory.usable if memory.usable else 0.0
    found = [("predicted step", seconds(main.step_seconds))]
    if plan.speed:
        found += [
            ("model FLOPs utilisation", f"{plan.speed.mfu:.1%}"),
            ("tokens/s/chip", f"{plan.speed.tokens_per_second_per_chip:,.0f}"),
            ("tokens a day", count(plan.speed.tokens_per_day)),
        ]
    found += [
        ("bound by", bound_words(main.bound, plan.hardware.platform)),
        ("fits" if plan.fits else "DOES NOT FIT", f"{share:.0%} of {nbytes(memory.usable)}"),
    ]
    if plan.money:
        found.append(("a day", f"{plan.money.per_day:,.0f} {plan.money.currency}"))
    return found


def _sections(plan: Plan) -> Iterable[Section]:
    main = plan.main
    yield _memory_section(plan)
    if main.work:
        yield _roofline_section(plan)
    if main.collectives:
        yield _communication_section(main, plan.hardware.platform)
    yield from _findings_sections(main)
    if plan.options or plan.searched:
        yield _options_section(plan)
    for extra in plan.tables:
        yield Section(title=extra.title, lead=extra.lead, body=table(extra.head, extra.rows))
    yield _run_section(plan)
    if len(plan.programs) > 1 or main.compilation:
        yield _programs_section(plan)
    notes = dict.fromkeys([*plan.notes, *(n for p in plan.programs for n in p.notes)])
    if notes:
        yield Section(title="Notes", body=bullets(notes))


def _memory_section(plan: Plan) -> Section:
    memory = plan.main.memory
    body = memory_picture(plan.programs)
    if memory.buffers:
        body += Markup("<h3>The largest at the peak</h3>") + table(
            ("bytes", "padded", "owner", "shape", "array", "made at"),
            [
                (
                    nbytes(buffer.bytes),
                    f"x{buffer.padding:.2f}" if buffer.padding > 1.005 else "no",
                    buffer.owner,
                    buffer.shape,
                    buffer.name,
                    where(buffer.source),
                )
                for buffer in memory.buffers
            ],
        )
    if plan.advice:
        body += Markup("<h3>The cheapest changes that would fit</h3>") + table(
            ("change", "flags", "memory", "step"),
            [
                (one.change, one.flags, nbytes(one.total_bytes), seconds(one.step_seconds))
                for one in plan.advice
            ],
        )
    fit = verdicts(plan)[2]
    return Section(title="Does it fit?", lead=f"{fit[0].upper()}{fit[1:]}.", body=body)


def _roofline_section(plan: Plan) -> Section:
    main, hardware = plan.main, plan.hardware
    whole = sum(work.seconds for work in main.work) or 1.0
    rows = [
        (
            work.name.replace("_", " "),
            count(work.flops),
            nbytes(work.bytes),
            f"{work.intensity:,.1f}" if work.flops else "—",
            rate(work.flops / work.seconds) if work.flops and work.seconds else "—",
            seconds(work.seconds),
            f"{work.seconds / whole:.1%}",
            work.bound,
        )
        for work in sorted(main.work, key=lambda work: -work.seconds)
    ]
    head = ("class", "FLOPs", "bytes", "FLOPs a byte", "FLOP/s", "time", "share", "bound by")
    return Section(
        title="What is the work?",
        lead=f"{count(main.flops, 'FLOPs')} and {nbytes(main.bytes)} of memory traffic a chip and "
        f"step, each loop counted as often as it runs. The chip does {rate(hardware.peak_flops)} "
        f"and moves {count(hardware.memory_bandwidth, 'B')}/s. Areas are shares of the time.",
        body=roofline_picture(main.work, hardware) + table(head, rows),
    )


def _communication_section(program: ProgramReport, platform: str) -> Section:
    rows = [exchange_cells(row, platform) for row in exchanges(program.collectives)]
    longest = sorted(program.collectives, key=lambda one: -one.seconds)[:12]
    each = [
        (
            one.kind,
            sides(one.axes),
            f"{one.count:,} x {nbytes(one.bytes)}",
            seconds(one.seconds),
            one.what,
            where(one.source),
        )
        for one in longest
    ]
    return Section(
        title="What is exchanged?",
        lead=f"{seconds(program.exposed_seconds)} of the step waits for other chips; the rest of "
        "the communication runs beside the arithmetic. Bytes are those of the whole gathered or "
        "reduced arrays.",
        body=table(("exchange", "over", "link", "times", "bytes", "time", "exposed"), rows)
        + Markup("<h3>The longest</h3>")
        + table(("exchange", "over", "runs", "time", "for", "asked for at"), each),
    )


def _findings_sections(program: ProgramReport) -> Iterable[Section]:
    for kind, title in TITLES.items():
        rows = [
            (
                nbytes(finding.bytes),
                seconds(finding.seconds) if finding.seconds else "—",
                finding.what,
                where(finding.source),
                finding.fix,
            )
            for finding in program.findings
            if finding.kind == kind
        ]
        if rows:
            yield Section(title=title, body=table(("bytes", "time", "what", "at", "fix"), rows))


def _options_section(plan: Plan) -> Section:
    rows = [
        (
            seconds(option.step_seconds),
            f"{option.tokens_per_second_per_chip:,.0f}",
            nbytes(option.total_bytes),
            "compiled" if option.compiled else "estimated",
            option.changes.strip() or "as given",
            option.reason,
        )
        for option in plan.options
    ]
    head = ("step", "tokens/s/chip", "memory", "by", "changes", "why")
    return Section(
        title="What a search found",
        lead=plan.searched,
        body=table(head, rows) if rows else Markup(),
    )


def _run_section(plan: Plan) -> Section:
    hardware, rows = plan.hardware, []
    if plan.run:
        run = plan.run
        rows += [
            ("parameters", f"{run.parameters:,} in {run.params_dtype}"),
            ("computed in", run.compute_dtype),
            ("a step", f"{run.batch_size:,} rows of {run.seq_len:,} tokens: {run.tokens:,}"),
            ("micro-batches", f"{run.accumulate}"),
            ("recomputation", run.remat),
            ("mesh", " ".join(f"{a}={n}" for a, n in run.mesh.items()) or "one device"),
            ("model FLOPs a step, all chips", count(run.model_flops, "FLOPs")),
            *(("kernel", choice) for choice in plan.kernels),
        ]
    rows += [
        ("topology", hardware.topology),
        ("chips", f"{hardware.chips:,} in {hardware.slices} slices on {hardware.hosts:,} hosts"),
        ("devices that JAX shows", f"{hardware.devices:,}"),
        ("memory of a chip", nbytes(hardware.memory_bytes)),
        ("peak of a chip", f"{rate(hardware.peak_flops)} in {hardware.peak_dtype}"),
    ]
    if plan.money:
        money = plan.money
        rows += [
            ("price", f"{money.per_chip_hour:g} {money.currency} a chip-hour (yours)"),
            ("1e9 tokens", f"{money.per_billion_tokens:,.2f} {money.currency}"),
            (
                "the whole run",
                f"{money.whole_run:,.0f} {money.currency}, {seconds(money.days * 86_400)}",
            ),
        ]
    body = table(("", ""), rows)
    if hardware.sources:
        cited = table(("figure", "published in"), sorted(hardware.sources.items()))
        body += Markup("<details><summary>Where the hardware's figures come from</summary>{}"
                       "</details>").format(cited)  # fmt: skip
    return Section(title="What would run, and on what", body=body)


def _programs_section(plan: Plan) -> Section:
    rows = []
    for program in plan.programs:
        made = program.compilation
        rows.append(
            (
                program.name,
                nbytes(program.memory.total),
                count(program.flops),
                seconds(program.step_seconds),
                f"{seconds(made.lower_seconds)} + {seconds(made.compile_seconds)}" if made else "—",
                nbytes(made.code_bytes) if made else "—",
                nbytes(made.hlo_bytes) if made else "—",
            )
        )
    made = plan.main.compilation
    versions = ", ".join(f"{k} {v}" for k, v in made.versions.items()) if made else ""
    return Section(
        title="Programs",
        lead=f"Compiled with {versions}." if versions else "",
        body=table(
            ("program", "memory", "FLOPs", "time", "trace + compile", "code", "HLO text"), rows
        ),
    )
