"""What one call for log-probabilities of given tokens looks like, and what it returns.

Legend: T tokens (all rows of a batch, flattened), D model width, V vocabulary, C tokens of a chunk.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fornax.kernels._cross_entropy.call import batch_shards
from fornax.kernels._vocabulary import check_products
from fornax.kernels.registry import current_platform

__all__ = ["LogprobsCall", "LogprobsInputs", "TokenLogprobs", "describe"]


class TokenLogprobs(NamedTuple):
    """One value a token, float32 (float64 for float64 inputs), in nats. Both carry gradients."""

    logprobs: jax.Array
    """Log-probability of the target."""
    entropy: jax.Array | None
    """Entropy of the whole distribution, where it was asked for."""


@dataclass(frozen=True)
class LogprobsCall:
    """Shapes, dtypes and options of one call: what implementations look at when they decline."""

    platform: str
    tokens: int
    width: int
    vocabulary: int
    dtype: str
    softcap: float | None
    entropy: bool
    chunk: int
    shards: int


@dataclass(frozen=True)
class LogprobsInputs:
    """The arrays and options of one call; `chunk` is the whole mesh's tokens per chunk.

    Arrays of tokens may have two leading dimensions, batch and length, instead of one.
    """

    x_TD: jax.Array
    w_DV: jax.Array
    targets_T: jax.Array
    temperature_T: jax.Array
    softcap: float | None
    entropy: bool
    chunk: int


def describe(inputs: LogprobsInputs) -> LogprobsCall:
    """Check the inputs of a call against each other and describe it.

    Raises:
        KernelError: shapes, dtypes or options that do not fit together.
    """
    x, w, targets = inputs.x_TD, inputs.w_DV, inputs.targets_T
    check_products("linear_logprobs", x, w, targets, inputs.chunk, inputs.softcap)
    return LogprobsCall(
        platform=current_platform(),
        tokens=math.prod(x.shape[:-1]),
        width=x.shape[-1],
        vocabulary=w.shape[1],
        dtype=jnp.dtype(x.dtype).name,
        softcap=inputs.softcap,
        entropy=inputs.entropy,
        chunk=inputs.chunk,
        shards=batch_shards(),
    )
