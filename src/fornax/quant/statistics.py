"""What a layer's products see of the calibration text: sums over rows, for each weight.

Legend: R rows, K inputs of a weight, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from fornax.models import Activations, LayerByLayer, ProductInput

__all__ = ["Found", "Statistics", "layer_statistics"]


@dataclass
class Statistics:
    """Of the rows X [R, K] that a weight, or one expert's, was multiplied with."""

    rows: int
    most_K: np.ndarray
    """float32: the greatest magnitude of each input."""
    h_KK: np.ndarray
    """float32 X^T X; empty where it is not asked for."""

    def add(self, other: "Statistics") -> None:
        """Take in further rows."""
        self.rows += other.rows
        self.most_K = np.maximum(self.most_K, other.most_K)
        self.h_KK += other.h_KK


Found = dict[tuple[str, int | None], Statistics]
"""By path of a weight in its layer, such as attention/q/kernel, and expert."""


def layer_statistics(
    model: LayerByLayer, index: int, before: Sequence[Activations], paths: Mapping[str, bool]
) -> Found:
    """Run a layer over what came out of the one before it.

    Args:
      model: the float model, whose layer is run.
      index: the layer's number.
      before: what it takes in.
      paths: weights to look at, and whether X^T X is asked for.
    """
    layer = model.layer(index)
    found: Found = {}
    for each in before:
        seen = model.record(layer, index, each)
        for path, squares in paths.items():
            if path not in seen:
                continue
            for expert, own in _statistics(seen[path], squares).items():
                if (path, expert) in found:
                    found[path, expert].add(own)
                else:
                    found[path, expert] = own
    return found


def _statistics(given: ProductInput, squares: bool) -> dict[int | None, Statistics]:
    if given.sizes_E is None:
        return {None: _of(given.x_RK, squares)}
    ends = np.cumsum(np.asarray(given.sizes_E))
    starts = [0, *ends[:-1]]
    rows = enumerate(zip(starts, ends, strict=True))
    return {expert: _of(given.x_RK[start:end], squares) for expert, (start, end) in rows}


def _of(x_RK: jax.Array, squares: bool) -> Statistics:
    x_RK = x_RK.astype(jnp.float32)
    most_K = jnp.max(jnp.abs(x_RK), axis=0, initial=0)
    h_KK = np.zeros((0, 0), np.float32)
    if squares:
        h_KK = np.array(jnp.matmul(x_RK.T, x_RK, precision=jax.lax.Precision.HIGHEST))
    return Statistics(len(x_RK), np.asarray(most_K), h_KK)
