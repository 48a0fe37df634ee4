"""What was written, read back: errors of weights, and logits beside the float model's.

Legend: N rows, B rows at a time, T tokens, V vocabulary.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from fornax.checkpoint.safetensors_file import StoredTensor
from fornax.config.errors import CheckpointError
from fornax.models import Activations, LayerByLayer, StoredModel
from fornax.quant.inputs import RoundedInputs

__all__ = [
    "HeldOut",
    "Roundings",
    "Run",
    "batches",
    "compare",
    "compare_logits",
    "run_rows",
    "weight_error",
]

_TOKENS = 4096
"""Tokens run at a time, in whole rows."""
_CHUNK = 2**22


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Two models on the same text."""

    tokens: int
    """Tokens predicted."""
    kl: float
    """Mean over tokens of the divergence of the quantized model's distribution from the float
    model's, nats."""
    float_loss: float
    """Nats per token."""
    loss: float
    """That of the quantized model."""

    @property
    def increase(self) -> float:
        """Of the loss, as a share of the float model's."""
        return self.loss / self.float_loss - 1


def batches(rows_NT: np.ndarray) -> Iterator[jax.Array]:
    """Rows, some at a time."""
    step = max(1, _TOKENS // rows_NT.shape[1])
    return (jnp.asarray(rows_NT[at : at + step]) for at in range(0, len(rows_NT), step))


Roundings = Mapping[int | None, Mapping[str, RoundedInputs]]
"""By number of a layer, None outside the layers: those of `find_roundings`."""


@dataclass(frozen=True)
class Run:
    """A model, and what its last layer gives for rows of text."""

    model: LayerByLayer
    tokens: list[jax.Array]
    last: list[Activations]
    """By item of `tokens`."""


def run_rows(stored: StoredModel, rows_NT: np.ndarray, roundings: Roundings | None = None) -> Run:
    """Run a model over int32 tokens, a layer at a time; `roundings` are of inputs of products."""
    own = roundings or {}
    model, tokens = LayerByLayer(stored, own.get(None)), [*batches(rows_NT)]
    found = [model.embed(tokens_BT) for tokens_BT in tokens]
    for index in range(len(model.kinds)):
        layer = model.layer(index)
        found = [model.run(layer, index, each, own.get(index)) for each in found]
    return Run(model, tokens, found)


def compare(one: Run, other: Run) -> HeldOut:
    """What the float model and the quantized one, `other`, predict for the same rows."""
    return compare_logits(one, _rows(other))


def compare_logits(one: Run, rows: Iterable[jax.Array | np.ndarray]) -> HeldOut:
    """What a float model predicts beside the logits [T - 1, V] of each of its rows."""
    kl, losses, count = 0.0, np.zeros(2), 0
    targets = (tokens_T for tokens_BT in one.tokens for tokens_T in tokens_BT)
    for tokens_T, mine_TV, other_TV in zip(targets, _rows(one), rows, strict=True):
        p_TV, q_TV = jax.nn.log_softmax(mine_TV), jax.nn.log_softmax(other_TV)
        targets_T1 = tokens_T[1:, None]
        kl += float(jnp.sum(jnp.exp(p_TV) * (p_TV - q_TV)))
        for number, found in enumerate((p_TV, q_TV)):
            losses[number] -= float(jnp.take_along_axis(found, targets_T1, axis=1).sum())
        count += len(targets_T1)
    before, after = (losses / count).tolist()
    return HeldOut(tokens=count, kl=kl / count, float_loss=before, loss=after)


def _rows(run: Run) -> Iterator[jax.Array]:
    """Logits [T - 1, V] of each row."""
    for tokens_BT, after in zip(run.tokens, run.last, strict=True):
        yield from (_row(run.model, after, row) for row in range(len(tokens_BT)))


def _row(model: LayerByLayer, after: Activations, row: int) -> jax.Array:
    """Logits [T - 1, V] of one row, without the last token's."""
    one = Activations(after.x_BTD[row : row + 1, :-1], None, {})
    return model.logits(one)[0]


def weight_error(
    leaf: StoredTensor, pairs: Iterable[tuple[np.ndarray, np.ndarray]], *, nearest: bool
) -> float:
    """Squared error of what was read back of a tensor, as a share of its squares.

    Args:
      leaf: the tensor.
      pairs: its matrices [O, I], and the same ones read back.
      nearest: whether codes are those nearest to the weights, whose error is below 1. GPTQ moves
        weights further where outliers leave few codes and outputs gain by it.

    Raises:
      CheckpointError: when it is none of a matrix that was quantized.
    """
    error = total = 0.0
    for w, read in pairs:
        step = max(1, _CHUNK // max(1, w.shape[1]))
        for at in range(0, len(w), step):
            wide = w[at : at + step].astype(np.float32)
            error += float(((read[at : at + step].astype(np.float32) - wide) ** 2).sum())
            total += float((wide**2).sum())
    share = error / total if total else error
    if not share < (1 if nearest else math.inf):
        raise CheckpointError(
            f"{leaf.name} reads back with a squared error of {share:.3g} of its squares; nothing "
            "was committed: check the disk and run again"
        )
    return share
