"""The attention operation: its one signature and its implementations in order of preference.

Legend: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head width.
"""

import jax

from fornax.kernels._attention import blockwise, cudnn, native, splash
from fornax.kernels._attention.call import AttentionCall, AttentionInputs, describe
from fornax.kernels._attention.dense import dense, reference
from fornax.kernels._attention.rehearsal import rehearse
from fornax.kernels._attention.sharded import length_shards
from fornax.kernels.registry import Implementation, Operation

__all__ = ["attention", "attention_operation"]


attention_operation: Operation[AttentionCall] = Operation(
    "attention",
    (
        Implementation("native", native.native, native.declines, platform="cpu"),
        Implementation("splash", splash.splash, splash.declines, platform="tpu"),
        Implementation("cudnn", cudnn.cudnn, cudnn.declines, platform="gpu"),
        Implementation("blockwise", blockwise.blockwise, blockwise.declines),
        Implementation("xla", dense, lambda call: None),
        Implementation("reference", reference, lambda call: None),
    ),
    rehearse,
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
    segment_ids_q_BT: jax.Array | None = None,
    segment_ids_k_BS: jax.Array | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
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
        segment_ids_q_BT: int32 document of each query. Queries see keys of their own document only;
            0 is padding: it attends to nothing and its output is zeros.
        segment_ids_k_BS: int32 document of each key.
        window: number of keys visible including the query's own (causal), or keys less than
            `window` away on both sides (not causal).
        softcap: c in s = c tanh(s / c), applied to the scaled scores.
        sinks_N: float logit per query head that takes part in the softmax without a value.
        implementation: name of one implementation to run, no other.

    Returns:
        o_BTNH in q's dtype (with the values' width); zeros where a query sees no key. What the
        backward pass needs of the result carries the checkpoint name "attention".

    Raises:
        KernelError: arguments that do not fit together, or `implementation` cannot run the call.
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
    )
    call = describe(inputs, length_shards())
    return attention_operation.choose(call, implementation).run(inputs)
