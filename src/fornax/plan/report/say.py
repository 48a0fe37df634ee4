"""The sentences that every form of a plan has."""

from fornax.plan.report.data import Money, Plan
from fornax.plan.report.gather import Exchange
from fornax.plan.report.words import count, nbytes, seconds, sides

__all__ = [
    "BOUNDS",
    "TITLES",
    "bound_words",
    "exchange_cells",
    "link_words",
    "paid",
    "too_large",
    "verdicts",
]

BOUNDS = {
    "compute": "arithmetic",
    "memory": "memory bandwidth",
    "ici": "links inside the slice",
    "dcn": "the network between slices or nodes",
    "host": "the link to the host",
}
"""What a step waits for, in words."""

_LINKS = {
    "gpu": {"ici": "nvlink", "dcn": "network"},
    "cpu": {"ici": "memory", "dcn": "memory", "nvlink": "memory", "network": "memory"},
}
_BOUNDS = {
    "gpu": {"ici": "NVLink inside a node", "dcn": "the network between nodes"},
    "cpu": {"ici": "exchanges between devices", "dcn": "exchanges between devices"},
}


def link_words(link: str, platform: str) -> str:
    """A link as it is called where it is."""
    return _LINKS.get(platform, {}).get(link, link)


def bound_words(bound: str, platform: str) -> str:
    """What a step waits for, in words."""
    return _BOUNDS.get(platform, {}).get(bound, BOUNDS[bound])


def exchange_cells(row: Exchange, platform: str) -> tuple[str, ...]:
    """Kind, axes, link, runs, bytes, time and exposed time of exchanges, for a table."""
    return (
        row.kind,
        sides(row.axes),
        link_words(row.link, platform),
        f"{row.count:,}",
        nbytes(row.moved),
        seconds(row.seconds),
        seconds(row.exposed_seconds),
    )


TITLES = {
    "replicated": "Large arrays that every chip holds whole",
    "collective": "Exchanges that no rule asks for",
}
"""Headings of what was found."""


def verdicts(plan: Plan) -> list[str]:
    """Speed and fit, one sentence each."""
    main, memory = plan.main, plan.main.memory
    bound = bound_words(main.bound, plan.hardware.platform)
    said = []
    if plan.speed:
        speed = plan.speed
        said.append(
            f"step {seconds(speed.step_seconds)}, MFU {speed.mfu:.1%} (executed {speed.hfu:.1%}), "
            f"{speed.tokens_per_second_per_chip:,.0f} tokens/s/chip, "
            f"{count(speed.tokens_per_day)} tokens/day; bound by {bound}"
        )
    else:
        said.append(f"{main.name} {seconds(main.step_seconds)}; bound by {bound}")
    said.append(
        f"between {seconds(main.optimistic_seconds)} with all communication hidden and "
        f"{seconds(main.pessimistic_seconds)} with none"
    )
    share = memory.total / memory.usable if memory.usable else 0.0
    figures = f"{nbytes(memory.total)} of the {nbytes(memory.usable)} usable ({share:.0%})"
    if memory.fits:
        said.append(f"fits: {figures}")
    else:
        said.append(f"DOES NOT FIT: {figures}, {nbytes(memory.over)} too much")
    if memory.host:
        said.append(f"and {nbytes(memory.host)} a chip in the host's memory")
    return said


def paid(money: Money) -> str:
    """What it costs, in a sentence."""
    unit = money.currency
    length = seconds(money.days * 86_400)
    return (
        f"{money.per_day:,.0f} {unit} a day, {money.per_billion_tokens:,.2f} {unit} for 1e9 "
        f"tokens, {money.whole_run:,.0f} {unit} for the whole run of {length} "
        f"(at {money.per_chip_hour:g} {unit} a chip-hour)"
    )


def too_large(plan: Plan) -> str | None:
    """By how much a plan does not fit and what would mend it, in a paragraph; None if it fits."""
    misfits = [program for program in plan.programs if not program.memory.fits]
    if not misfits:
        return None
    worst = max(misfits, key=lambda program: program.memory.over)
    memory = worst.memory
    text = (
        f"{plan.name} does not fit {plan.hardware.topology}: the {worst.name} needs "
        f"{nbytes(memory.total)} of each chip's {nbytes(memory.usable)} usable memory, "
        f"{nbytes(memory.over)} too much; "
    )
    if not plan.advice:
        return (
            f"{text}no change of the config that was tried makes it fit; use a smaller batch_size "
            "or more chips"
        )
    changes = (
        f"({number}) {one.change}{f', {one.flags}' if one.flags else ''}: "
        f"{nbytes(one.total_bytes)}, {seconds(one.step_seconds)} a step"
        for number, one in enumerate(plan.advice, 1)
    )
    return text + "the cheapest changes that would fit, by estimate: " + "; ".join(changes)
