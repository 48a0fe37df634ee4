"""Small helpers of the losses: precision, masks, sums over sequences.

Legend: B rows, T tokens of a row.
"""

import jax
import jax.numpy as jnp

__all__ = ["Metrics", "log_one_minus_exp", "per_sequence_sum", "reported", "smoothed", "wide"]

Metrics = dict[str, jax.Array]


def wide(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the arrays in float32, or float64 where they are in it."""
    dtype = jnp.promote_types(jnp.result_type(*arrays), jnp.float32)
    return tuple(jnp.asarray(array, dtype) for array in arrays)


def reported(**metrics: jax.Array) -> Metrics:
    """Return metrics cut off from gradients."""
    return {name: jax.lax.stop_gradient(value) for name, value in metrics.items()}


def smoothed(score: jax.Array, label_smoothing: float) -> jax.Array:
    """Return the cross entropy of sigmoid(score) against a label of 1 - label_smoothing."""
    right, wrong = jax.nn.log_sigmoid(score), jax.nn.log_sigmoid(-score)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def log_one_minus_exp(x: jax.Array) -> jax.Array:
    """Return log(1 - exp(x)) for x below 0, exact at both ends; x above -1e-7 counts as that."""
    x = jnp.minimum(x, -1e-7)
    return jnp.where(x > -0.6931472, jnp.log(-jnp.expm1(x)), jnp.log1p(-jnp.exp(x)))


def per_sequence_sum(x_BT: jax.Array, segment_ids_BT: jax.Array | None) -> jax.Array:
    """Return at each token the sum over its sequence: its row, or its segment of the row.

    Segment ids are 0 to T; the sum of segment 0, padding, means nothing.
    """
    if segment_ids_BT is None:
        return jnp.broadcast_to(jnp.sum(x_BT, axis=-1, keepdims=True), x_BT.shape)

    def row(x_T: jax.Array, segments_T: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x_T, segments_T, num_segments=x_T.shape[0] + 1)[segments_T]

    return jax.vmap(row)(x_BT, segment_ids_BT)
