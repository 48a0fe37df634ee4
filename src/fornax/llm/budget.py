"""How many tokens a step has, and how they are shared between the prompts that are computed."""

from bisect import bisect_right
from collections.abc import Sequence as Items
from dataclasses import dataclass

__all__ = ["Job", "StepLimit", "share_tokens"]

_SMALL = 64
"""Padding tokens that are cheaper than a step more."""
LEAST = 32
"""Tokens of prompts that a step has room for, whatever it may take."""


class StepLimit:
    """How many tokens a step may have so that it takes a given time.

    Each step that reads prompts corrects the last estimate: tokens in proportion to the time it was
    to take over the time it took. With t = a + b n this comes to rest
    where t is the target, for any a below it. A step that something else held up is forgotten in a
    few steps, since each may double the estimate.
    """

    def __init__(self, target_seconds: float, buckets: Items[int]) -> None:
        self._target = target_seconds
        self._buckets = buckets
        self._tokens = float(buckets[-1])

    def took(self, bucket: int, seconds: float) -> None:
        """Take in that a step of `bucket` tokens, padding included, took this long."""
        scale = self._target / seconds if seconds > 0 else 2.0
        self._tokens = min(max(bucket * min(scale, 2.0), 1.0), float(self._buckets[-1]))

    def tokens(self, decodes: int) -> int:
        """Tokens of a step in which this many sequences decode: the most that fill a bucket."""
        below = self._buckets[max(bisect_right(self._buckets, self._tokens) - 1, 0)]
        return max(below, decodes + LEAST)


@dataclass(slots=True)
class Job:
    """A prompt that needs tokens of the step."""

    remaining: int
    """Tokens until its prompt is computed."""
    most: int
    """Most tokens it may get in one step."""
    running: bool
    """Whether a part of it is computed already."""


def share_tokens(
    budget: int, jobs: list[Job], *, limit: int, base: int, buckets: Items[int]
) -> list[int]:
    """Share `budget` tokens; `jobs` in order, the running ones first.

    The first job is sure of its equal share, so that it comes to an end; the rest goes to whatever
    ends soonest, so that a short prompt does not wait for a long one, and equal prompts are served
    in order. At most `limit` prompts are left partly computed. When the `base` tokens of the step
    plus those shared lie little above one of the `buckets`, the excess waits for the next step.
    """
    grants = [0] * len(jobs)
    if not jobs or budget <= 0:
        return grants
    first = jobs[0]
    grants[0] = min(first.remaining, first.most, -(-budget // min(limit, len(jobs))))
    left = budget - grants[0]
    partial = sum(job.running for job in jobs) + (not first.running)
    ending_first = sorted(
        range(len(jobs)), key=lambda index: (jobs[index].remaining - grants[index], index)
    )
    for index in ending_first:
        job = jobs[index]
        grant = min(job.remaining, job.most, grants[index] + left)
        known = job.running or index == 0
        if grant < job.remaining and not known:
            if grant == 0 or partial >= limit:
                continue
            partial += 1
        elif grant == job.remaining and known:
            partial -= 1
        left -= grant - grants[index]
        grants[index] = grant
    _trim_to_bucket(grants, jobs, limit - partial, base, buckets)
    return grants


def _trim_to_bucket(
    grants: list[int], jobs: list[Job], slots: int, base: int, buckets: Items[int]
) -> None:
    """Put off the last few tokens when they alone would take the next bucket."""
    total = base + sum(grants)
    above = bisect_right(buckets, total)
    if above == 0 or above == len(buckets):
        return
    excess = total - buckets[above - 1]
    gap = buckets[above] - buckets[above - 1]
    if excess == 0 or 4 * excess > gap or gap < _SMALL:
        return
    for index in reversed(range(len(jobs))):
        partial = grants[index] < jobs[index].remaining
        if grants[index] > excess and (partial or slots > 0):
            grants[index] -= excess
            return
