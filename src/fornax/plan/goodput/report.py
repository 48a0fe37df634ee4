"""A goodput plan on a terminal and as JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fornax.config import to_mapping
from fornax.plan.format import format_count, format_plural, format_seconds
from fornax.plan.goodput.inputs import KINDS, Kind, Policy, RunSpec
from fornax.plan.goodput.search import GoodputPlan, Outcome
from fornax.plan.goodput.simulate import CAUSES
from fornax.plan.report.document import Document, Lines, Section, Table, write_figures
from fornax.plan.report.terminal import print_document

__all__ = ["print_goodput", "write_goodput"]

FORMAT = 2
_CAUSES = {
    "step": "steps that were kept",
    "save": "standing still for snapshots that were kept",
    "detection": "until a failure is noticed",
    "waiting": "for a spare",
    "recovery": "forming a new group",
    "restore": "reading the state",
    "compile": "compiling the step in a new group",
    "lost": "steps and snapshots that a failure undid",
}
_KINDS: dict[Kind, str] = {
    "process": "a worker process",
    "host": "a host",
    "slice": "all hosts of a slice",
    "restart": "every process, hosts and disks stay",
}


def write_goodput(plan: GoodputPlan, path: Path) -> Path:
    """Write every figure to `path` in one replacement: seconds, bytes, bytes/s, shares.

    Raises:
      ConfigError: when the file cannot be written.
    """
    return write_figures({"format": FORMAT, **to_mapping(plan)}, path)


def print_goodput(plan: GoodputPlan, sources: Mapping[str, str]) -> None:
    """Print the plan; `sources` says of each input where its value is from."""
    print_document(_document(plan, sources))


def _document(plan: GoodputPlan, sources: Mapping[str, str]) -> Document:
    run, chosen = plan.run, plan.chosen
    return Document(
        title=f"{format_plural(run.hosts, 'host')} in {format_plural(run.slices, 'slice')}",
        place=f", a step of {format_seconds(run.step)}, a state of {format_count(run.state, 'B')}",
        page_title="",
        subtitle="",
        how=f"Simulated, not measured: {plan.seeds} runs of {format_seconds(plan.horizon)} with "
        "random failures.",
        facts=[f"{key.replace('_', '-')}: {value}" for key, value in sources.items()],
        verdicts=_verdicts(plan),
        figures=(),
        sections=[
            Section(title="Where the time goes", blocks=[_causes(chosen)]),
            Section(title="Failures", blocks=[_failures(run, chosen)]),
            Section(
                title="Tiers, each set at its best interval",
                lead="The simplest set within 0.05 points of the best is taken.",
                blocks=[_outcomes(run, plan.tier_sets)],
            ),
            Section(
                title="The interval",
                lead=f"Young's formula says {format_seconds(plan.young)}.",
                blocks=[_outcomes(run, plan.intervals)],
            ),
            Section(
                title="Spares",
                lead="Taken is what is best of the hosts that are paid for, spares included.",
                blocks=[_spares(plan.spares)],
            ),
            Section(title="Why", blocks=[Lines(lines=_reasons(plan), prefix="- ")]),
        ],
    )


def _verdicts(plan: GoodputPlan) -> list[str]:
    run, chosen = plan.run, plan.chosen
    policy = chosen.policy
    goodput = chosen.goodput
    return [
        f"recommended: {' + '.join(policy.every)}; {format_plural(policy.spares, 'spare host')}; a "
        f"snapshot every {format_plural(policy.steps, 'step')} "
        f"({format_seconds(policy.steps * run.step)})",
        f"goodput: {_percent(goodput.mean)}, 95 % interval {_percent(goodput.low)} to "
        f"{_percent(goodput.high)}; closed form with spares always there "
        f"{_percent(chosen.closed_form)}; of the hosts that are paid for "
        f"{_percent(chosen.effective)}",
    ]


def _causes(outcome: Outcome) -> Table:
    rows = [(_percent(outcome.causes[cause]), cause, _CAUSES[cause]) for cause in CAUSES]
    return Table(head=("share", "cause", ""), rows=rows)


def _failures(run: RunSpec, outcome: Outcome) -> Table:
    rows = [
        (format_seconds(1 / run.rates[kind]), _KINDS[kind], outcome.tiers[kind] or "nothing")
        for kind in KINDS
        if run.rates.get(kind)
    ]
    return Table(head=("one each", "what fails", "restored from"), rows=rows)


def _outcomes(run: RunSpec, outcomes: Sequence[Outcome]) -> Table:
    rows = [
        (
            _percent(one.goodput.mean),
            f"± {50 * (one.goodput.high - one.goodput.low):.2f}",
            _percent(one.closed_form),
            format_seconds(one.policy.steps * run.step),
            _percent(one.causes["save"]),
            _percent(one.causes["lost"]),
            _every(run, one.policy),
        )
        for one in outcomes
    ]
    head = ("goodput", "95 %", "closed form", "interval", "save", "lost", "tiers")
    return Table(head=head, rows=rows)


def _spares(outcomes: Sequence[Outcome]) -> Table:
    rows = [
        (
            f"{one.policy.spares:,}",
            _percent(one.goodput.mean),
            f"± {50 * (one.goodput.high - one.goodput.low):.2f}",
            _percent(one.effective),
            _percent(one.causes["waiting"]),
        )
        for one in outcomes
    ]
    return Table(head=("spares", "goodput", "95 %", "of paid hosts", "waiting"), rows=rows)


def _reasons(plan: GoodputPlan) -> list[str]:
    run, policy = plan.run, plan.chosen.policy
    per_host = run.state / run.hosts
    best, least = max(plan.intervals, key=lambda one: one.goodput.mean), plan.tier_sets[0]
    held = 4 if "peer" in policy.every else 2
    memory = (
        [
            f"each host holds {format_count(held * per_host, 'B')} of snapshots in memory: two of "
            "its own" + (" and two of another's" if held == 4 else "")
        ]
        if "memory" in policy.every
        else []
    )
    return [
        f"a failure every {format_seconds(run.mtbf)}; training stands still for "
        f"{format_seconds(run.copy_seconds)} per snapshot, {format_count(per_host, 'B')} per host",
        f"a snapshot is whole {', '.join(_written(run, policy))} later",
        *memory,
        *(_against_store(plan, best, least) if set(least.policy.every) == {"store"} else ()),
    ]


def _against_store(plan: GoodputPlan, best: Outcome, store: Outcome) -> list[str]:
    """With spares always there, as the table of tiers has it."""
    alone, minute = store.goodput.mean, plan.minutely.goodput.mean
    verdict = "win" if minute > alone else "lose" if minute < alone else "are as good"
    reached = f"with spares always there these tiers reach {_percent(best.goodput.mean)}"
    return [
        *([f"{reached}, the store alone {_percent(alone)}"] if len(best.policy.every) > 1 else ()),
        f"snapshots in memory each minute {verdict}: {_percent(minute)} against {_percent(alone)} "
        "of the store alone",
    ]


def _written(run: RunSpec, policy: Policy) -> list[str]:
    return [
        f"{name} {format_seconds(run.tier(name).write_seconds)}"
        for name in policy.every
        if name != "memory"
    ]


def _every(run: RunSpec, policy: Policy) -> str:
    cycle = policy.steps * run.step + run.copy_seconds
    return ", ".join(
        name if count == 1 else f"{name} every {format_seconds(count * cycle)}"
        for name, count in policy.every.items()
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
