"""The operation for log-probabilities of given tokens: its signature and its implementations.

Legend: T tokens (batch and length flattened), D model width, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import KernelError
from fornax.kernels._cross_entropy.call import batch_shards
from fornax.kernels._logprobs.call import LogprobsCall, LogprobsInputs, TokenLogprobs, describe
from fornax.kernels._logprobs.chunked import chunked
from fornax.kernels._logprobs.reference import from_logits, reference
from fornax.kernels._logprobs.rehearsal import rehearse
from fornax.kernels.registry import Implementation, Operation

__all__ = ["linear_logprobs", "logits_logprobs", "logprobs_operation"]

logprobs_operation: Operation[LogprobsCall] = Operation(
    "linear_logprobs",
    (
        Implementation("chunked", chunked, lambda call: None),
        Implementation("reference", reference, lambda call: None),
    ),
    rehearse,
)


def linear_logprobs(
    x_TD: jax.Array,
    w_DV: jax.Array,
    targets_T: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    chunk: int = 1024,
    implementation: str | None = None,
) -> TokenLogprobs:
    """Project to the vocabulary and take the log-probability of each target.

    logits = softcap(x w) / temperature; logprob_t = logits_t[target_t] - lse_t, where lse_t is the
    log of the sum of exp(logits_t); entropy_t = lse_t - sum(p_t logits_t). Logits [T, V] of more
    than `chunk` tokens never exist at once, and both outputs carry gradients to x and w.

    The backward pass makes the logits again, unless they fit in one chunk. Where w has no gradient
    (adapters on a frozen model) and no entropy is asked for, the gradient of x is made in the
    forward pass and only scaled in the backward pass, which costs a third less.

    Args:
        x_TD: final hidden states, one floating dtype for x and w. This and targets may also be
            [B, T, ...]: not flattened, a batch divided in length as well stays where it is.
        w_DV: output projection (a tied embedding transposed).
        targets_T: int32 tokens. A negative one gives 0 without a gradient; one beyond the
            vocabulary gives NaN.
        temperature: above 0; one number, or one a token (broadcast to the targets). No gradient.
        softcap: c in logit = c tanh(logit / c), before the temperature.
        entropy: whether to return it.
        chunk: tokens per device whose logits exist at once.
        implementation: name of one implementation to run, no other.

    Returns:
        Values in float32 (float64 for float64 inputs), shaped like the targets.

    Raises:
        KernelError: arguments that do not fit together, or `implementation` cannot run the call.

    Example:
        >>> x_TD, w_DV = jnp.ones((2, 4)), jnp.zeros((4, 8))
        >>> linear_logprobs(x_TD, w_DV, jnp.array([3, 5])).logprobs  # two times -log(8)
        Array([-2.0794415, -2.0794415], dtype=float32)
    """
    inputs = LogprobsInputs(
        x_TD=x_TD,
        w_DV=w_DV,
        targets_T=targets_T,
        temperature_T=_temperatures(temperature, targets_T, x_TD.dtype),
        softcap=softcap,
        entropy=entropy,
        chunk=chunk * batch_shards(),
    )
    return logprobs_operation.choose(describe(inputs), implementation).run(inputs)


def logits_logprobs(
    logits: jax.Array,
    targets: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    entropy: bool = False,
) -> TokenLogprobs:
    """The same values as `linear_logprobs` from logits at hand, the softcap already applied.

    Args:
        logits: [..., V]; minus infinity where a filter took a word out.
        targets: int32 [...]; see `linear_logprobs`.
        temperature: above 0; one number, or one a target. No gradient.
        entropy: whether to return it.

    Returns:
        Values in float32 (float64 for float64 logits), shaped like the targets.

    Raises:
        KernelError: a temperature that is not above 0, or shapes that do not fit together.
    """
    if logits.shape[:-1] != targets.shape:
        raise KernelError(
            f"logits_logprobs: targets{targets.shape} need one value per row of logits: "
            f"{logits.shape[:-1]}"
        )
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return from_logits(
        wide, targets, _temperatures(temperature, targets, wide.dtype), entropy=entropy
    )


def _temperatures(
    temperature: float | jax.Array, targets: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Return one temperature a token, at least float32, without a gradient.

    Raises:
        KernelError: a number that is not above 0, or a shape that does not broadcast.
    """
    if isinstance(temperature, (int, float)) and not temperature > 0:
        raise KernelError(
            f"temperature={temperature} must be above 0; greedy choice has no log-probabilities "
            "to learn from"
        )
    shape = np.shape(temperature)
    pairs = zip(reversed(shape), reversed(targets.shape), strict=False)
    if len(shape) > targets.ndim or any(own not in (1, size) for own, size in pairs):
        raise KernelError(
            f"temperature{shape} does not broadcast to the targets {targets.shape}; give one "
            "number, or one a token"
        )
    wide = jnp.promote_types(dtype, jnp.float32)
    return jax.lax.stop_gradient(jnp.broadcast_to(jnp.asarray(temperature, wide), targets.shape))
