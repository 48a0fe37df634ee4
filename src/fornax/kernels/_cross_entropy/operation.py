"""The linear cross-entropy operation: its one signature and its implementations.

Legend: T tokens (batch and length flattened), D model width, V vocabulary.
"""

import jax

from fornax.kernels._cross_entropy.call import (
    CrossEntropyCall,
    CrossEntropyInputs,
    LossSums,
    batch_shards,
    describe,
)
from fornax.kernels._cross_entropy.chunked import chunked
from fornax.kernels._cross_entropy.reference import reference
from fornax.kernels._cross_entropy.rehearsal import rehearse
from fornax.kernels.registry import Implementation, Operation

__all__ = ["cross_entropy_operation", "linear_cross_entropy"]

cross_entropy_operation: Operation[CrossEntropyCall] = Operation(
    "linear_cross_entropy",
    (
        Implementation("chunked", chunked, lambda call: None),
        Implementation("reference", reference, lambda call: None),
    ),
    rehearse,
)


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
    return cross_entropy_operation.choose(describe(inputs), implementation).run(inputs)
