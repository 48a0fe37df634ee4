"""Arrays against arrays: how far they may part, and the first that differs by more, in model order.

Tolerances come from measured noise, never a constant.

The noise of a gradient is measured, not guessed: the reference runs again with every parameter
moved by up to one rounding unit u of the compute dtype, at random. In float32 that draws every
rounding of the whole computation again, so the change is a sample of what rounding does to each
gradient, cancellation included. Two things change that sample:

- *Order.* A sum of n terms has a typical error of u sqrt(n) when added one by one and of
  u sqrt(log2 n) when added in pairs (Higham and Mary 2019). Devices, blocks and micro-batches
  change the order, at most from the best to the worst, so float32 differences are allowed
  sqrt(n / log2 n) times the noise, n being the longest sum in the model.
- *Roundings.* In bfloat16 products still add up in float32, so order does not matter, but
  activations are rounded too, where moving the weights moves only weights. A weight's error is the
  same for every token and adds up in a gradient; an activation's is another for each token and
  averages out. And weights are moved by up to a whole unit, which has twice the variance of
  rounding to the nearest. The noise of the weights alone therefore stands for
  both, and is allowed once.

Times three, for three standard deviations. A largest element is held against the noise's largest
element, a root mean square against the noise's; the last place of the number itself is always free.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from fornax.preflight.report import Divergence

__all__ = [
    "Comparison",
    "Noise",
    "Tolerance",
    "allowance",
    "compare",
    "compare_number",
    "measure_noise",
    "model_order",
    "unit",
]

_DEVIATIONS = 3.0
_PROBES, _ORDER_PROBES = 16, 8
"""Moves. A loss is one number, whose noise few samples would often show too small; in float32 the
allowance for order is many times the noise, and half as many do."""
_ORDER = (
    "embed",
    "layers",
    "attention_norm",
    *("attention", "global_attention", "shared_attention", "global_shared_attention"),
    *("latent", "gated_delta", "mamba2"),
    "q",
    "k",
    "v",
    "q_norm",
    "k_norm",
    "o",
    "post_attention_norm",
    "mlp_norm",
    "mlp",
    "experts",
    "router",
    "gate",
    "up",
    "down",
    "shared",
    "post_mlp_norm",
    "final_norm",
    *("mtp", "embed_norm", "hidden_norm", "projection", "layer"),
    "lm_head",
)
"""Names of modules in the order that a forward pass meets them; others follow by name."""

Arrays = Mapping[str, np.ndarray]
Compute = Callable[[Arrays], tuple[float, Arrays]]
"""Parameters by path to the loss and the gradients by path."""


def unit(dtype: str) -> float:
    """The largest relative error of one rounding to `dtype`."""
    return float(jnp.finfo(dtype).eps) / 2


def allowance(dtype: str, terms: int) -> float:
    """How many times the measured noise a difference may be.

    Args:
      dtype: what is computed in.
      terms: n, the longest sum.
    """
    if dtype == "float32":
        return _DEVIATIONS * math.sqrt(terms / math.log2(max(terms, 2)))
    return _DEVIATIONS


@dataclass(frozen=True)
class Tolerance:
    """What one array may differ by."""

    rms: float
    """Root mean square over all elements."""
    largest: float
    """Any one element."""


@dataclass(frozen=True)
class Noise:
    """What rounding does to a loss and to each array."""

    loss: float
    rms: dict[str, float]
    largest: dict[str, float]

    def tolerance(self, path: str, value: np.ndarray, factor: float, u: float) -> Tolerance:
        """What array `path` may differ by.

        Args:
          path: which.
          value: what it should be.
          factor: from `allowance`.
          u: rounding unit of the dtype it is kept in.
        """
        if value.dtype == np.uint8:  # codes of a rounding, of which single ones fall otherwise
            return Tolerance(rms=0.1 + factor * self.rms[path], largest=1 + self.largest[path])
        wide = np.abs(value.astype(np.float64))
        return Tolerance(
            rms=factor * self.rms[path] + 2 * u * _rms(wide),
            largest=factor * self.largest[path] + 2 * u * float(wide.max(initial=0.0)),
        )

    def of_loss(self, loss: float, factor: float, terms: int, dtype: str) -> Tolerance:
        """What the loss, a mean over `terms` tokens added up in float32, may differ by.

        Beside the noise of the weights, each token's own activations are rounded to `dtype`:
        errors of a unit of its loss that differ from token to token, and average out.
        """
        own = unit(dtype) * abs(loss) / math.sqrt(terms)
        added_up = unit("float32") * math.sqrt(terms) * abs(loss)
        allowed = factor * (self.loss + own) + added_up
        return Tolerance(rms=allowed, largest=allowed)


def measure_noise(
    compute: Compute, params: Arrays, result: tuple[float, Arrays], *, u: float, seed: int
) -> Noise:
    """Move every parameter by up to `u` of itself, a few times; see what that does.

    Args:
      compute: the reference.
      params: where to look.
      result: what `compute` gives there.
      u: rounding unit of the dtype whose noise is asked for.
      seed: of the moves.
    """
    rng = np.random.default_rng(seed)
    loss, arrays = result
    losses: list[float] = []
    squares: dict[str, list[float]] = {path: [] for path in arrays}
    largest: dict[str, list[float]] = {path: [] for path in arrays}
    for _ in range(_ORDER_PROBES if u == unit("float32") else _PROBES):
        moved = {path: _moved(value, u, rng) for path, value in params.items()}
        other_loss, other = compute(moved)
        losses.append(other_loss - loss)
        for path, value in arrays.items():
            change = other[path].astype(np.float64) - value.astype(np.float64)
            squares[path].append(_rms(change))
            largest[path].append(float(np.abs(change).max(initial=0.0)))
    return Noise(
        loss=max(map(abs, losses)),
        rms={path: max(values) for path, values in squares.items()},
        largest={path: max(values) for path, values in largest.items()},
    )


def _moved(value: np.ndarray, u: float, rng: np.random.Generator) -> np.ndarray:
    if value.dtype.kind in "iu":
        return value
    factor = 1 + u * rng.uniform(-1, 1, value.shape)
    return (value.astype(np.float64) * factor).astype(value.dtype)


def _rms(value: np.ndarray) -> float:
    return math.sqrt(float(np.mean(np.square(value)))) if value.size else 0.0


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
    """The path, and in a stack the first of the layers or modules that differ most."""
    what = {"layers": "layer", "mtp": "module"}.get(path.split("/")[0])
    if what is None or change.ndim == 0:
        return path
    worst = np.nan_to_num(change, nan=np.inf).reshape(change.shape[0], -1).max(axis=1)
    return f"{path} ({what} {int(worst.argmax())})"
