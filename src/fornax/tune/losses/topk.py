"""Distillation from the teacher's K likeliest words, as they are stored on disk.

Legend: V vocabulary, K words of the teacher; any leading dimensions, such as [B, T].
"""

from typing import Literal

import jax
import jax.numpy as jnp

from fornax.config.errors import ConfigError
from fornax.tune.losses._arrays import Metrics, log_one_minus_exp, reported, wide
from fornax.tune.losses.distill import Divergence, check_divergence, divergence

__all__ = [
    "Tail",
    "check_topk",
    "topk_divergence",
    "topk_forward_kl",
    "topk_jensen_shannon",
    "topk_reverse_kl",
]

Tail = Literal["bucket", "renormalise", "drop"]
"""What becomes of the words that were not stored. `bucket`: they count as one more word, on both
sides. `renormalise`: both sides are conditioned on the stored words. `drop`: the sum over the
stored words alone, no divergence any more: it can fall below 0 and rewards mass outside them."""


def topk_forward_kl(
    student_logits: jax.Array,
    teacher_ids: jax.Array,
    teacher_logprobs: jax.Array,
    *,
    temperature: float = 1.0,
    tail: Tail = "bucket",
) -> tuple[jax.Array, Metrics]:
    """KL(teacher || student) over the teacher's K likeliest words and the rest.

    With `bucket`, loss = sum over the K of p (log p - log q) + p_rest (log p_rest - log q_rest): a
    lower bound of the whole divergence, exact as p_rest goes to 0.

    Args:
        student_logits: [..., V].
        teacher_ids: int [..., K], different words; below 0 for none.
        teacher_logprobs: [..., K], the log-softmax of all the teacher's logits / temperature.
        temperature: above 0, of the student; the one that the teacher's were stored at.
        tail: what becomes of the words that were not stored.

    Returns:
        loss [...]; metrics [...]: agreement (1 where the student's favourite is the teacher's),
        tail (the teacher's mass outside the K).

    Raises:
        ConfigError: names, numbers or shapes that do not fit.
    """
    arrays = (student_logits, teacher_ids, teacher_logprobs)
    return topk_divergence("forward_kl", *arrays, temperature=temperature, tail=tail)


def topk_reverse_kl(
    student_logits: jax.Array,
    teacher_ids: jax.Array,
    teacher_logprobs: jax.Array,
    *,
    temperature: float = 1.0,
    tail: Tail = "bucket",
) -> tuple[jax.Array, Metrics]:
    """KL(student || teacher) over the teacher's K likeliest words and the rest.

    Arguments, results and errors are those of `topk_forward_kl`. With `drop` nothing keeps the
    student from leaving the stored words: use one of the two others.
    """
    arrays = (student_logits, teacher_ids, teacher_logprobs)
    return topk_divergence("reverse_kl", *arrays, temperature=temperature, tail=tail)


def topk_jensen_shannon(
    student_logits: jax.Array,
    teacher_ids: jax.Array,
    teacher_logprobs: jax.Array,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    tail: Tail = "bucket",
) -> tuple[jax.Array, Metrics]:
    """The generalised Jensen-Shannon divergence over the K likeliest words and the rest.

    `beta` is that of `jensen_shannon`; the other arguments, results and errors are those of
    `topk_forward_kl`.
    """
    arrays = (student_logits, teacher_ids, teacher_logprobs)
    return topk_divergence("jensen_shannon", *arrays, beta=beta, temperature=temperature, tail=tail)


def topk_divergence(
    kind: Divergence,
    student_logits: jax.Array,
    teacher_ids: jax.Array,
    teacher_logprobs: jax.Array,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    tail: Tail = "bucket",
) -> tuple[jax.Array, Metrics]:
    """What the three functions above compute, by the divergence's name."""
    check_divergence(kind, beta, temperature)
    check_topk(student_logits.shape[-1], teacher_ids, teacher_logprobs, tail)
    raw, teacher = wide(student_logits, teacher_logprobs)
    stored = teacher_ids >= 0
    ids = jnp.where(stored, teacher_ids, 0)
    teacher = jax.lax.stop_gradient(jnp.where(stored, teacher, -jnp.inf))
    scaled = raw / temperature
    whole = jax.nn.logsumexp(scaled, axis=-1, keepdims=True)
    student = jnp.take_along_axis(scaled, ids, axis=-1) - whole
    mass = jnp.minimum(jnp.sum(jnp.exp(teacher), axis=-1), 1)
    if tail == "renormalise":
        teacher = jax.nn.log_softmax(teacher, axis=-1)
        inside = jnp.where(stored, student, -jnp.inf)
        student = student - jax.nn.logsumexp(inside, axis=-1, keepdims=True)
    elif tail == "bucket" and teacher_ids.shape[-1] < raw.shape[-1]:
        # an id below 0 goes beyond the table: such updates are dropped
        beyond = jnp.where(stored, teacher_ids, raw.shape[-1])
        others = jnp.put_along_axis(scaled, beyond, -jnp.inf, axis=-1, inplace=False, mode="drop")
        rest = jax.nn.logsumexp(others, axis=-1, keepdims=True) - whole
        student = jnp.concatenate([student, rest], axis=-1)
        known = jax.nn.logsumexp(teacher, axis=-1, keepdims=True)
        teacher = jnp.concatenate([teacher, log_one_minus_exp(known)], axis=-1)
        stored = jnp.concatenate([stored, jnp.ones_like(stored[..., :1])], axis=-1)
    # a slot that holds no word counts for nothing on either side
    student = jnp.where(stored, student, _NOTHING)
    teacher = jnp.where(stored, teacher, _NOTHING if kind != "forward_kl" else -jnp.inf)
    loss = divergence(kind, student, teacher, beta)
    best = jnp.argmax(teacher[..., : ids.shape[-1]], axis=-1)[..., None]
    favourite = jnp.take_along_axis(ids, best, axis=-1)[..., 0]
    agreement = (jnp.argmax(raw, axis=-1) == favourite).astype(loss.dtype)
    return loss, reported(agreement=agreement, tail=1 - mass)


_NOTHING = -1e4
"""A log-probability whose exp is 0, and whose difference to another is finite."""


def check_topk(
    vocabulary: int, teacher_ids: jax.Array, teacher_logprobs: jax.Array, tail: str
) -> None:
    """Raise ConfigError where the teacher's words do not fit the student's table or each other."""
    if tail not in ("bucket", "renormalise", "drop"):
        raise ConfigError(f"tail={tail!r} is unknown; use one of: bucket, renormalise, drop")
    if teacher_ids.shape != teacher_logprobs.shape:
        raise ConfigError(
            f"teacher_ids{teacher_ids.shape} and teacher_logprobs{teacher_logprobs.shape} must "
            "have one shape"
        )
    if teacher_ids.shape[-1] > vocabulary:
        raise ConfigError(
            f"the teacher's {teacher_ids.shape[-1]} words are more than the student's {vocabulary}"
        )
