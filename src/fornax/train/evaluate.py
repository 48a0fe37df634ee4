"""One evaluation: sums over batches, added up on the host in float64, then means."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fornax.config.errors import DataError
from fornax.train.task import Batches, Loss, Task

__all__ = ["evaluate"]


def evaluate(
    task: Task,
    run: Callable[[Any, dict[str, np.ndarray]], Loss],
    state: object,
    batches: Batches,
    limit: int | None,
) -> dict[str, float]:
    """Evaluate `state` on up to `limit` batches.

    Args:
      task: its `summarise` turns means into what is reported.
      run: (state, this host's rows) to the sums of the global batch.
      state: the train state.
      batches: this host's rows.
      limit: how many batches at most; None reads all.

    Returns:
      Names to numbers: the mean `loss`, the task's own means, `weight`, and what `summarise` adds.

    Raises:
      DataError: when the split has no batch, or none with a weight.
    """
    totals: dict[str, list[float]] = {}
    maxima: dict[str, float] = {}
    for batch in itertools.islice(batches, limit):
        sums = jax.device_get(run(state, batch))
        for name, pair in {**sums.metrics, "loss": (sums.total, sums.weight)}.items():
            total = totals.setdefault(name, [0.0, 0.0])
            total[0] += float(pair[0])
            total[1] += float(pair[1])
        for name, value in sums.maxima.items():
            maxima[name] = max(maxima.get(name, -math.inf), float(value))
    if not totals or totals["loss"][1] == 0:
        raise DataError(
            "the evaluation split has no batch with anything to score; give it data, make "
            "batch_size smaller, or leave evaluation out with eval.every: null"
        )
    means = {name: total / weight for name, (total, weight) in totals.items() if weight}
    return task.summarise({**means, **maxima, "weight": totals["loss"][1]})
