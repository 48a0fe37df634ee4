"""Tiers, interval and spares: the closed form proposes, the simulator decides."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from fornax.config import ConfigError
from fornax.plan.goodput.closed_form import closed_form, restoring_tier, young_interval
from fornax.plan.goodput.inputs import KINDS, TIERS, Kind, Name, Policy, RunSpec
from fornax.plan.goodput.simulate import CAUSES, Cause, Failure, draw_failures, simulate

__all__ = ["GoodputPlan", "Mean", "Outcome", "plan_goodput"]

TIER_SETS: tuple[tuple[Name, ...], ...] = (
    ("store",),
    ("disk", "store"),
    ("memory", "store"),
    ("memory", "peer", "store"),
    ("memory", "peer", "disk", "store"),
)
_MOST = 2_000_000
"""Failures of all simulated runs together."""
_CLOSE = 5e-4
"""Share of the wall time that a further tier has to win."""


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A mean share over seeds and the ends of its 95 % interval (Student's t), cut at 0 and 1."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a policy comes to."""

    policy: Policy
    goodput: Mean
    """Share of the wall time in steps that were kept."""
    effective: float
    """Mean goodput times the share of the hosts that are not spares: of what is paid for."""
    closed_form: float
    """Goodput where spares are always there."""
    causes: Mapping[Cause, float]
    """Mean share of the wall time by cause; they sum to 1."""
    tiers: Mapping[Kind, Name | None]
    """The tier that the closed form restores each kind of failure from."""


@dataclass(frozen=True, kw_only=True)
class GoodputPlan:
    """A recommendation and what it was chosen from."""

    run: RunSpec
    horizon: float
    seeds: int
    young: float
    """Seconds between snapshots by Young's formula."""
    chosen: Outcome
    tier_sets: Sequence[Outcome]
    """The best of each set of tiers, with spares as the closed form takes them."""
    intervals: Sequence[Outcome]
    """The chosen tiers at other intervals."""
    spares: Sequence[Outcome]
    """The chosen tiers and interval with more and more spares, until no more can pay."""
    minutely: Outcome
    """A snapshot in memory, at a peer and to the store as often as allowed, each minute."""


def plan_goodput(
    run: RunSpec,
    *,
    horizon: float,
    seeds: int,
    store_interval: float,
    tiers: tuple[Name, ...] | None = None,
    interval: float | None = None,
    spares: int | None = None,
) -> GoodputPlan:
    """Choose what is not given, by simulated goodput of the hosts that are paid for.

    Args:
      run: the run.
      horizon: seconds of wall time to simulate.
      seeds: runs to simulate; every policy meets the same failures.
      store_interval: fewest seconds between two snapshots in the store.
      tiers: use these.
      interval: seconds between snapshots; rounded to whole steps.
      spares: have this many.

    Raises:
      ConfigError: for tiers that cannot be had, and for more failures than can be simulated.
    """
    if seeds < 2:
        raise ConfigError(f"seeds={seeds} gives no interval; simulate 2 or more")
    if seeds * horizon / run.mtbf > _MOST:
        raise ConfigError(
            f"{seeds} runs of {horizon:g} s with a failure every {run.mtbf:.3g} s are more than "
            f"{_MOST:,} failures; look at the mean times between failures, or simulate less with "
            "--horizon and --seeds"
        )
    draws = [draw_failures(run, horizon, seed) for seed in range(seeds)]
    plenty = _plenty(run)

    def outcome(policy: Policy) -> Outcome:
        return _outcome(run, policy, draws, horizon)

    steps = None if interval is None else max(1, round(interval / run.step))
    sets = [_checked(run, tiers)] if tiers else [s for s in TIER_SETS if _possible(run, s)]
    found = [outcome(_best(run, each, store_interval, plenty, steps)) for each in sets]
    best = _simplest(found)
    near = [best]
    if steps is None:
        near = [outcome(p) for p in _neighbours(run, best.policy, store_interval)]
        best = max(near, key=lambda one: one.goodput.mean)
    if spares is None:
        counts = _with_spares(run, best, outcome)
    else:
        counts = [outcome(replace(best.policy, spares=spares))]
    minute = ("memory", "peer", "store") if run.hosts > 1 else ("memory", "store")
    return GoodputPlan(
        run=run,
        horizon=horizon,
        seeds=seeds,
        young=young_interval(run.copy_seconds, run.mtbf),
        chosen=max(counts, key=lambda one: one.effective),
        tier_sets=found,
        intervals=near,
        spares=counts,
        minutely=outcome(_best(run, minute, store_interval, plenty, max(1, round(60 / run.step)))),
    )


def _checked(run: RunSpec, tiers: tuple[Name, ...]) -> tuple[Name, ...]:
    if "store" not in tiers or not _possible(run, tiers):
        raise ConfigError(
            f"tiers={','.join(tiers)} cannot be had with {run.hosts} hosts; the store belongs to "
            "them, as nothing else survives everything, and a peer needs a second host and memory"
        )
    return tuple(name for name in TIERS if name in tiers)


def _possible(run: RunSpec, tiers: tuple[Name, ...]) -> bool:
    return "peer" not in tiers or (run.hosts > 1 and "memory" in tiers)


def _best(
    run: RunSpec, tiers: tuple[Name, ...], store_interval: float, spares: int, steps: int | None
) -> Policy:
    """The policy with these tiers whose closed form is best; `steps` where they are given."""
    young = young_interval(run.copy_seconds, run.mtbf) / run.step
    most = 1000 if math.isinf(young) else max(2.0, 4 * young)
    grid = {round(most ** (k / 60)) for k in range(61)} if steps is None else {steps}
    policies = [_policy(run, tiers, each, store_interval, spares) for each in sorted(grid)]
    return max(policies, key=lambda policy: closed_form(run, policy))


def _policy(
    run: RunSpec, tiers: tuple[Name, ...], steps: int, store_interval: float, spares: int
) -> Policy:
    """Each tier takes snapshots as often as it can write them, and one of them takes each."""
    shortest = {name: run.tier(name).write_seconds for name in tiers}
    shortest["store"] = max(shortest["store"], store_interval)
    least = (min(shortest.values()) - run.copy_seconds) / run.step
    steps = max(steps, math.ceil(least))
    cycle = steps * run.step + run.copy_seconds
    every = {name: max(1, math.ceil(shortest[name] / cycle)) for name in tiers}
    return Policy(steps=steps, every=every, spares=spares)


def _neighbours(run: RunSpec, policy: Policy, store_interval: float) -> list[Policy]:
    around = {max(1, round(policy.steps * factor)) for factor in (0.25, 0.5, 0.7, 1, 1.4, 2, 4)}
    names = tuple(policy.every)
    found = [_policy(run, names, each, store_interval, policy.spares) for each in sorted(around)]
    return list({one.steps: one for one in found}.values())


def _simplest(found: Sequence[Outcome]) -> Outcome:
    """The first, of fewest tiers, that is about as good as the best."""
    best = max(one.goodput.mean for one in found)
    return next(one for one in found if one.goodput.mean >= best - _CLOSE)


def _repairing(run: RunSpec) -> tuple[float, float]:
    """Single hosts and whole slices under repair at a time, on average; each is Poisson's."""
    return run.rates.get("host", 0.0) * run.repair, run.rates.get("slice", 0.0) * run.repair


def _plenty(run: RunSpec) -> int:
    """Spares that practically never run out: four slices and 6 deviations over the mean."""
    hosts, slices = _repairing(run)
    mean, variance = hosts + run.slice_hosts * slices, hosts + run.slice_hosts**2 * slices
    return math.ceil(mean + 6 * math.sqrt(variance) + 4 * run.slice_hosts)


def _with_spares(
    run: RunSpec, best: Outcome, outcome: Callable[[Policy], Outcome]
) -> list[Outcome]:
    """Spares for single hosts, then more and more whole slices besides; in order of their number.

    It ends where `best`, whose spares are always there, would not pay for this many.
    """
    found: dict[int, Outcome] = {}

    def look(number: int) -> bool:
        most = max((one.effective for one in found.values()), default=0.0)
        if number not in found and best.goodput.mean * _share(run, number) > most:
            found[number] = outcome(replace(best.policy, spares=number))
        return number in found

    mean, _ = _repairing(run)
    single = [math.ceil(mean + k * math.sqrt(mean)) for k in (0, 1, 2, 3, 4)]
    for number in (0, *single):
        look(number)
    whole = range(run.slice_hosts, _plenty(run) + run.slice_hosts, run.slice_hosts)
    paid = list(itertools.takewhile(lambda hosts: look(hosts + single[2]), whole))
    if paid:
        top = max(paid, key=lambda hosts: found[hosts + single[2]].effective)
        for number in single:
            look(top + number)
    return [found[number] for number in sorted(found)]


def _share(run: RunSpec, spares: int) -> float:
    """The share of the hosts that are not spares."""
    return run.hosts / (run.hosts + spares)


def _outcome(
    run: RunSpec, policy: Policy, draws: Sequence[Sequence[Failure]], horizon: float
) -> Outcome:
    runs = [simulate(run, policy, failures, horizon) for failures in draws]
    shares = {cause: np.array([one[cause] for one in runs]) / horizon for cause in CAUSES}
    goodput = _mean(shares["step"])
    return Outcome(
        policy=policy,
        goodput=goodput,
        effective=goodput.mean * _share(run, policy.spares),
        closed_form=closed_form(run, policy),
        causes={cause: float(share.mean()) for cause, share in shares.items()},
        tiers={k: restoring_tier(run, policy, k)[0] for k in KINDS if run.rates.get(k)},
    )


def _mean(values: NDArray[np.float64]) -> Mean:
    mean, count = float(values.mean()), len(values)
    half = float(stdtrit(count - 1, 0.975) * values.std(ddof=1) / math.sqrt(count))
    return Mean(mean=mean, low=max(0.0, mean - half), high=min(1.0, mean + half))
