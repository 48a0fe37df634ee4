"""How far two computations of the same numbers may part: from measured noise, never a constant.

The noise of a gradient is measured, not guessed: the reference runs again with every parameter
moved by up to one rounding unit u of the compute dtype, at random. In float32 that draws every
rounding of the whole computation anew, so the change is a sample of what rounding does to each
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

__all__ = ["Noise", "Tolerance", "allowance", "measure_noise", "unit"]

_DEVIATIONS = 3.0
_PROBES, _ORDER_PROBES = 16, 8
"""Moves. A loss is one number, whose noise few samples would often show too small; in float32 the
allowance for order is many times the noise, and half as many do."""

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


def _moved(value: np.ndarray, u: float, rng: Any) -> np.ndarray:
    if value.dtype.kind in "iu":
        return value
    factor = 1 + u * rng.uniform(-1, 1, value.shape)
    return (value.astype(np.float64) * factor).astype(value.dtype)


def _rms(value: np.ndarray) -> float:
    return math.sqrt(float(np.mean(np.square(value)))) if value.size else 0.0
