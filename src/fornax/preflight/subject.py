"""What a preflight has to know of a kind of run, such as pretraining of decoders."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fornax.preflight.shrink import Shrunk
from fornax.train import Task

__all__ = ["PlainLoss", "Rows", "Subject"]

Rows = dict[str, np.ndarray]
"""A batch by name; on the host."""

PlainLoss = Callable[[Any, Mapping[str, jax.Array]], tuple[jax.Array, jax.Array]]
"""(model, batch) to the mean loss of the batch, and the part of it that is z-loss."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One kind of run; configs are of its class."""

    shrink: Callable[[Any, bool], Shrunk[Any]]
    """(config, quick) to what runs in its place."""
    task: Callable[..., Task[Any]]
    """(config, implementation of attention or None for the trainer's choice) to its task."""
    model: Callable[[Any], Any]
    """(config) to the abstract model of the full config; nothing is computed."""
    plain_loss: Callable[[Any], PlainLoss]
    """(config) to its loss, written down plainly."""
    rows: Callable[[Any], Rows]
    """(config) to a batch whose micro-batches and devices hold unequal weights."""
    weights: str
    """The array of a batch that weighs its parts: the loss is the mean by it."""
    content: str
    """The array of a batch in which no two rows are equal."""
    zeros: tuple[str, ...] | None
    """Arrays whose rows of padding are zeros; None for all."""
    terms: Callable[[Any, Rows], int]
    """(config, batch) to the length of the longest sum in a gradient."""
    without_remat: Callable[[Any], Any]
    """(config) to it with everything kept for the backward pass."""
    sizes: Callable[[Any], dict[str, Any]]
    """(config) to its sizes by name, with `summary`, a line that says them."""
    left_out: Callable[[Any], str | None]
    """(config) to why a part of it is not checked; None where all of it is."""
