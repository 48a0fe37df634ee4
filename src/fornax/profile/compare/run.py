"""Compare two captures: match, time, test.

Significance of a change: its log ratio over the noise of two runs and of its own steps together, as
Student's t with few degrees of freedom, because residuals have longer tails than a normal
distribution's; adjusted by Benjamini and Hochberg for all groups that weigh enough to be looked at.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from fornax.config.errors import ProfileError
from fornax.config.statistics import Estimate, benjamini_hochberg, interval
from fornax.profile.compare.match import Matched, group, match
from fornax.profile.compare.samples import Sampled, Samples, sample
from fornax.profile.compare.times import Floats, Machine, Times, machine, noisy, times
from fornax.profile.compare.types import Change, Comparison, Kind, Side
from fornax.profile.facts import By
from fornax.profile.profile import Profile

_LEVEL = 0.01
"""False discovery rate of the changes that are called significant."""
_WEIGHT = 0.01
"""Of a step, that a change must add or save to be called one."""
_FREEDOM = 5


def compare(
    before: Profile,
    after: Profile,
    *,
    by: By = "op",
    fail_over: float = 0.05,
    calibrate: bool = True,
) -> Comparison:
    """Compare two captures of a program, before and after a change.

    Args:
      before: a capture of several steps.
      after: the same after the change.
      by: what is listed and tested: operations, classes, modules or lines.
      fail_over: how much slower a step may be, 0.05 for 5 %.
      calibrate: whether what the operations that are the same in both have in common is taken for
        the machine's doing; off for a machine that is known to be quiet.

    Raises:
      ProfileError: a capture has too few steps, or none of its operations ran in them.
    """
    samples = _alike(_alone(sample(before)), _alone(sample(after)))
    for profile, one in zip((before, after), samples, strict=True):
        if not one.operations:
            raise ProfileError(
                f"no operation of the capture {profile.info.folder} ran inside of its steps; "
                "annotate steps with jax.profiler.StepTraceAnnotation around the work and "
                "block_until_ready, and capture again"
            )
    matched = match(samples[0].operations, samples[1].operations)
    whole = times(matched)
    state = machine(matched, whole, calibrate=calibrate)
    after_RM = noisy(whole, state)
    changes = _changes(matched, group(matched, by), whole, after_RM, state)
    step = _step(whole, after_RM, state, samples)
    notes = []
    if calibrate and state.factor == 1.0 and not len(state.residual):
        notes.append(
            "too few operations are the same in both captures to tell the machine from the "
            "program: times are compared as they are, without the noise between two runs"
        )
    if before.info.device_kind != after.info.device_kind:
        notes.append(
            f"the captures are of different devices: {before.info.device_kind} and "
            f"{after.info.device_kind}"
        )
    return Comparison(
        before=_of_side(before, samples[0], whole.before_M.sum()),
        after=_of_side(after, samples[1], whole.after_M.sum()),
        by=by,
        step=step,
        raw=step.value * state.factor,
        machine=state.factor,
        calibrated=len(state.residual) if calibrate else 0,
        noise=state.noise,
        changes=changes,
        fail_over=fail_over,
        notes=tuple(notes),
    )


def _alone(samples: Samples) -> Samples:
    """Without exchanges that run beside operations: what those do not hide is waited for."""
    return dataclasses.replace(
        samples, operations=tuple(one for one in samples.operations if not one.beside)
    )


def _alike(before: Samples, after: Samples) -> tuple[Samples, Samples]:
    """The last steps of each, as many of one as of the other: the least of more steps is less."""
    steps = min(before.steps, after.steps)

    def last(samples: Samples) -> Samples:
        return dataclasses.replace(
            samples,
            steps=steps,
            operations=tuple(
                dataclasses.replace(one, seconds=one.seconds[-steps:]) for one in samples.operations
            ),
            waited_seconds=samples.waited_seconds[-steps:],
        )

    return last(before), last(after)


def _of_side(profile: Profile, samples: Samples, seconds: float) -> Side:
    return Side(
        folder=profile.info.folder,
        steps=samples.steps,
        warm_up=samples.warm_up,
        seconds=float(seconds) + _waited(samples),
        waited_seconds=_waited(samples),
        flops=_sum(samples.operations, "flops"),
        bytes=_sum(samples.operations, "bytes"),
    )


def _sum(operations: Sequence[Sampled], figure: str) -> float:
    return math.fsum(getattr(one.operation, figure) * one.runs for one in operations)


def _waited(samples: Samples) -> float:
    return float(np.quantile(samples.waited_seconds, 0.25))


def _step(
    found: Times, after_RM: Floats, of: Machine, samples: tuple[Samples, Samples]
) -> Estimate:
    """After over before of all operations and of waiting."""
    waited = [_waited(one) for one in samples]
    value = (found.after_M.sum() / of.factor + waited[1]) / (found.before_M.sum() + waited[0])
    before_R = found.before_RM.sum(axis=1) + waited[0]
    after_R = after_RM.sum(axis=1) + waited[1]
    low, high = interval(after_R / before_R)
    return Estimate(float(value), min(low, float(value)), max(high, float(value)))


def _changes(
    matched: Sequence[Matched],
    groups: Mapping[str, list[int]],
    found: Times,
    after_RM: Floats,
    of: Machine,
) -> tuple[Change, ...]:
    whole = found.before_M.sum()
    looked_at = {}
    for key, members in groups.items():
        before, after = found.before_M[members].sum(), found.after_M[members].sum() / of.factor
        if max(before, after) >= _WEIGHT * whole:
            looked_at[key] = _p_value(before, after, _spread(found, members, of))
    adjusted = benjamini_hochberg(list(looked_at.values())) if looked_at else ()
    p_values = dict(zip(looked_at, adjusted, strict=True))
    changes = [
        _change(
            key,
            [matched[at] for at in members],
            seconds=(
                float(found.before_M[members].sum()),
                float(found.after_M[members].sum() / of.factor),
            ),
            drawn=(found.before_RM[:, members].sum(axis=1), after_RM[:, members].sum(axis=1)),
            whole=float(whole),
            p_value=float(p_values.get(key, 1.0)),
        )
        for key, members in groups.items()
    ]
    return tuple(sorted(changes, key=lambda change: (change.kind == "same", -abs(change.share))))


def _spread(found: Times, members: list[int], of: Machine) -> float:
    """Standard deviation of a group's log ratio: of its steps, and between two runs."""
    variance = 0.0
    for drawn_RM in (found.before_RM, found.after_RM):
        drawn_R = drawn_RM[:, members].sum(axis=1)
        if drawn_R.all():
            low, high = np.quantile(np.log(drawn_R), [0.16, 0.84])
            variance += float((high - low) / 2) ** 2
    longest_M = np.maximum(found.before_M[members], found.after_M[members])
    # Operations differ between two runs each by itself: a group's noise is less than one's.
    together = float(np.sqrt((longest_M**2).sum()) / longest_M.sum())
    return math.sqrt(variance + (together * of.noise) ** 2)


def _p_value(before: float, after: float, spread: float) -> float:
    """Two-sided; of what is on one side only, that it takes no time."""
    if not before or not after:
        z = 1.0 / spread if spread else math.inf
    else:
        z = abs(math.log(after / before)) / spread if spread else math.inf
    return _student_tail(z)


def _student_tail(z: float) -> float:
    """Both tails of Student's t with five degrees of freedom, in closed form (Abramowitz and
    Stegun 26.7.3)."""
    if math.isinf(z):
        return 0.0
    angle = math.atan(z / math.sqrt(_FREEDOM))
    cosine = math.cos(angle)
    inside = angle + math.sin(angle) * (cosine + 2 / 3 * cosine**3)
    return max(0.0, 1 - 2 / math.pi * inside)


def _change(
    key: str,
    members: Sequence[Matched],
    *,
    seconds: tuple[float, float],
    drawn: tuple[Floats, Floats],
    whole: float,
    p_value: float,
) -> Change:
    before, after = seconds
    both = bool(before and after)
    if both:
        with np.errstate(divide="ignore", invalid="ignore"):
            low, high = interval(drawn[1] / np.where(drawn[0] > 0, drawn[0], np.nan))
        ratio = Estimate(after / before, min(low, after / before), max(high, after / before))
    else:
        ratio = Estimate(math.nan, math.nan, math.nan)
    left = [one for each in members for one in each.before]
    right = [one for each in members for one in each.after]
    share = (after - before) / whole if whole else 0.0
    longest = max(right or left, key=lambda one: one.seconds.sum())
    return Change(
        key=key,
        kind=_kind(left, right, share, p_value),
        program=longest.program,
        category=longest.operation.category,
        source=longest.operation.source,
        before_operations=tuple(one.operation.name for one in left),
        after_operations=tuple(one.operation.name for one in right),
        before_seconds=before,
        after_seconds=after,
        ratio=ratio,
        share=share,
        p_value=p_value,
        before_flops=_sum(left, "flops"),
        after_flops=_sum(right, "flops"),
        before_bytes=_sum(left, "bytes"),
        after_bytes=_sum(right, "bytes"),
    )


def _kind(
    before: Sequence[Sampled], after: Sequence[Sampled], share: float, p_value: float
) -> Kind:
    if p_value > _LEVEL or abs(share) < _WEIGHT:
        return "same"
    if not before:
        return "new"
    if not after:
        return "gone"
    return "slower" if share > 0 else "faster"
