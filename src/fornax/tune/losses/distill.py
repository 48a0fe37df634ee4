"""Distillation on whole distributions: divergences between a teacher and a student.

Legend: V vocabulary; any leading dimensions, such as [B, T].
"""

from typing import Literal

import jax
import jax.numpy as jnp

from fornax.config.errors import ConfigError
from fornax.tune.losses._arrays import Metrics, reported, wide

__all__ = [
    "Divergence",
    "check_divergence",
    "divergence",
    "forward_kl",
    "jensen_shannon",
    "reverse_kl",
]

Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon"]


def forward_kl(
    student_logits: jax.Array, teacher_logits: jax.Array, *, temperature: float = 1.0
) -> tuple[jax.Array, Metrics]:
    """KL(teacher || student), as in Hinton et al. 2015: the student covers all the teacher does.

    loss = sum over words of p (log p - log q), p and q the softmax of teacher's and student's
    logits / temperature. Its gradient at the student's logits is (q - p) / temperature; to keep
    the gradient's size as the temperature rises, multiply by temperature ** 2, as Hinton et al. do.

    Args:
        student_logits: [..., V].
        teacher_logits: [..., V]; no gradient. Minus infinity: a word the teacher never says.
        temperature: above 0, of both.

    Returns:
        loss [...], in nats; metrics [...]: agreement (1 where both like the same word best).

    Raises:
        ConfigError: a temperature that is not above 0, or two vocabularies.

    Example:
        >>> loss, _ = forward_kl(jnp.zeros((1, 2)), jnp.log(jnp.array([[0.9, 0.1]])))
        >>> round(float(loss[0]), 4)  # log 2 less the entropy of (0.9, 0.1)
        0.3681
    """
    return _whole("forward_kl", student_logits, teacher_logits, 0.5, temperature)


def reverse_kl(
    student_logits: jax.Array, teacher_logits: jax.Array, *, temperature: float = 1.0
) -> tuple[jax.Array, Metrics]:
    """KL(student || teacher) (MiniLLM, Gu et al. 2023): the student stays where the teacher is.

    loss = sum over words of q (log q - log p).

    Args:
        student_logits: [..., V].
        teacher_logits: [..., V], finite; no gradient.
        temperature: above 0, of both.

    Returns:
        loss [...] and the metrics of `forward_kl`.

    Raises:
        ConfigError: see `forward_kl`.
    """
    return _whole("reverse_kl", student_logits, teacher_logits, 0.5, temperature)


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
    return _whole("jensen_shannon", student_logits, teacher_logits, beta, temperature)


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


def _whole(
    kind: Divergence,
    student_logits: jax.Array,
    teacher_logits: jax.Array,
    beta: float,
    temperature: float,
) -> tuple[jax.Array, Metrics]:
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
