"""Attention a block of keys at a time in plain JAX: memory O(T) on any device.

Forward, a scan over blocks of keys keeps a running maximum and sum per query (Rabe and Staats
2021); backward, scores are computed again from the saved log-sum-exp (Dao 2023). The largest
temporary is [B, N, T, block] instead of [B, N, T, S].

Legend: B batch, T query tokens, S key tokens, C keys of a block, K key/value heads,
G query heads per key head, H head width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fornax.kernels._attention.call import AttentionCall, AttentionInputs, ScoreOptions, fill
from fornax.kernels._attention.dense import visible

__all__ = ["BLOCK", "attend_blocks", "blockwise", "declines", "pull_blocks"]

BLOCK = 256
_LOWEST = -1e30


def declines(call: AttentionCall) -> str | None:
    """Say why going by blocks is not for `call`."""
    if call.queries * call.keys <= (2 * BLOCK) ** 2:
        return f"a score matrix of {call.queries} x {call.keys} is small enough to make whole"
    return None


def blockwise(inputs: AttentionInputs) -> jax.Array:
    """Compute attention by blocks of keys; the products take the inputs' dtype."""
    options = inputs.score_options
    B, T, N, H = inputs.q_BTNH.shape
    K = inputs.k_BSKH.shape[2]
    dtype = jnp.promote_types(inputs.q_BTNH.dtype, jnp.float32)
    sinks_KG = jnp.full((K, N // K), -jnp.inf, dtype)
    if inputs.sinks_N is not None:
        sinks_KG = inputs.sinks_N.astype(dtype).reshape(K, N // K)
    q_BTKGH = inputs.q_BTNH.reshape(B, T, K, N // K, H)
    o_BTKGH = _attend(options, q_BTKGH, inputs.k_BSKH, inputs.v_BSKH, fill(inputs), sinks_KG)
    return o_BTKGH.reshape(B, T, N, -1)


def _blocks(array: jax.Array) -> jax.Array:
    """Cut the second axis into blocks, padded with zeros (which is segment 0): [n, B, C, ...]."""
    B, S = array.shape[:2]
    padding = -S % BLOCK
    array = jnp.pad(array, [(0, 0), (0, padding), *[(0, 0)] * (array.ndim - 2)])
    return jnp.moveaxis(array.reshape(B, -1, BLOCK, *array.shape[2:]), 1, 0)


def _joined(blocks: jax.Array, S: int) -> jax.Array:
    joined = jnp.moveaxis(blocks, 0, 1)
    return joined.reshape(joined.shape[0], -1, *joined.shape[3:])[:, :S]


def _scores(
    options: ScoreOptions,
    q_BTKGH: jax.Array,
    k_BCKH: jax.Array,
    tokens: tuple[jax.Array, ...],
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Return scores after softcap [B, K, G, T, C], and which of them count [B, 1, 1, T, C]."""
    scores = jnp.einsum("BTKGH,BCKH->BKGTC", q_BTKGH, k_BCKH, preferred_element_type=dtype)
    scores = scores * options.scale
    if options.softcap is not None:
        scores = options.softcap * jnp.tanh(scores / options.softcap)
    mask = visible(*tokens, causal=options.causal, window=options.window)[:, None, None]
    return scores, mask


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    options: ScoreOptions,
    q_BTKGH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    tokens: tuple[jax.Array, ...],
    sinks_KG: jax.Array,
) -> jax.Array:
    return _forward(options, q_BTKGH, k_BSKH, v_BSKH, tokens, sinks_KG)[0]


def attend_blocks(
    options: ScoreOptions,
    q_BTKGH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    tokens: tuple[jax.Array, ...],
    sinks_KG: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Attend block by block, without a derivative.

    Args:
        options: of the scores.
        q_BTKGH: queries.
        k_BSKH: keys.
        v_BSKH: values.
        tokens: int32 positions of queries and of keys, then segment ids of both.
        sinks_KG: a logit for each query head, -inf for none, in the dtype of the sums.

    Returns:
        o [B, T, K, G, H] and the log-sum-exp [B, K, G, T], in the dtype of the sums; zeros and the
        sink, else -1e30, where a query sees no key.
    """
    B, T, K, G, _ = q_BTKGH.shape
    dtype = sinks_KG.dtype
    positions_q, positions_k, segments_q, segments_k = tokens

    def step(carry: tuple[jax.Array, ...], block: tuple[jax.Array, ...]) -> Any:
        top, total, out = carry
        k_BCKH, v_BCKH, positions, segments = block
        ids = (positions_q, positions, segments_q, segments)
        scores, mask = _scores(options, q_BTKGH, k_BCKH, ids, dtype)
        now = jnp.maximum(top, jnp.max(jnp.where(mask, scores, _LOWEST), axis=-1))
        weights = jnp.where(mask, jnp.exp(scores - now[..., None]), 0)
        shrink = jnp.exp(top - now)
        added = jnp.einsum(
            "BKGTC,BCKH->BKGTH", weights.astype(v_BCKH.dtype), v_BCKH, preferred_element_type=dtype
        )
        total = total * shrink + jnp.sum(weights, axis=-1)
        return (now, total, out * shrink[..., None] + added), None

    sinks = jnp.broadcast_to(sinks_KG[:, :, None], (B, K, G, T))
    sunk = jnp.isfinite(sinks)
    start = (
        jnp.where(sunk, sinks, _LOWEST),
        sunk.astype(dtype),
        jnp.zeros((B, K, G, T, v_BSKH.shape[-1]), dtype),
    )
    xs = (_blocks(k_BSKH), _blocks(v_BSKH), _blocks(positions_k), _blocks(segments_k))
    (top, total, out), _ = jax.lax.scan(step, start, xs)
    safe = jnp.where(total == 0, 1, total)
    return jnp.moveaxis(out / safe[..., None], 3, 1), top + jnp.log(safe)


def _forward(
    options: ScoreOptions,
    q_BTKGH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    tokens: tuple[jax.Array, ...],
    sinks_KG: jax.Array,
) -> tuple[jax.Array, tuple[Any, ...]]:
    o_BTKGH, lse_BKGT = attend_blocks(options, q_BTKGH, k_BSKH, v_BSKH, tokens, sinks_KG)
    # Named, so that a remat policy that saves "attention" need not run the scan again.
    o_BTKGH = checkpoint_name(o_BTKGH.astype(q_BTKGH.dtype), "attention")
    lse_BKGT = checkpoint_name(lse_BKGT, "attention")
    return o_BTKGH, (q_BTKGH, k_BSKH, v_BSKH, tokens, sinks_KG, o_BTKGH, lse_BKGT)


def pull_blocks(
    options: ScoreOptions,
    q_BTKGH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    tokens: tuple[jax.Array, ...],
    lse_BKGT: jax.Array,
    delta_BKGT: jax.Array,
    do_BTKGH: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return dq, dk and dv in the dtype of `lse_BKGT`.

    Args:
        options: of the scores.
        q_BTKGH: queries.
        k_BSKH: keys, all that the queries see or some of them.
        v_BSKH: values.
        tokens: as `attend_blocks` takes them.
        lse_BKGT: log-sum-exp of all that the queries see.
        delta_BKGT: sum of `do_BTKGH` times the whole output.
        do_BTKGH: the output's gradient.
    """
    dtype = lse_BKGT.dtype
    positions_q, positions_k, segments_q, segments_k = tokens
    cap = options.softcap

    def step(dq_BTKGH: jax.Array, block: tuple[jax.Array, ...]) -> Any:
        k_BCKH, v_BCKH, positions, segments = block
        ids = (positions_q, positions, segments_q, segments)
        scores, mask = _scores(options, q_BTKGH, k_BCKH, ids, dtype)
        weights = jnp.where(mask, jnp.exp(scores - lse_BKGT[..., None]), 0)
        slopes = jnp.einsum("BTKGH,BCKH->BKGTC", do_BTKGH, v_BCKH, preferred_element_type=dtype)
        slopes = weights * (slopes - delta_BKGT[..., None])
        if cap is not None:
            slopes = slopes * (1 - (scores / cap) ** 2)
        slopes = (slopes * options.scale).astype(k_BCKH.dtype)
        weights = weights.astype(k_BCKH.dtype)
        dv = jnp.einsum("BKGTC,BTKGH->BCKH", weights, do_BTKGH, preferred_element_type=dtype)
        dk = jnp.einsum("BKGTC,BTKGH->BCKH", slopes, q_BTKGH, preferred_element_type=dtype)
        dq = jnp.einsum("BKGTC,BCKH->BTKGH", slopes, k_BCKH, preferred_element_type=dtype)
        return dq_BTKGH + dq, (dk, dv)

    xs = (_blocks(k_BSKH), _blocks(v_BSKH), _blocks(positions_k), _blocks(segments_k))
    dq, (dk, dv) = jax.lax.scan(step, jnp.zeros(q_BTKGH.shape, dtype), xs)
    S = k_BSKH.shape[1]
    return dq, _joined(dk, S), _joined(dv, S)


def _backward(
    options: ScoreOptions, saved: tuple[Any, ...], do_BTKGH: jax.Array
) -> tuple[Any, ...]:
    q_BTKGH, k_BSKH, v_BSKH, tokens, sinks_KG, o_BTKGH, lse_BKGT = saved
    dtype = sinks_KG.dtype
    give = jnp.sum(do_BTKGH.astype(dtype) * o_BTKGH.astype(dtype), axis=-1)
    delta_BKGT = jnp.moveaxis(give, 1, 3)
    arrays = (q_BTKGH, k_BSKH, v_BSKH)
    found = pull_blocks(options, *arrays, tokens, lse_BKGT, delta_BKGT, do_BTKGH)
    share_BKGT = jnp.exp(sinks_KG[:, :, None] - lse_BKGT)
    dsinks_KG = -jnp.sum(share_BKGT * delta_BKGT, axis=(0, 3))
    grads = (dx.astype(x.dtype) for dx, x in zip(found, arrays, strict=True))
    return (*grads, (None,) * len(tokens), dsinks_KG)


_attend.defvjp(_forward, _backward)
