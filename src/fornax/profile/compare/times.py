"""Times of matched operations, robust against a shared machine, and how sure they are.

Other processes only ever add time. So an operation's time is the least over the steps, run by run,
added up; and what the operations that are the same in both captures have in common, the
weighted median of their ratios, is the machine's factor and not the program's. How far those ratios
lie around the factor is what two runs of one program differ by; it goes into every interval beside
the bootstrap over steps, for steps of one process do not show it.

Legend: S steps, C runs of all operations, M groups of matched operations, R resamples.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fornax.config.statistics import resamples
from fornax.profile.compare.match import Matched
from fornax.profile.compare.samples import Sampled

Floats = NDArray[np.float64]

_RESAMPLES = 400
_LEAST_CALIBRATED = 8
"""Operations that a factor is taken from."""
_LEAST_SHARE = 0.3
"""Of the time before, that those must have."""
_LEAST_NOISE = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Times:
    """Seconds per step of each group, and resamples of them."""

    before_M: Floats
    after_M: Floats
    before_RM: Floats
    after_RM: Floats


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Machine:
    """What the operations that are the same in both captures say of the machine."""

    factor: float
    """How much longer they took, as a whole; 1 where they are too few."""
    factor_R: Floats
    """Resamples of the steps, and of the operations that are asked."""
    noise: float
    """Standard deviation of log ratios around the factor."""
    residual: Floats
    """Log ratios of those operations around it."""
    weight: Floats
    """Their shares of the time, which add up to 1."""


def times(matched: Sequence[Matched]) -> Times:
    """The time of each group on both sides."""
    before_M, before_RM = _side([each.before for each in matched], seed=1)
    after_M, after_RM = _side([each.after for each in matched], seed=2)
    return Times(before_M=before_M, after_M=after_M, before_RM=before_RM, after_RM=after_RM)


def _side(groups: Sequence[Sequence[Sampled]], seed: int) -> tuple[Floats, Floats]:
    columns = [one.seconds for members in groups for one in members]
    if not columns:
        return np.zeros(len(groups)), np.zeros((_RESAMPLES, len(groups)))
    owner_C = np.repeat(
        np.arange(len(groups)),
        [sum(one.seconds.shape[1] for one in members) for members in groups],
    )
    seconds_SC = np.concatenate(columns, axis=1)
    count = len(groups)
    whole = _least(seconds_SC, owner_C, count)
    drawn = [
        _least(seconds_SC[picks_S], owner_C, count)
        for chunk in resamples(len(seconds_SC), count=_RESAMPLES, seed=seed)
        for picks_S in chunk
    ]
    return whole, np.stack(drawn)


def _least(seconds_SC: Floats, owner_C: NDArray[np.int64], count: int) -> Floats:
    return np.bincount(owner_C, weights=seconds_SC.min(axis=0), minlength=count).astype(np.float64)


def least_seconds(one: Sampled) -> float:
    """What all runs of an operation take in a step, on all devices: the least over
    the steps of each, added up."""
    return float(_least(one.seconds, np.zeros(one.seconds.shape[1], np.int64), 1)[0])


def machine(matched: Sequence[Matched], found: Times, *, calibrate: bool) -> Machine:
    """The machine's factor and noise; a factor of 1 with `calibrate` off."""
    same = np.array([each.same for each in matched], bool)
    same &= (found.before_M > 0) & (found.after_M > 0)
    total = found.before_M.sum()
    known = same.sum() >= _LEAST_CALIBRATED
    if not known or found.before_M[same].sum() < _LEAST_SHARE * total:
        none = np.zeros(0)
        return Machine(
            factor=1.0, factor_R=np.ones(_RESAMPLES), noise=0.0, residual=none, weight=none
        )
    weight = np.sqrt(found.before_M[same] * found.after_M[same])
    weight /= weight.sum()
    ratio = np.log(found.after_M[same] / found.before_M[same])
    with np.errstate(divide="ignore"):
        drawn = np.log(np.maximum(found.after_RM[:, same], 1e-12)) - np.log(
            np.maximum(found.before_RM[:, same], 1e-12)
        )
    middle = _weighted_median(ratio, weight)
    residual = ratio - middle
    noise = max(_LEAST_NOISE, 1.4826 * _weighted_median(np.abs(residual), weight))
    if not calibrate:
        return Machine(
            factor=1.0,
            factor_R=np.ones(_RESAMPLES),
            noise=noise,
            residual=residual,
            weight=weight,
        )
    picks = next(iter(resamples(len(ratio), count=_RESAMPLES, seed=3)))
    factor_R = np.array(
        [
            _middle(drawn[at, pick], weight[pick], noise, mean=bool(at % 2))
            for at, pick in enumerate(picks)
        ]
    )
    return Machine(
        factor=math.exp(middle),
        factor_R=np.exp(factor_R),
        noise=noise,
        residual=residual,
        weight=weight,
    )


def _middle(values: Floats, weights: Floats, noise: float, *, mean: bool) -> float:
    """The median, or the mean without outliers: two ways to say what operations have in common.

    The interval takes both in turn, for what lies between them cannot be distinguished from a
    change.
    """
    middle = _weighted_median(values, weights)
    if not mean:
        return middle
    near = np.clip(values - middle, -3 * noise, 3 * noise)
    return middle + float(np.average(near, weights=weights))


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    reach = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reach, reach[-1] / 2)])


def noisy(found: Times, of: Machine) -> Floats:
    """Resamples of the times after, the factor taken out and the noise put in [R, M]."""
    after_RM = found.after_RM / of.factor_R[:, None]
    if not len(of.residual):
        return after_RM
    generator = np.random.default_rng(4)
    picks = generator.choice(len(of.residual), after_RM.shape, p=of.weight)
    return after_RM * np.exp(of.residual[picks])
