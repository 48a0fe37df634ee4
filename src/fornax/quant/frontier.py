"""The frontier of size and loss: which group of matrices gets which scheme, by what each costs.

What groups cost is taken to add up. Then the best mixes of all sizes are found by one greedy pass:
of each group's schemes those on the lower convex hull of cost over bytes saved, and the steps from
one to the next of all groups in order of cost a byte, the least first (Shoham and Gersho 1988).
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

__all__ = ["Mix", "Option", "frontier"]


@dataclass(frozen=True, kw_only=True)
class Option:
    """A scheme for a group, measured with all other groups in floats."""

    group: str
    scheme: str
    saved: int
    """Bytes less than in floats."""
    kl: float
    """Divergence from the float model, nats per token."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """A scheme for each group."""

    schemes: Mapping[str, str]
    """By group; those that are missing stay floats."""
    saved: int
    """Bytes less than in floats."""
    kl: float
    """The sum of what the groups cost alone."""


def frontier(options: Iterable[Option]) -> list[Mix]:
    """Mixes from floats to the smallest: more and more bytes saved, at more and more cost a byte.

    Args:
      options: of all groups, in any order. Those that save nothing are left out, and so is what
        another option or two mixed beat.
    """
    by_group: dict[str, list[Option]] = {}
    for option in options:
        by_group.setdefault(option.group, []).append(option)
    steps = [step for own in by_group.values() for step in _steps(own)]
    mixes = [Mix(schemes={}, saved=0, kl=0.0)]
    for saved, kl, option in sorted(steps, key=lambda step: step[1] / step[0]):
        last = mixes[-1]
        schemes = {**last.schemes, option.group: option.scheme}
        mixes.append(Mix(schemes=schemes, saved=last.saved + saved, kl=last.kl + kl))
    return mixes


def _steps(options: Iterable[Option]) -> Iterator[tuple[int, float, Option]]:
    """Further bytes saved, further cost and the option of each step along the hull of a group."""
    hull: list[tuple[int, float, Option | None]] = [(0, 0.0, None)]
    for option in sorted(options, key=lambda each: (each.saved, -each.kl)):
        if option.saved <= 0:
            continue
        point = (option.saved, max(option.kl, 0.0), option)  # rounding can make nothing negative
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        if hull[-1][0] < point[0]:
            hull.append(point)
    for before, after in itertools.pairwise(hull):
        assert after[2] is not None
        yield after[0] - before[0], after[1] - before[1], after[2]


def _slope(one: tuple[int, float, Option | None], other: tuple[int, float, Option | None]) -> float:
    """Cost a byte from one point to another; what saves no more is passed over by the least."""
    further = other[0] - one[0]
    return (other[1] - one[1]) / further if further else -math.inf
