"""Linear cross-entropy: weighted sums over tokens of the loss of the next token.

Legend: T tokens (batch and length flattened), D model width, V vocabulary, C tokens of a chunk.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fornax.config.errors import KernelError
from fornax.kernels._vocabulary.division import Division, batch_shards, divide
from fornax.kernels._vocabulary.walk import (
    ProductCall,
    Walk,
    benchmark_products,
    check_products,
    check_targets,
    logits_of,
    summed,
    work_of_products,
)
from fornax.kernels.registry import Implementation, Operation, current_platform, register

__all__ = ["LossSums", "cross_entropy_operation", "linear_cross_entropy"]


class LossSums(NamedTuple):
    """Weighted sums over tokens, float32 scalars (float64 for float64 inputs).

    Only `loss_sum` and `weight_sum` carry gradients; the two others are for reports.
    """

    loss_sum: jax.Array
    """Sum of weight x (cross entropy + z-loss), in nats: what is differentiated."""
    weight_sum: jax.Array
    """Sum of the weights."""
    z_loss_sum: jax.Array
    """The part of `loss_sum` that is z-loss."""
    correct_sum: jax.Array
    """Sum of the weights of the tokens whose target has the highest logit."""


@dataclass(frozen=True)
class CrossEntropyCall(ProductCall):
    """A product, and whether there is a z-loss."""

    z_loss: bool


@dataclass(frozen=True)
class CrossEntropyInputs:
    """The arrays and options of one call; `chunk` is the whole mesh's tokens per chunk.

    Arrays of tokens may have two leading dimensions, batch and length, instead of one.
    """

    x_TD: jax.Array
    w_DV: jax.Array
    targets_T: jax.Array
    weights_T: jax.Array
    z_loss: float
    softcap: float | None
    chunk: int


def linear_cross_entropy(
    x_TD: jax.Array,
    w_DV: jax.Array,
    targets_T: jax.Array,
    weights_T: jax.Array,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk: int = 1024,
    implementation: str | None = None,
) -> LossSums:
    """Project to the vocabulary and sum the weighted cross entropy, never with all logits at once.

    logits = softcap(x w); loss_t = lse_t - logit_t[target_t] + z_loss * lse_t ** 2, where lse_t is
    the log of the sum of exp(logits_t). The z-loss is PaLM's (Chowdhery et al. 2022, section 5).

    Args:
        x_TD: final hidden states, one floating dtype for x and w. This, targets and weights may
            also be [B, T, ...]: not flattened, a batch divided in length as well stays where it is.
        w_DV: output projection (a tied embedding transposed).
        targets_T: int32 index of the next token; any value where the weight is 0.
        weights_T: float32 weight per token; a token of weight 0 adds nothing, whatever it holds.
        z_loss: coefficient of the squared log-normaliser.
        softcap: c in logit = c tanh(logit / c).
        chunk: tokens per device whose logits exist at once.
        implementation: name of one implementation to run, no other.

    Returns:
        Sums over tokens, accumulated in float32 (float64 for float64 inputs). Differentiate
        `loss_sum`; it includes the z-loss.

    Raises:
        KernelError: arguments that do not fit together, or `implementation` cannot run the call.
    """
    inputs = CrossEntropyInputs(
        x_TD=x_TD,
        w_DV=w_DV,
        targets_T=targets_T,
        weights_T=weights_T,
        z_loss=float(z_loss),
        softcap=softcap,
        chunk=chunk * batch_shards(),
    )
    return cross_entropy_operation.choose(_describe(inputs), implementation).run(inputs)


def _describe(inputs: CrossEntropyInputs) -> CrossEntropyCall:
    """Check the inputs of a call against each other and describe it.

    Raises:
        KernelError: shapes, dtypes or options that do not fit together.
    """
    x, w, weights = inputs.x_TD, inputs.w_DV, inputs.weights_T
    check_products("linear_cross_entropy", x, w, inputs.chunk, inputs.softcap)
    check_targets("linear_cross_entropy", x, inputs.targets_T)
    if weights.shape != x.shape[:-1]:
        raise KernelError(
            f"linear_cross_entropy: weights{weights.shape} need one value per token: {x.shape[:-1]}"
        )
    if inputs.z_loss < 0:
        raise KernelError(f"linear_cross_entropy: z_loss={inputs.z_loss} must be 0 or more")
    return CrossEntropyCall(
        platform=current_platform(),
        tokens=math.prod(x.shape[:-1]),
        width=x.shape[-1],
        vocabulary=w.shape[1],
        dtype=jnp.dtype(x.dtype).name,
        z_loss=inputs.z_loss > 0,
        softcap=inputs.softcap,
        chunk=inputs.chunk,
        shards=batch_shards(),
    )


def _chunked(inputs: CrossEntropyInputs) -> LossSums:
    """Compute the sums with at most `inputs.chunk` rows of logits in memory."""
    dtype = jnp.promote_types(inputs.x_TD.dtype, jnp.float32)
    weights = inputs.weights_T.astype(dtype)
    division = divide(inputs.x_TD, inputs.w_DV)
    walk = Walk(
        loss=_CrossEntropy(inputs.z_loss, inputs.softcap, division),
        chunk=max(1, inputs.chunk // division.token_shards),
        division=division,
        dtype=dtype,
    )
    loss, z_loss, correct = summed(walk, inputs.x_TD, inputs.w_DV, inputs.targets_T, None, weights)
    return LossSums(
        loss_sum=loss,
        weight_sum=jnp.sum(weights),
        z_loss_sum=jax.lax.stop_gradient(z_loss),
        correct_sum=jax.lax.stop_gradient(correct),
    )


_Sums = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True)
class _Scored:
    """Everything about one chunk's logits that sums and gradients need; loss before weights."""

    logits_CV: jax.Array
    hit_CV: jax.Array
    lse_C: jax.Array
    loss_C: jax.Array
    z_loss_C: jax.Array
    correct_C: jax.Array


@dataclass(frozen=True)
class _CrossEntropy:
    """The loss of a chunk of tokens: `walk.ChunkLoss`, its rows being the targets."""

    z_loss: float
    softcap: float | None
    division: Division

    def sums(
        self, raw_CV: jax.Array, targets_C: jax.Array, shared: None, weights_C: jax.Array
    ) -> _Sums:
        """Of the loss, its z-loss, and of the weights of targets with the highest logit."""
        del shared
        return self._sums(self._score(raw_CV, targets_C, weights_C), weights_C)

    def gradient(
        self, raw_CV: jax.Array, targets_C: jax.Array, shared: None, weights_C: jax.Array
    ) -> tuple[_Sums, jax.Array, jax.Array]:
        """The sums, the gradient of sum(weight * loss) at x w, and the losses."""
        del shared
        scored = self._score(raw_CV, targets_C, weights_C)
        softmax_CV = jnp.exp(scored.logits_CV - scored.lse_C[:, None])
        pull_C = weights_C * (1 + 2 * self.z_loss * scored.lse_C)
        dlogits_CV = softmax_CV * pull_C[:, None] - jnp.where(scored.hit_CV, weights_C[:, None], 0)
        if self.softcap is not None:
            dlogits_CV *= 1 - (scored.logits_CV / self.softcap) ** 2
        dlogits_CV = jnp.where(weights_C[:, None] != 0, dlogits_CV, 0)
        return self._sums(scored, weights_C), dlogits_CV, scored.loss_C

    def _sums(self, scored: _Scored, weights_C: jax.Array) -> _Sums:
        return (
            jnp.sum(weights_C * scored.loss_C),
            jnp.sum(weights_C * scored.z_loss_C),
            jnp.sum(weights_C * scored.correct_C),
        )

    def _score(self, raw_CV: jax.Array, targets_C: jax.Array, weights_C: jax.Array) -> _Scored:
        division = self.division
        logits_CV = logits_of(raw_CV, self.softcap)
        V = logits_CV.shape[1]
        highest_C = division.over_vocabulary(jax.lax.pmax, jnp.max(logits_CV, axis=-1))
        total_C = jnp.sum(jnp.exp(logits_CV - highest_C[:, None]), axis=-1)
        lse_C = highest_C + jnp.log(division.over_vocabulary(jax.lax.psum, total_C))
        index_1V = jax.lax.broadcasted_iota(targets_C.dtype, (1, V), 1) + division.first_token(V)
        hit_CV = index_1V == targets_C[:, None]
        target_C = jnp.sum(jnp.where(hit_CV, logits_CV, 0), axis=-1)
        target_C = division.over_vocabulary(jax.lax.psum, target_C)
        known_C = (targets_C >= 0) & (targets_C < V * division.vocabulary_shards)
        counted_C = weights_C != 0
        z_loss_C = jnp.where(counted_C, self.z_loss * lse_C**2, 0)
        return _Scored(
            logits_CV=logits_CV,
            hit_CV=hit_CV,
            lse_C=lse_C,
            loss_C=jnp.where(counted_C, lse_C - target_C, 0) + z_loss_C,
            z_loss_C=z_loss_C,
            correct_C=known_C & (target_C == highest_C),
        )


def _reference(inputs: CrossEntropyInputs) -> LossSums:
    """Compute the sums from whole logits [T, V], in float64 for float64 inputs, else float32."""
    dtype = jnp.promote_types(inputs.x_TD.dtype, jnp.float32)
    weights_T = inputs.weights_T.astype(dtype).reshape(-1)
    x_TD = inputs.x_TD.reshape(-1, inputs.x_TD.shape[-1])
    logits_TV = jnp.dot(x_TD.astype(dtype), inputs.w_DV.astype(dtype), precision="highest")
    if inputs.softcap is not None:
        logits_TV = inputs.softcap * jnp.tanh(logits_TV / inputs.softcap)
    lse_T = jax.nn.logsumexp(logits_TV, axis=-1)
    hit_TV = jax.nn.one_hot(inputs.targets_T.reshape(-1), logits_TV.shape[1], dtype=bool)
    target_T = jnp.sum(jnp.where(hit_TV, logits_TV, 0), axis=-1)
    counted_T = weights_T != 0
    z_T = inputs.z_loss * lse_T**2
    loss_T = jnp.where(counted_T, weights_T * (lse_T - target_T + z_T), 0)
    z_loss_T = jnp.where(counted_T, weights_T * z_T, 0)
    correct_T = jnp.any(hit_TV & (logits_TV == logits_TV.max(-1, keepdims=True)), axis=-1)
    return LossSums(
        loss_sum=jnp.sum(loss_T),
        weight_sum=jnp.sum(weights_T),
        z_loss_sum=jax.lax.stop_gradient(jnp.sum(z_loss_T)),
        correct_sum=jax.lax.stop_gradient(jnp.sum(weights_T * correct_T)),
    )


def _benchmark(
    call: CrossEntropyCall, run: Callable[[CrossEntropyInputs], LossSums]
) -> Callable[[], object]:
    """Return a function that computes the sums and gradients of one random call like `call`."""

    def loss(x_TD: jax.Array, w_DV: jax.Array, targets_T: jax.Array) -> jax.Array:
        inputs = CrossEntropyInputs(
            x_TD=x_TD,
            w_DV=w_DV,
            targets_T=targets_T,
            weights_T=jnp.ones(call.tokens),
            z_loss=1e-4 if call.z_loss else 0.0,
            softcap=call.softcap,
            chunk=call.chunk,
        )
        return run(inputs).loss_sum

    return benchmark_products(call, loss)


cross_entropy_operation: Operation[CrossEntropyCall] = register(
    Operation(
        "linear_cross_entropy",
        (
            Implementation("chunked", _chunked, lambda call: None),
            Implementation("reference", _reference, lambda call: None),
        ),
        _benchmark,
        work=work_of_products,
        call=CrossEntropyCall,
    )
)
