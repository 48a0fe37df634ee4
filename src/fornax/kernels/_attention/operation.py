"""The attention operation: its one signature and its implementations in order of preference.

Legend: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head width.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from fornax.kernels._attention import blockwise, cudnn, native, ring, splash
from fornax.kernels._attention.call import AttentionCall, AttentionInputs, Exchange, describe
from fornax.kernels._attention.dense import dense, reference
from fornax.kernels.registry import Implementation, Operation, Work, register
from fornax.mesh import axes_in_use, shards

__all__ = ["EXCHANGES", "attention", "attention_operation"]

EXCHANGES: Mapping[str, Exchange] = {
    "native": "heads",
    "splash": "all_gather",
    "cudnn": "heads",
    "ring": "ring",
    "blockwise": "all_gather",
    "xla": "all_gather",
    "reference": "all_gather",
}
"""How each implementation meets the keys of other devices, where the mesh divides the length."""


def benchmark(
    call: AttentionCall, run: Callable[[AttentionInputs], jax.Array]
) -> Callable[[], object]:
    """Return a function that computes output and gradients of one device's share of `call`.

    Where the mesh divides the length, that is the share of the device with the last queries, or in
    balanced order with the middle ones.
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
    first = S - T if not call.balanced else (S - T) // 2
    positions_q_BT = np.broadcast_to(positions_S[first:][:T] if T <= S else np.arange(T), (B, T))
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
                balanced=False,
                exchange="auto",
            )
        )
        return jnp.sum(o_BTNH.astype(jnp.float32))

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    return lambda: step(q_BTNH, k_BSKH, v_BSKH)


def _work(call: AttentionCall) -> Work:
    """Two products forward and five backward, which makes the scores again (Dao et al. 2022).

    A causal query of n sees the keys up to its own position, the last n of the keys, and of these
    the window.
    """
    T, S = call.queries // call.length_shards, call.keys
    H, V, item = call.head_dim, call.value_dim, np.dtype(call.dtype).itemsize
    first = S - T if not call.balanced else (S - T) // 2
    at = np.arange(first, first + T, dtype=np.float64)
    after = np.zeros(T) if call.causal else S - 1 - at
    before = at
    if call.window is not None:
        before, after = np.minimum(at, call.window - 1), np.minimum(after, call.window - 1)
    pairs = call.batch * call.heads * float(np.sum(before + 1 + after))
    queries = call.batch * T * call.heads * (H + V)
    keys = call.batch * S * call.kv_heads * (H + V)
    # Read forward and backward, its gradient written; of the result the gradient is read.
    return Work(
        flops=2 * pairs * ((H + V) + (3 * H + 2 * V)),
        bytes=float(item * 3 * (queries + keys)),
        dtype=call.dtype,
    )


def _declines(
    name: str, of_its_own: Callable[[AttentionCall], str | None], call: AttentionCall
) -> str | None:
    if call.exchange not in ("auto", EXCHANGES[name]):
        return f"its devices exchange by {EXCHANGES[name]}, and the call asks for {call.exchange}"
    return of_its_own(call)


def _implementation(
    name: str,
    run: Callable[[AttentionInputs], jax.Array],
    declines: Callable[[AttentionCall], str | None] = lambda call: None,
    **more: Any,
) -> Implementation[AttentionCall]:
    return Implementation(name, run, functools.partial(_declines, name, declines), **more)


def _refusal(call: AttentionCall) -> str:
    """Say why the exchange that a call asks for cannot be had, and which can."""

    def reasons(exchange: Exchange | Literal["auto"]) -> dict[str, str | None]:
        return {
            one.name: one.reason(replace(call, exchange=exchange))
            for one in attention_operation.implementations
            if EXCHANGES.get(one.name) == exchange and one.platform in (None, call.platform)
        }

    asked = reasons(call.exchange)
    why = "; ".join(f"{name}: {reason}" for name, reason in asked.items())
    able = [one for one in get_args(Exchange) if None in reasons(one).values()]
    return (
        f"attention: devices that divide the length cannot exchange by {call.exchange} "
        f"(model.context_exchange) in this call: {why or f'{call.platform} has no such kernel'}; "
        f"use {' or '.join(['auto', *able])}"
    )


attention_operation: Operation[AttentionCall] = register(
    Operation(
        "attention",
        (
            _implementation("native", native.native, native.declines, platform="cpu"),
            _implementation("splash", splash.splash, splash.declines, platform="tpu"),
            _implementation("cudnn", cudnn.cudnn, cudnn.declines, platform="gpu"),
            _implementation("ring", ring.ring, ring.declines, alone=False),
            _implementation("blockwise", blockwise.blockwise, blockwise.declines),
            _implementation("xla", dense),
            _implementation("reference", reference),
        ),
        benchmark,
        refusal=_refusal,
        work=_work,
        call=AttentionCall,
    )
)


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    scale: float,
    causal: bool = True,
    positions_q_BT: jax.Array | None = None,
    positions_k_BS: jax.Array | None = None,
    consecutive: bool = False,
    balanced: bool = False,
    segment_ids_q_BT: jax.Array | None = None,
    segment_ids_k_BS: jax.Array | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
    exchange: Exchange | Literal["auto"] = "auto",
    implementation: str | None = None,
) -> jax.Array:
    """Attend from every query to the keys it may see.

    softmax(mask(softcap(q k^T * scale))) v, with N / K query heads sharing a key/value head.

    Args:
        q_BTNH: queries, one floating dtype for q, k and v.
        k_BSKH: keys; K divides N.
        v_BSKH: values; their width may differ from the keys'.
        scale: factor on the scores, usually H ** -0.5.
        causal: a query sees only keys at its own position or before.
        positions_q_BT: int32 position of each query (default: its index). Given for both or
            neither; needed when T differs from S and the mask depends on order.
        positions_k_BS: int32 position of each key. A cache's empty slots carry segment id 0.
        consecutive: promises that queries and keys are the same tokens and that positions count up
            by one with the index inside each document, as in packed rows; a kernel that masks by
            index can then run. Nothing checks it.
        balanced: says that tokens lie in balanced order over the devices of the mesh that divide
            the length (`fornax.mesh.balance`); `consecutive` is then of the tokens in order.
        segment_ids_q_BT: int32 document of each query. Queries see keys of their own document only;
            0 is padding: it attends to nothing and its output is zeros.
        segment_ids_k_BS: int32 document of each key.
        window: number of keys visible including the query's own (causal), or keys less than
            `window` away on both sides (not causal).
        softcap: c in s = c tanh(s / c), applied to the scaled scores.
        sinks_N: float logit per query head that takes part in the softmax without a value.
        exchange: how devices that divide the length meet the keys of the others: `all_gather`
            (each gathers all keys and values), `heads` (they exchange the length for heads) or
            `ring` (keys and values are passed round); auto takes the first implementation that can
            run the call.
        implementation: name of one implementation to run, no other.

    Returns:
        o_BTNH in q's dtype (with the values' width); zeros where a query sees no key. What the
        backward pass needs of the result carries the checkpoint name "attention".

    Raises:
        KernelError: arguments that do not fit together, or `implementation` or `exchange` cannot be
            had in the call.
    """
    inputs = AttentionInputs(
        q_BTNH=q_BTNH,
        k_BSKH=k_BSKH,
        v_BSKH=v_BSKH,
        positions_q_BT=positions_q_BT,
        positions_k_BS=positions_k_BS,
        segment_ids_q_BT=segment_ids_q_BT,
        segment_ids_k_BS=segment_ids_k_BS,
        sinks_N=sinks_N,
        scale=float(scale),
        causal=causal,
        window=window,
        softcap=softcap,
        consecutive=consecutive,
        balanced=balanced,
        exchange=exchange,
    )
    call = describe(inputs, shards(axes_in_use("length")))
    return attention_operation.choose(call, implementation).run(inputs)
