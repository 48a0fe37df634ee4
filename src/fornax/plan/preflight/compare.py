"""Arrays against arrays: the first that differs by more than rounding explains, in model order."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from fornax.plan.preflight.result import Divergence
from fornax.plan.preflight.tolerance import Tolerance

__all__ = ["Comparison", "compare", "compare_number", "model_order"]

_ORDER = (
    "embed",
    "layers",
    "attention_norm",
    "attention",
    "q",
    "k",
    "v",
    "q_norm",
    "k_norm",
    "o",
    "post_attention_norm",
    "mlp_norm",
    "mlp",
    "gate",
    "up",
    "down",
    "post_mlp_norm",
    "final_norm",
    "lm_head",
)
"""Names of modules in the order that a forward pass meets them; others follow by name."""


@dataclass(frozen=True)
class Comparison:
    """Whether arrays agree, and by how much."""

    divergence: Divergence | None
    margin: float
    """The largest difference as a share of what is allowed."""

    def then(self, other: "Comparison") -> "Comparison":
        """Both, the first divergence first."""
        return Comparison(self.divergence or other.divergence, max(self.margin, other.margin))


def model_order(paths: Iterable[str]) -> list[str]:
    """Parameter paths in the order that a forward pass meets them."""

    def key(path: str) -> list[tuple[int, str]]:
        parts = path.split("/")
        known = [_ORDER.index(part) if part in _ORDER else len(_ORDER) for part in parts]
        return list(zip(known, parts, strict=True))

    return sorted(paths, key=key)


def compare(
    what: str,
    got: Mapping[str, np.ndarray],
    want: Mapping[str, np.ndarray],
    tolerances: Mapping[str, Tolerance],
) -> Comparison:
    """Hold arrays by path against those they should be.

    Args:
      what: what the arrays are, for the message (`gradient`).
      got: the arrays.
      want: what they should be.
      tolerances: what each may differ by.
    """
    first: tuple[str, float, float] | None = None
    count, margin = 0, 0.0
    for path in model_order(want):
        allowed = tolerances[path]
        change = np.abs(got[path].astype(np.float64) - want[path].astype(np.float64))
        share = max(
            _share(float(change.max(initial=0.0)), allowed.largest),
            _share(math.sqrt(float(np.mean(change**2))) if change.size else 0.0, allowed.rms),
        )
        margin = max(margin, share)
        if share > 1:
            count += 1
            first = first or (_name(path, change), float(np.max(change)), allowed.largest)
    if first is None:
        return Comparison(None, margin)
    name, difference, tolerance = first
    found = Divergence(
        what=f"{what} of {name}",
        difference=difference,
        tolerance=tolerance,
        count=count,
        of=len(want),
    )
    return Comparison(found, margin)


def compare_number(what: str, got: float, want: float, tolerance: Tolerance) -> Comparison:
    """Hold one number against what it should be."""
    difference = abs(got - want)
    share = _share(difference, tolerance.largest)
    if share <= 1:
        return Comparison(None, share)
    found = Divergence(what=what, difference=difference, tolerance=tolerance.largest)
    return Comparison(found, share)


def _share(difference: float, allowed: float) -> float:
    if math.isnan(difference):
        return math.inf
    if difference == 0:
        return 0.0
    return difference / allowed if allowed > 0 else math.inf


def _name(path: str, change: np.ndarray) -> str:
    """The path, and in a stack of layers the first of those that differ most."""
    if not path.startswith("layers/") or change.ndim == 0:
        return path
    worst = np.nan_to_num(change, nan=np.inf).reshape(change.shape[0], -1).max(axis=1)
    return f"{path} (layer {int(worst.argmax())})"
