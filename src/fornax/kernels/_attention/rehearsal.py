"""Made-up attention calls, for measuring implementations against each other.

Legend: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head width.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fornax.kernels._attention.call import AttentionCall, AttentionInputs

__all__ = ["rehearse"]


def rehearse(call: AttentionCall, run: Callable[[AttentionInputs], jax.Array]) -> Callable[[], Any]:
    """Return a function that computes output and gradients of one device's share of `call`.

    Where the mesh divides the length, that is the share of the device with the last queries.
    """
    rng = np.random.default_rng(0)
    B, T, S = call.batch, call.queries // call.length_shards, call.keys
    positions = call.positions or T != S

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), call.dtype)

    q_BTNH = normal(B, T, call.heads, call.head_dim)
    k_BSKH = normal(B, S, call.kv_heads, call.head_dim)
    v_BSKH = normal(B, S, call.kv_heads, call.value_dim)
    sinks_N = normal(call.heads) if call.sinks else None
    positions_S = np.arange(S, dtype=np.int32)
    positions_k_BS = np.broadcast_to(positions_S, (B, S))
    positions_q_BT = np.broadcast_to(positions_S[S - T :] if T <= S else np.arange(T), (B, T))
    ones = np.ones((B, max(T, S)), np.int32)

    def loss(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
        o_BTNH = run(
            AttentionInputs(
                q_BTNH=q_BTNH,
                k_BSKH=k_BSKH,
                v_BSKH=v_BSKH,
                positions_q_BT=jnp.asarray(positions_q_BT, jnp.int32) if positions else None,
                positions_k_BS=jnp.asarray(positions_k_BS) if positions else None,
                segment_ids_q_BT=jnp.asarray(ones[:, :T]) if call.segments else None,
                segment_ids_k_BS=jnp.asarray(ones[:, :S]) if call.segments else None,
                sinks_N=sinks_N,
                scale=call.head_dim**-0.5,
                causal=call.causal,
                window=call.window,
                softcap=call.softcap,
                consecutive=call.consecutive,
            )
        )
        return jnp.sum(o_BTNH.astype(jnp.float32))

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    return lambda: step(q_BTNH, k_BSKH, v_BSKH)
