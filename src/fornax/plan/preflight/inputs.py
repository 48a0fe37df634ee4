"""What the programs of a preflight start from: rows from the trainer's own pipeline, and a state.

Legend: B rows, T tokens of a row.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fornax.optim.tree import flatten, rebuild
from fornax.train import Hosts, Ledger, TrainConfig, pretrain_task
from fornax.train.session import first_state, prepare
from fornax.train.state import TrainState

__all__ = ["alone", "first_rows", "one_document", "start_state", "stirred"]

Rows = dict[str, np.ndarray]


def first_rows(config: TrainConfig) -> Rows:
    """The first batch of a config, packed as it packs, with padding and unequal rows.

    Every second row ends after a third: micro-batches, and devices, then hold unequal weights, so
    that a mean of means is not the mean.
    """
    batches = pretrain_task(config).batches("train", Hosts())
    try:
        rows = next(batches)
    finally:
        batches.close()
    B, T = rows["tokens"].shape
    ends = np.array([T - row % 5 if row % 2 == 0 else T // 3 + row % 3 for row in range(B)])
    inside_BT = np.arange(T) < ends[:, None]
    return {name: np.where(inside_BT, x, 0).astype(x.dtype) for name, x in rows.items()}


def one_document(rows: Rows) -> tuple[Rows, np.ndarray]:
    """The rows with weight on one document of each only, the last of two or more tokens; and which
    tokens those are, bool [B, T]."""
    segments_BT = rows["segment_ids"]
    chosen_BT = np.zeros(segments_BT.shape, bool)
    for row, ids in enumerate(segments_BT):
        numbers, counts = np.unique(ids[ids > 0], return_counts=True)
        long = numbers[counts > 1]
        if long.size:
            chosen_BT[row] = ids == long[-1]
    weights = np.where(chosen_BT, rows["loss_weights"], 0).astype(np.float32)
    return {**rows, "loss_weights": weights}, chosen_BT


def alone(rows: Rows, chosen_BT: np.ndarray) -> Rows:
    """Rows that hold the chosen document of each and nothing else, at their start."""
    found = {name: np.zeros_like(x) for name, x in rows.items()}
    for row, chosen in enumerate(chosen_BT):
        for name, x in rows.items():
            found[name][row, : chosen.sum()] = x[row, chosen]
    found["segment_ids"] = np.minimum(found["segment_ids"], 1)
    return found


def stirred(rows: Rows, chosen_BT: np.ndarray, vocab: int) -> Rows:
    """The rows with every token but the chosen ones replaced by another."""
    tokens = rows["tokens"]
    other = np.where(tokens == vocab - 1, 1, tokens + 1)
    real = rows["segment_ids"] > 0
    return {**rows, "tokens": np.where(chosen_BT | ~real, tokens, other).astype(tokens.dtype)}


def start_state(config: TrainConfig, dtype: Any) -> TrainState:
    """The trainer's first state on the host, in float32, as after a little training.

    Parameters that start all equal (scales of norms, biases) get values of their own: with zeros
    or ones a fault in them would not show.

    Args:
      config: of one device, in float32.
      dtype: parameters are rounded to it, so that keeping them in it loses nothing.
    """
    programs = prepare(config, pretrain_task(config), Ledger(), jax.devices()[:1])
    state = first_state(config, programs)
    rng = np.random.default_rng(config.seed)

    def settle(x: Any) -> np.ndarray:
        value = np.asarray(x)
        if value.size > 1 and (value == value.flat[0]).all():
            value = value + np.float32(0.1) * rng.standard_normal(value.shape, np.float32)
        return value.astype(dtype).astype(np.float32)

    params: Mapping[str, np.ndarray] = {p: settle(x) for p, x in flatten(state.params).items()}
    tree = rebuild(state.params, params)
    optimizer = jax.jit(programs.parts.optim.init)(jax.tree.map(jnp.asarray, tree))
    state = dataclasses.replace(state, params=tree, optimizer=optimizer)
    return jax.tree.map(np.asarray, state)
