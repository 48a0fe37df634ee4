"""How far two answers to the same request are apart, output by output, summed over requests."""

import dataclasses
import math
from collections import Counter

import numpy as np

__all__ = ["Difference", "OutputDifferences", "difference"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """One output of one request: shadow against main."""

    max_absolute: float = 0.0
    """Largest |shadow - main|; infinite where only one of them is finite."""
    max_relative: float = 0.0
    """Largest |shadow - main| / |main|, where main is not 0."""
    differs: bool = False
    """Whether an element is beyond the tolerance, or shape or dtype are others."""
    rows: int = 0
    """Rows whose largest element was looked for; 0 where that says nothing."""
    argmax: int = 0
    """Rows in which it stands elsewhere."""
    problem: str = ""
    """What keeps the two from being compared."""


def difference(
    main: np.ndarray, shadow: np.ndarray, absolute: float, relative: float
) -> Difference:
    """Compare an output; integers, truth values and strings differ when they are not equal."""
    if main.shape != shadow.shape or main.dtype != shadow.dtype:
        return Difference(
            differs=True,
            problem=f"{shadow.dtype} {shadow.shape} where the main answer is {main.dtype} "
            f"{main.shape}",
        )
    if main.size == 0:
        return Difference()
    if main.dtype.kind in "OSUb":
        return Difference(differs=bool((main != shadow).any()))
    a, b = main.astype(np.float64), shadow.astype(np.float64)
    with np.errstate(all="ignore"):
        off, size = np.abs(b - a), np.abs(a)
        largest = float(off.max())
        if not math.isfinite(largest):
            # Equal infinities and a NaN in both are no difference; in one of them they are all.
            off[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
            off[np.isnan(off)] = math.inf
            largest = float(off.max())
            size[~np.isfinite(size)] = 0.0
        relatives = np.divide(off, size, out=np.zeros_like(off), where=size > 0)
        if main.dtype.kind in "iu":
            differs = bool((main != shadow).any())
        else:
            differs = bool((off > absolute + relative * size).any())
    rows, argmax = _argmax(a, b)
    return Difference(
        max_absolute=largest,
        max_relative=float(relatives.max()),
        differs=differs,
        rows=rows,
        argmax=argmax,
    )


def _argmax(a: np.ndarray, b: np.ndarray) -> tuple[int, int]:
    """Rows along the last dimension, and those whose largest elements stand at other places."""
    if a.ndim < 2 or a.shape[-1] < 2:
        return 0, 0
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    return len(a), int((a.argmax(-1) != b.argmax(-1)).sum())


@dataclasses.dataclass
class OutputDifferences:
    """One output over all requests compared."""

    compared: int = 0
    differing: int = 0
    max_absolute: float = 0.0
    max_relative: float = 0.0
    rows: int = 0
    argmax: int = 0
    problems: Counter[str] = dataclasses.field(default_factory=Counter)

    def add(self, one: Difference) -> None:
        """Take in one request's difference."""
        self.compared += 1
        self.differing += one.differs
        self.max_absolute = max(self.max_absolute, one.max_absolute)
        self.max_relative = max(self.max_relative, one.max_relative)
        self.rows += one.rows
        self.argmax += one.argmax
        if one.problem and (one.problem in self.problems or len(self.problems) < 8):
            self.problems[one.problem] += 1

    def report(self) -> dict[str, object]:
        """As JSON has it; infinity, which JSON lacks, as text."""
        return {
            "compared": self.compared,
            "differing": self.differing,
            "max_absolute": _number(self.max_absolute),
            "max_relative": _number(self.max_relative),
            "rows": self.rows,
            "argmax_disagreements": self.argmax,
            "problems": dict(self.problems),
        }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "infinity"
