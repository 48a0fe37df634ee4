"""Attention with its whole score matrix in memory: the plain reference, and the one-shot for XLA.

Legend: B batch, T query tokens, S key tokens, N query heads, K key/value heads,
G query heads per key head (N = K * G), H head width.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fornax.kernels._attention.call import AttentionInputs, fill

__all__ = ["dense", "reference", "visible"]


def visible(
    positions_q_BT: jax.Array,
    positions_k_BS: jax.Array,
    segment_ids_q_BT: jax.Array,
    segment_ids_k_BS: jax.Array,
    *,
    causal: bool,
    window: int | None,
) -> jax.Array:
    """Return the bool mask [B, T, S] of which key each query sees.

    A query sees the keys of its own segment (0 is padding, which sees and shows nothing); causal:
    those at or before its own position; window: those less than `window` positions away.
    """
    same = segment_ids_q_BT[:, :, None] == segment_ids_k_BS[:, None, :]
    mask = same & (segment_ids_q_BT != 0)[:, :, None]
    distance_BTS = positions_q_BT[:, :, None] - positions_k_BS[:, None, :]
    if causal:
        mask &= distance_BTS >= 0
    if window is not None:
        mask &= jnp.abs(distance_BTS) < window
    return mask


def reference(inputs: AttentionInputs) -> jax.Array:
    """Compute attention the way the formula reads (Vaswani et al. 2017, eq. 1), head by head.

    Works in the inputs' own dtype if that is float64 and in float32 otherwise; returns the inputs'
    dtype. Softcap: Gemma 2 (2024), s = c tanh(s / c). Sinks: one more logit per head
    that takes its share of the softmax and gives no value (Xiao et al. 2023; gpt-oss 2025).
    """
    mask = visible(*fill(inputs), causal=inputs.causal, window=inputs.window)
    dtype = jnp.promote_types(inputs.q_BTNH.dtype, jnp.float32)
    group = inputs.q_BTNH.shape[2] // inputs.k_BSKH.shape[2]
    q_BTNH = inputs.q_BTNH.astype(dtype)
    k_BSNH = jnp.repeat(inputs.k_BSKH.astype(dtype), group, axis=2)
    v_BSNH = jnp.repeat(inputs.v_BSKH.astype(dtype), group, axis=2)
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH, precision="highest") * inputs.scale
    if inputs.softcap is not None:
        scores_BNTS = inputs.softcap * jnp.tanh(scores_BNTS / inputs.softcap)
    scores_BNTS = jnp.where(mask[:, None], scores_BNTS, -jnp.inf)
    maximum_BNT1 = jnp.max(scores_BNTS, axis=-1, keepdims=True, initial=-1e30)
    sink_N11 = None
    if inputs.sinks_N is not None:
        sink_N11 = inputs.sinks_N.astype(dtype)[:, None, None]
        maximum_BNT1 = jnp.maximum(maximum_BNT1, sink_N11)
    maximum_BNT1 = jax.lax.stop_gradient(maximum_BNT1)
    weights_BNTS = jnp.where(mask[:, None], jnp.exp(scores_BNTS - maximum_BNT1), 0)
    total_BNT1 = jnp.sum(weights_BNTS, axis=-1, keepdims=True)
    if sink_N11 is not None:
        total_BNT1 = total_BNT1 + jnp.exp(sink_N11 - maximum_BNT1)
    weights_BNTS = weights_BNTS / jnp.where(total_BNT1 == 0, 1, total_BNT1)
    o_BTNH = jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS, v_BSNH, precision="highest")
    return checkpoint_name(o_BTNH.astype(inputs.q_BTNH.dtype), "attention")


def dense(inputs: AttentionInputs) -> jax.Array:
    """Compute attention in one pass of whole-matrix operations that XLA fuses and shards.

    Scores and softmax in float32 at least; the products take the inputs' dtype.
    """
    q_BTNH, k_BSKH, v_BSKH = inputs.q_BTNH, inputs.k_BSKH, inputs.v_BSKH
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    dtype = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    mask_BTS = visible(*fill(inputs), causal=inputs.causal, window=inputs.window)
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=dtype)
    scores = scores * inputs.scale
    if inputs.softcap is not None:
        scores = inputs.softcap * jnp.tanh(scores / inputs.softcap)
    mask = mask_BTS[:, None, None]
    scores = jnp.where(mask, scores, jnp.finfo(dtype).min)
    maximum = jnp.max(scores, axis=-1, keepdims=True)
    sinks = None
    if inputs.sinks_N is not None:
        sinks = inputs.sinks_N.astype(dtype).reshape(K, N // K, 1, 1)
        maximum = jnp.maximum(maximum, sinks)
    maximum = jax.lax.stop_gradient(maximum)
    weights = jnp.where(mask, jnp.exp(scores - maximum), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - maximum)
    weights = (weights / jnp.where(total == 0, 1, total)).astype(q_BTNH.dtype)
    o_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights, v_BSKH)
    o_BTNH = o_BTKGH.reshape(B, T, N, v_BSKH.shape[3]).astype(q_BTNH.dtype)
    return checkpoint_name(o_BTNH, "attention")
