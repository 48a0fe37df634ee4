"""Distillation: divergences between a teacher and a student, on whole logits or the top K.

Legend: V vocabulary, K tokens of the teacher; any leading dimensions, such as [B, T].
"""

from typing import Literal

import jax
import jax.numpy as jnp

from fornax.config.errors import ConfigError
from fornax.tune.losses._arrays import Metrics, log_one_minus_exp, reported, wide

__all__ = [
    "Divergence",
    "Tail",
    "check_divergence",
    "check_topk",
    "forward_kl",
    "jensen_shannon",
    "logits_divergence",
    "reverse_kl",
    "topk_divergence",
    "topk_forward_kl",
    "topk_jensen_shannon",
    "topk_reverse_kl",
]


Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon"]


def forward_kl(
    student_logits: jax.Array, teacher_logits: jax.Array, *, temperature: float = 1.0
) -> tuple[jax.Array, Metrics]:
    """KL(teacher || student), as in Hinton et al. 2015: the student covers all the teacher does.

    loss = sum over tokens of p (log p - log q), p and q the softmax of teacher's and student's
    logits / temperature. Its gradient at the student's logits is (q - p) / temperature; to keep
    the gradient's size as the temperature rises, multiply by temperature ** 2, as Hinton et al. do.

    Args:
        student_logits: [..., V].
        teacher_logits: [..., V]; no gradient. Minus infinity: a token the teacher never emits.
        temperature: above 0, of both.

    Returns:
        loss [...], in nats; metrics [...]: agreement (1 where both rank the same token first).

    Raises:
        ConfigError: a temperature that is not above 0, or two vocabularies.

    Example:
        >>> loss, _ = forward_kl(jnp.zeros((1, 2)), jnp.log(jnp.array([[0.9, 0.1]])))
        >>> round(float(loss[0]), 4)  # log 2 less the entropy of (0.9, 0.1)
        0.3681
    """
    return logits_divergence("forward_kl", student_logits, teacher_logits, 0.5, temperature)


def reverse_kl(
    student_logits: jax.Array, teacher_logits: jax.Array, *, temperature: float = 1.0
) -> tuple[jax.Array, Metrics]:
    """KL(student || teacher) (MiniLLM, Gu et al. 2023): the student stays where the teacher is.

    loss = sum over tokens of q (log q - log p).

    Args:
        student_logits: [..., V].
        teacher_logits: [..., V], finite; no gradient.
        temperature: above 0, of both.

    Returns:
        loss [...] and the metrics of `forward_kl`.

    Raises:
        ConfigError: see `forward_kl`.
    """
    return logits_divergence("reverse_kl", student_logits, teacher_logits, 0.5, temperature)


def jensen_shannon(
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> tuple[jax.Array, Metrics]:
    """The generalised Jensen-Shannon divergence of GKD (Agarwal et al. 2023, equation 1).

    loss = beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q. Divided by beta it
    tends to KL(teacher || student) at beta 0, divided by 1 - beta to KL(student || teacher) at 1;
    itself it is 0 there, so both ends are refused: call `forward_kl` or `reverse_kl`.

    Args:
        student_logits: [..., V].
        teacher_logits: [..., V]; no gradient.
        beta: weight of the teacher, above 0 and below 1.
        temperature: above 0, of both.

    Returns:
        loss [...], at most log 2, and the metrics of `forward_kl`.

    Raises:
        ConfigError: see `forward_kl`, or `beta` out of its range.
    """
    return logits_divergence("jensen_shannon", student_logits, teacher_logits, beta, temperature)


def divergence(kind: Divergence, student: jax.Array, teacher: jax.Array, beta: float) -> jax.Array:
    """Return the divergence [...] of two log-distributions [..., V]; the teacher may hold -inf."""
    possible = teacher > -jnp.inf
    p = jnp.exp(teacher)
    if kind == "forward_kl":
        return jnp.sum(p * (jnp.where(possible, teacher, 0) - student), axis=-1)
    if kind == "reverse_kl":
        return jnp.sum(jnp.exp(student) * (student - teacher), axis=-1)
    mixed = jnp.logaddexp(student + jnp.log1p(-beta), teacher + jnp.log(beta))
    to_teacher = jnp.sum(p * (jnp.where(possible, teacher, 0) - mixed), axis=-1)
    to_student = jnp.sum(jnp.exp(student) * (student - mixed), axis=-1)
    return beta * to_teacher + (1 - beta) * to_student


def check_divergence(kind: str, beta: float, temperature: float) -> None:
    """Raise ConfigError for a divergence that is unknown or has numbers out of their ranges."""
    known = ("forward_kl", "reverse_kl", "jensen_shannon")
    if kind not in known:
        raise ConfigError(f"divergence={kind!r} is unknown; use one of: {', '.join(known)}")
    if kind == "jensen_shannon" and not 0 < beta < 1:
        raise ConfigError(
            f"jensen_shannon: beta={beta} must lie between 0 and 1, both excluded; use forward_kl "
            "for 0 and reverse_kl for 1"
        )
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature} must be above 0")


def logits_divergence(
    kind: Divergence,
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    beta: float,
    temperature: float,
) -> tuple[jax.Array, Metrics]:
    """What the three functions above compute, by the divergence's name."""
    check_divergence(kind, beta, temperature)
    if student_logits.shape[-1] != teacher_logits.shape[-1]:
        raise ConfigError(
            f"the student has {student_logits.shape[-1]} words and the teacher "
            f"{teacher_logits.shape[-1]}; where one only fills up its table, cut both to the words "
            "that they share"
        )
    student, teacher = wide(student_logits, teacher_logits)
    teacher = jax.lax.stop_gradient(teacher)
    agreement = jnp.argmax(student, axis=-1) == jnp.argmax(teacher, axis=-1)
    student = jax.nn.log_softmax(student / temperature, axis=-1)
    teacher = jax.nn.log_softmax(teacher / temperature, axis=-1)
    loss = divergence(kind, student, teacher, beta)
    return loss, reported(agreement=agreement.astype(loss.dtype))


Tail = Literal["bucket", "renormalise", "drop"]
"""What becomes of the tokens that were not stored. `bucket`: they count as one more token, on both
sides. `renormalise`: both sides are conditioned on the stored tokens. `drop`: the sum over the
stored tokens alone, no divergence any more: it can fall below 0 and rewards mass outside them."""


def topk_forward_kl(
    student_logits: jax.Array,
    teacher_ids: jax.Array,
    teacher_logprobs: jax.Array,
    *,
    temperature: float = 1.0,
    tail: Tail = "bucket",
) -> tuple[jax.Array, Metrics]:
    """KL(teacher || student) over the teacher's K likeliest tokens and the rest.

    With `bucket`, loss = sum over the K of p (log p - log q) + p_rest (log p_rest - log q_rest): a
    lower bound of the whole divergence, exact as p_rest goes to 0.

    Args:
        student_logits: [..., V].
        teacher_ids: int [..., K], different tokens; below 0 for none.
        teacher_logprobs: [..., K], the log-softmax of all the teacher's logits / temperature.
        temperature: above 0, of the student; the one that the teacher's were stored at.
        tail: what becomes of the tokens that were not stored.

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
    """KL(student || teacher) over the teacher's K likeliest tokens and the rest.

    Arguments, results and errors are those of `topk_forward_kl`. With `drop` nothing keeps the
    student from leaving the stored tokens: use one of the two others.
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
    """The generalised Jensen-Shannon divergence over the K likeliest tokens and the rest.

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
    # a slot that holds no token is not counted on either side
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
    """Raise ConfigError where the teacher's tokens do not fit the student's table or each other."""
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
