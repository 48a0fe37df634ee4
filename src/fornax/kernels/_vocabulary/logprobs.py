"""Log-probabilities of given tokens straight from hidden states, never with all logits at once.

Legend: T tokens (batch and length flattened), D model width, V vocabulary, C tokens of a chunk.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import KernelError
from fornax.kernels._vocabulary.division import batch_shards
from fornax.kernels._vocabulary.logprobs_chunked import chunked_logprobs
from fornax.kernels._vocabulary.walk import (
    ProductCall,
    benchmark_products,
    check_products,
    check_targets,
    work_of_products,
)
from fornax.kernels.registry import Implementation, Operation, current_platform, register

__all__ = ["TokenLogprobs", "linear_logprobs", "logits_logprobs", "logprobs_operation"]


class TokenLogprobs(NamedTuple):
    """One value per token, float32 (float64 for float64 inputs), in nats. Both carry gradients."""

    logprobs: jax.Array
    """Log-probability of the target."""
    entropy: jax.Array | None
    """Entropy of the whole distribution, where it was asked for."""


@dataclass(frozen=True)
class LogprobsCall(ProductCall):
    """A product, and whether the entropy is asked for."""

    entropy: bool


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
        temperature: above 0; one number, or one per token (broadcast to the targets). No gradient.
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
    return logprobs_operation.choose(_describe(inputs), implementation).run(inputs)


def logits_logprobs(
    logits: jax.Array,
    targets: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    entropy: bool = False,
) -> TokenLogprobs:
    """The same values as `linear_logprobs` from given logits, the softcap already applied.

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
    return _from_logits(
        wide, targets, _temperatures(temperature, targets, wide.dtype), entropy=entropy
    )


def _temperatures(
    temperature: float | jax.Array, targets: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """Return one temperature per token, at least float32, without a gradient.

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
            "number, or one per token"
        )
    wide = jnp.promote_types(dtype, jnp.float32)
    return jax.lax.stop_gradient(jnp.broadcast_to(jnp.asarray(temperature, wide), targets.shape))


def _describe(inputs: LogprobsInputs) -> LogprobsCall:
    """Check the inputs of a call against each other and describe it.

    Raises:
        KernelError: shapes, dtypes or options that do not fit together.
    """
    x, w = inputs.x_TD, inputs.w_DV
    check_products("linear_logprobs", x, w, inputs.chunk, inputs.softcap)
    check_targets("linear_logprobs", x, inputs.targets_T)
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


def _chunked(inputs: LogprobsInputs) -> TokenLogprobs:
    """Compute them with at most `inputs.chunk` rows of logits in memory."""
    logprobs, entropy = chunked_logprobs(
        inputs.x_TD,
        inputs.w_DV,
        inputs.targets_T,
        1 / inputs.temperature_T,
        softcap=inputs.softcap,
        entropy=inputs.entropy,
        chunk=inputs.chunk,
    )
    return TokenLogprobs(logprobs, entropy if inputs.entropy else None)


def _reference(inputs: LogprobsInputs) -> TokenLogprobs:
    """Compute them from whole logits [T, V], in float64 for float64 inputs, else float32."""
    dtype = jnp.promote_types(inputs.x_TD.dtype, jnp.float32)
    x, w_DV = inputs.x_TD.astype(dtype), inputs.w_DV.astype(dtype)
    logits = jnp.einsum("...D,DV->...V", x, w_DV, precision="highest")
    if inputs.softcap is not None:
        logits = inputs.softcap * jnp.tanh(logits / inputs.softcap)
    temperature = jax.lax.stop_gradient(inputs.temperature_T.astype(dtype))
    return _from_logits(logits, inputs.targets_T, temperature, entropy=inputs.entropy)


def _from_logits(
    logits: jax.Array, targets: jax.Array, temperature: jax.Array, *, entropy: bool
) -> TokenLogprobs:
    """Log-softmax of logits [..., V] / temperature [...] at targets [...], in the logits' dtype.

    A logit of minus infinity is a word that cannot be drawn. A negative target counts as none: 0,
    with no gradient; one beyond the vocabulary gives NaN.
    """
    scaled = logits / temperature[..., None]
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    index = jnp.clip(targets, 0, logits.shape[-1] - 1)[..., None]
    chosen = jnp.take_along_axis(logprobs, index, axis=-1)[..., 0]
    chosen = jnp.where(targets >= logits.shape[-1], jnp.nan, chosen)
    chosen = jnp.where(targets < 0, 0, chosen)
    if not entropy:
        return TokenLogprobs(chosen, None)
    possible = scaled > -jnp.inf
    surprise = jnp.exp(logprobs) * jnp.where(possible, logprobs, 0)
    return TokenLogprobs(chosen, -jnp.sum(surprise, axis=-1))


def _benchmark(
    call: LogprobsCall, run: Callable[[LogprobsInputs], TokenLogprobs]
) -> Callable[[], object]:
    """Return a function that computes the values and gradients of one random call like `call`."""

    def loss(x_TD: jax.Array, w_DV: jax.Array, targets_T: jax.Array) -> jax.Array:
        inputs = LogprobsInputs(
            x_TD=x_TD,
            w_DV=w_DV,
            targets_T=targets_T,
            temperature_T=jnp.ones(call.tokens),
            softcap=call.softcap,
            entropy=call.entropy,
            chunk=call.chunk,
        )
        found = run(inputs)
        return jnp.sum(found.logprobs) + (0 if found.entropy is None else jnp.sum(found.entropy))

    return benchmark_products(call, loss)


logprobs_operation: Operation[LogprobsCall] = register(
    Operation(
        "linear_logprobs",
        (
            Implementation("chunked", _chunked, lambda call: None),
            Implementation("reference", _reference, lambda call: None),
        ),
        _benchmark,
        work=work_of_products,
        call=LogprobsCall,
    )
)
