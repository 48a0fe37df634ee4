"""Distillation straight from hidden states: logits [T, V] of neither model ever exist whole.

Legend: T tokens (or [B, T]), D and E width of student and teacher, V vocabulary, K tokens stored, C
tokens of a chunk.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fornax.config.errors import ConfigError
from fornax.kernels import linear_loss
from fornax.tune.losses.distill import (
    Divergence,
    Tail,
    check_divergence,
    check_topk,
    logits_divergence,
    topk_divergence,
)

__all__ = ["DistillSums", "linear_distillation", "linear_topk_distillation"]


class DistillSums(NamedTuple):
    """Weighted sums over tokens, float32 scalars; differentiate `loss_sum`."""

    loss_sum: jax.Array
    weight_sum: jax.Array
    agreement_sum: jax.Array
    """Weights of the tokens where both models rank the same token first."""


@dataclass(frozen=True)
class _Whole:
    """The loss of a chunk against the teacher's hidden states; hashable, for it is compiled in."""

    divergence: Divergence
    beta: float
    temperature: float
    softcap: float | None
    vocabulary: int

    def __call__(
        self, logits_CV: jax.Array, teacher_x_CE: jax.Array, teacher_w_EV: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        teacher_CV = jnp.dot(teacher_x_CE, teacher_w_EV, preferred_element_type=logits_CV.dtype)
        if self.softcap is not None:
            teacher_CV = self.softcap * jnp.tanh(teacher_CV / self.softcap)
        arrays = (logits_CV[:, : self.vocabulary], teacher_CV[:, : self.vocabulary])
        return logits_divergence(self.divergence, *arrays, self.beta, self.temperature)


@dataclass(frozen=True)
class _Stored:
    """The loss of a chunk against stored tokens of the teacher."""

    divergence: Divergence
    beta: float
    temperature: float
    tail: Tail

    def __call__(
        self, logits_CV: jax.Array, stored: tuple[jax.Array, jax.Array], nothing: None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        del nothing
        return topk_divergence(
            self.divergence,
            logits_CV,
            *stored,
            beta=self.beta,
            temperature=self.temperature,
            tail=self.tail,
        )


@jax.named_scope("loss")
def linear_distillation(
    x_TD: jax.Array,
    w_DV: jax.Array,
    teacher_x_TE: jax.Array,
    teacher_w_EV: jax.Array,
    weights_T: jax.Array,
    *,
    divergence: Divergence = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    vocabulary: int | None = None,
    chunk: int = 1024,
) -> DistillSums:
    """Sum a divergence between teacher and student over tokens, a chunk of logits at a time.

    The same numbers as `forward_kl`, `reverse_kl` or `jensen_shannon` on whole logits.

    Args:
        x_TD: the student's final hidden states, [T, D] or [B, T, D].
        w_DV: the student's output projection, in x's dtype.
        teacher_x_TE: the teacher's hidden states at the same tokens; no gradient.
        teacher_w_EV: the teacher's output projection; no gradient.
        weights_T: float32 weight of each token.
        divergence: which one.
        beta: see `jensen_shannon`; not useful to the others.
        temperature: above 0, of both.
        softcap: the student's c in logit = c tanh(logit / c).
        teacher_softcap: the teacher's.
        vocabulary: how many tokens, from the first, both tables share; None: all, and the tables
            must be of one size. Tables are often filled up to a round number.
        chunk: tokens per device whose logits exist at once.

    Returns:
        Sums over tokens.

    Raises:
        ConfigError: names, numbers or vocabularies that do not fit.
        KernelError: shapes or dtypes that do not fit.
    """
    check_divergence(divergence, beta, temperature)
    sizes = (w_DV.shape[1], teacher_w_EV.shape[1])
    shared = sizes[0] if vocabulary is None else vocabulary
    if vocabulary is None and sizes[0] != sizes[1]:
        raise ConfigError(
            f"the student's output projection has {sizes[0]} words and the teacher's {sizes[1]}; "
            "if both use one tokenizer, set vocabulary to its size"
        )
    if not 0 < shared <= min(sizes):
        raise ConfigError(
            f"vocabulary={shared} must be between 1 and {min(sizes)}, the smaller one"
        )
    total, metrics = linear_loss(
        _Whole(divergence, float(beta), float(temperature), teacher_softcap, shared),
        x_TD,
        w_DV,
        teacher_x_TE,
        teacher_w_EV,
        weights_T,
        softcap=softcap,
        chunk=chunk,
    )
    return DistillSums(total, _sum(weights_T, total.dtype), metrics["agreement"])


@jax.named_scope("loss")
def linear_topk_distillation(
    x_TD: jax.Array,
    w_DV: jax.Array,
    teacher_ids_TK: jax.Array,
    teacher_logprobs_TK: jax.Array,
    weights_T: jax.Array,
    *,
    divergence: Divergence = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    tail: Tail = "bucket",
    softcap: float | None = None,
    chunk: int = 1024,
) -> DistillSums:
    """Sum a divergence between stored tokens of a teacher and a student over tokens.

    Args:
        x_TD: the student's final hidden states, [T, D] or [B, T, D].
        w_DV: the student's output projection, in x's dtype.
        teacher_ids_TK: int32, different tokens at each token; below 0 for none.
        teacher_logprobs_TK: the log-softmax of all the teacher's logits / temperature.
        weights_T: float32 weight of each token.
        divergence: which one.
        beta: see `jensen_shannon`; not useful to the others.
        temperature: above 0, of the student; the one that the teacher's were stored at.
        tail: what becomes of the tokens that were not stored.
        softcap: the student's c in logit = c tanh(logit / c).
        chunk: tokens per device whose logits exist at once.

    Returns:
        Sums over tokens.

    Raises:
        ConfigError: names, numbers or shapes that do not fit.
        KernelError: shapes or dtypes that do not fit.
    """
    check_divergence(divergence, beta, temperature)
    check_topk(w_DV.shape[1], teacher_ids_TK, teacher_logprobs_TK, tail)
    total, metrics = linear_loss(
        _Stored(divergence, float(beta), float(temperature), tail),
        x_TD,
        w_DV,
        (teacher_ids_TK, teacher_logprobs_TK),
        None,
        weights_T,
        softcap=softcap,
        chunk=chunk,
    )
    return DistillSums(total, _sum(weights_T, total.dtype), metrics["agreement"])


def _sum(weights_T: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.sum(weights_T.astype(dtype))
