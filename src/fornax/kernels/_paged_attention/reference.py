"""Paged attention the way the formula reads: gather every row's pages, then softmax.

Legend: T tokens of the step, N query heads, K key/value heads, G query heads per key head,
H head width, R rows (sequences), M tokens that a row's pages hold.
"""

import jax
import jax.numpy as jnp

from fornax.kernels._paged_attention.call import PagedInputs
from fornax.kernels._paged_attention.codes import QuantizedPages
from fornax.kernels._paged_attention.layout import rows_and_positions

__all__ = ["reference"]


def reference(inputs: PagedInputs) -> jax.Array:
    """Compute attention token by token over all its row's pages (Vaswani et al. 2017, eq. 1).

    Works in q's own dtype if that is float64 and in float32 otherwise; returns q's dtype.
    """
    T, N, H = inputs.q_TNH.shape
    K = inputs.kv_heads
    dtype = jnp.promote_types(inputs.q_TNH.dtype, jnp.float32)
    kv, table_RW = inputs.kv_LPSCH, inputs.page_table_RW
    codes = kv.codes_LPSCH if isinstance(kv, QuantizedPages) else kv
    codes = codes[inputs.layer, table_RW]
    kv_RMKCH = codes.reshape(codes.shape[0], -1, K, inputs.parts, H).astype(dtype)
    if isinstance(kv, QuantizedPages):
        scales = kv.scales_of(inputs.layer, table_RW)
        kv_RMKCH *= scales.reshape(*kv_RMKCH.shape[:4], 1).astype(dtype)
    row_T, position_T, valid_T = rows_and_positions(inputs.query_start_R1, inputs.context_lens_R, T)
    key_M = jnp.arange(kv_RMKCH.shape[1])
    mask_TM = (key_M <= position_T[:, None]) & valid_T[:, None]
    if inputs.window is not None:
        mask_TM &= key_M > position_T[:, None] - inputs.window
    mask_TM11 = mask_TM[:, :, None, None]
    k_TMKH = jnp.where(mask_TM11, kv_RMKCH[row_T, :, :, 0], 0)
    v_TMKH = jnp.where(mask_TM11, kv_RMKCH[row_T, :, :, -1], 0)
    q_TKGH = inputs.q_TNH.reshape(T, K, N // K, H).astype(dtype)
    scores = jnp.einsum("TKGH,TMKH->TKGM", q_TKGH, k_TMKH, precision="highest") * inputs.scale
    if inputs.softcap is not None:
        scores = inputs.softcap * jnp.tanh(scores / inputs.softcap)
    mask = mask_TM[:, None, None, :]
    sinks = jnp.full((N,), -jnp.inf, dtype) if inputs.sinks_N is None else inputs.sinks_N
    sinks = sinks.astype(dtype).reshape(K, N // K, 1)
    top = jnp.max(jnp.where(mask, scores, -1e30), axis=-1, keepdims=True)
    top = jnp.maximum(top, sinks)
    weights = jnp.where(mask, jnp.exp(scores - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks - top)
    weights = weights / jnp.where(total == 0, 1, total)
    o_TKGH = jnp.einsum("TKGM,TMKH->TKGH", weights, v_TMKH, precision="highest")
    return o_TKGH.reshape(T, N, H).astype(inputs.q_TNH.dtype)
