"""Any loss of logits, summed over tokens a chunk at a time, so that whole logits never exist.

Legend: T tokens, D model width, V vocabulary, C tokens of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fornax.config.errors import KernelError
from fornax.kernels._vocabulary.division import Arrays, Division, batch_shards
from fornax.kernels._vocabulary.walk import Walk, check_products, logits_of, summed

__all__ = ["LogitsLoss", "linear_loss"]

LogitsLoss = Callable[[jax.Array, Arrays, Arrays], tuple[jax.Array, dict[str, jax.Array]]]
"""(logits [C, V], rows' arrays [C, ...], shared arrays) to (loss [C], metrics [C])."""

_Sums = tuple[jax.Array, dict[str, jax.Array]]


@dataclass(frozen=True)
class _Differentiated:
    """`walk.ChunkLoss` of any function of logits: its gradient is JAX's."""

    loss: LogitsLoss
    softcap: float | None
    dtype: jnp.dtype

    def sums(self, raw_CV: jax.Array, rows: Arrays, shared: Arrays, weights_C: jax.Array) -> _Sums:
        """Weighted sums of the loss and its metrics."""
        loss_C, metrics = self.loss(logits_of(raw_CV, self.softcap), rows, shared)

        def weighted(values_C: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(weights_C != 0, weights_C * values_C.astype(self.dtype), 0))

        return weighted(loss_C), {name: weighted(values) for name, values in metrics.items()}

    def gradient(
        self, raw_CV: jax.Array, rows: Arrays, shared: Arrays, weights_C: jax.Array
    ) -> tuple[_Sums, jax.Array, None]:
        """The sums and the gradient of the first at x w."""
        total, pull, metrics = jax.vjp(
            lambda raw_CV: self.sums(raw_CV, rows, shared, weights_C), raw_CV, has_aux=True
        )
        (slope_CV,) = pull(jnp.ones((), self.dtype))
        return (total, metrics), jnp.where(weights_C[:, None] != 0, slope_CV, 0), None


def linear_loss(
    loss: LogitsLoss,
    x_TD: jax.Array,
    w_DV: jax.Array,
    rows: Arrays,
    shared: Arrays,
    weights_T: jax.Array,
    *,
    softcap: float | None = None,
    chunk: int = 1024,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Project to the vocabulary and sum weight times `loss` of the logits.

    Under a mesh XLA's partitioner divides the work: a chunk takes every n-th token, so each device
    holds its part of every chunk.

    Args:
        loss: called with a chunk's logits (softcap applied, float32), the chunk's part of `rows`
            and `shared`. Hashable, the same object at every call; compiled into the program.
        x_TD: final hidden states, [T, D] or [B, T, D]; one floating dtype for x and w.
        w_DV: output projection. Where it has no gradient none is computed.
        rows: pytree of arrays with the leading dimensions of x. No gradient.
        shared: pytree of arrays, for instance another projection. No gradient.
        weights_T: one per token, leading dimensions of x; a token of weight 0 adds nothing.
        softcap: c in logit = c tanh(logit / c).
        chunk: tokens per device whose logits exist at once.

    Returns:
        The weighted sum of losses, float32 (float64 for float64 inputs), and of each metric; only
        the first carries gradients, to x and w.

    Raises:
        KernelError: arguments that do not fit together.
    """
    check_products("linear_loss", x_TD, w_DV, chunk, softcap)
    lead = x_TD.shape[:-1]
    wrong = [a.shape for a in (weights_T, *jax.tree.leaves(rows)) if a.shape[: len(lead)] != lead]
    if wrong:
        raise KernelError(f"linear_loss: an array of rows is {wrong[0]}; it must begin with {lead}")
    dtype = jnp.promote_types(x_TD.dtype, jnp.float32)
    walk = Walk(
        loss=_Differentiated(loss, softcap, dtype),
        chunk=chunk * batch_shards(),
        division=Division(),
        dtype=dtype,
    )
    rows, shared, weights_T = jax.lax.stop_gradient((rows, shared, weights_T.astype(dtype)))
    total, metrics = summed(walk, x_TD, w_DV, rows, shared, weights_T)
    return total, jax.lax.stop_gradient(metrics)
