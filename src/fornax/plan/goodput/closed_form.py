"""Goodput in closed form, for one failure at a time and spares that are always there."""

import math

from fornax.plan.goodput.inputs import KINDS, Kind, Name, Policy, RunSpec

__all__ = ["closed_form", "restoring_tier", "young_interval"]

_SURVIVORS: dict[Kind, tuple[Name, ...]] = {
    "process": ("memory", "peer", "disk", "store"),
    "host": ("peer", "store"),
    "slice": ("peer", "store"),
    "restart": ("disk", "store"),
}


def young_interval(copy_seconds: float, mtbf: float) -> float:
    """Seconds of work between snapshots that lose least: sqrt(2 C M) (Young 1974)."""
    return math.sqrt(2 * copy_seconds * mtbf)


def restoring_tier(run: RunSpec, policy: Policy, kind: Kind) -> tuple[Name | None, float, float]:
    """The tier that a failure of a kind is restored from, mean seconds lost, seconds to read.

    None when nothing survives: all is lost then, which the figures leave out.
    """
    cycle = policy.steps * run.step + run.copy_seconds
    found = []
    for name in _SURVIVORS[kind]:
        alone = name == "peer" and (run.hosts == 1 or (kind == "slice" and run.slices == 1))
        if name in policy.every and not alone:
            tier = run.tier(name)
            lost = policy.every[name] * cycle / 2 + tier.write_seconds
            found.append((lost + tier.read_seconds, name, lost, tier.read_seconds))
    if not found:
        return None, math.inf, 0.0
    _, name, lost, reading = min(found)
    return name, lost, reading


def closed_form(run: RunSpec, policy: Policy) -> float:
    """Share of the wall time that goes into steps that are kept.

    With one tier and one kind this is Daly's (2006) expected wall time for exponential failures,
    work / (M exp(R/M) (exp((work + C)/M) - 1)). Several kinds enter by their mean loss and
    downtime; a snapshot that a tier takes in the background is lost until it is whole.
    """
    work = policy.steps * run.step
    overhead = work / (work + run.copy_seconds)
    if math.isinf(run.mtbf):
        return overhead
    lost = down = 0.0
    for kind in KINDS:
        rate = run.rates.get(kind, 0.0)
        if rate:
            _, each, reading = restoring_tier(run, policy, kind)
            lost += rate * each
            down += rate * (run.detection + run.recovery + reading + run.compile)
    if 2 * lost > 700:
        return 0.0
    return overhead * (2 * lost / math.expm1(2 * lost) if lost else 1.0) * math.exp(-down)
