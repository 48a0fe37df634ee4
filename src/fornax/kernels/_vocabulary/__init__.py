"""Losses and log-probabilities straight from hidden states: whole logits [T, V] never exist."""

from fornax.kernels._vocabulary.cross_entropy import (
    LossSums,
    cross_entropy_operation,
    linear_cross_entropy,
)
from fornax.kernels._vocabulary.linear_loss import LogitsLoss, linear_loss
from fornax.kernels._vocabulary.logprobs import (
    TokenLogprobs,
    linear_logprobs,
    logits_logprobs,
    logprobs_operation,
)

__all__ = [
    "LogitsLoss",
    "LossSums",
    "TokenLogprobs",
    "cross_entropy_operation",
    "linear_cross_entropy",
    "linear_logprobs",
    "linear_loss",
    "logits_logprobs",
    "logprobs_operation",
]
