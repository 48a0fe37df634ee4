"""What a comparison of two captures finds. Seconds are of all devices together, of one step."""

import dataclasses
from typing import Literal

from fornax.config.statistics import Estimate
from fornax.profile.facts import By

Kind = Literal["slower", "faster", "new", "gone", "same"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One of the captures."""

    folder: str
    steps: int
    """Used; each is one observation."""
    warm_up: int
    """Steps before those, left out."""
    seconds: float
    """Operations' self time in a step, and what it waited."""
    waited_seconds: float
    """Of those, waiting for input, and for exchanges on rows of their own that nothing hid."""
    flops: float
    """Of a step, exact: from the compiled programs and how often each operation ran."""
    bytes: float
    """The same."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """Operations of both captures that do the same work, or are in the same place."""

    key: str
    """What the comparison was asked to group by: the operation, module, class or line."""
    kind: Kind
    """`slower` and `faster` are significant and of weight; `new` and `gone` are on one side."""
    program: str
    category: str
    source: str
    """The line that asked for it, as it is after the change where it is there."""
    before_operations: tuple[str, ...]
    after_operations: tuple[str, ...]
    before_seconds: float
    after_seconds: float
    """Divided by the machine's factor."""
    ratio: Estimate
    """After over before; NaN where it is on one side only."""
    share: float
    """What it adds to a step, over the step before: 0.05 for 5 %."""
    p_value: float
    """That so large a change is noise, adjusted for the number of changes looked at."""
    before_flops: float
    after_flops: float
    before_bytes: float
    after_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two captures compared."""

    before: Side
    after: Side
    by: By
    step: Estimate
    """After over before of a whole step, the machine's factor taken out."""
    raw: float
    """The same with the factor in it."""
    machine: float
    """How much longer the operations that are the same in both took, as a whole: 1 where they were
    not asked or are too few."""
    calibrated: int
    """Operations that the factor was taken from; 0 for none."""
    noise: float
    """Spread of those operations' ratios around the factor: one standard deviation."""
    changes: tuple[Change, ...]
    """What adds most to the step first."""
    fail_over: float
    """A step may be slower by this, 0.05 for 5 %."""
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether the whole interval of the step's ratio is beyond what is allowed."""
        return self.step.low > 1 + self.fail_over

    @property
    def slower(self) -> tuple[Change, ...]:
        """What makes the step slower, new work included."""
        return tuple(each for each in self.changes if each.kind in ("slower", "new"))

    @property
    def faster(self) -> tuple[Change, ...]:
        """What makes it faster."""
        return tuple(each for each in self.changes if each.kind in ("faster", "gone"))
