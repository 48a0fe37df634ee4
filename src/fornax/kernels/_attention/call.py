"""What one attention call looks like: shapes and options, checked once for all implementations.

Legend: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head width.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from fornax.config.errors import KernelError
from fornax.kernels._attention.sharded import divide
from fornax.kernels.registry import current_platform
from fornax.mesh import shards

__all__ = [
    "AttentionCall",
    "AttentionInputs",
    "Exchange",
    "ScoreOptions",
    "by_heads",
    "describe",
    "fill",
]

Exchange = Literal["all_gather", "heads", "ring"]
"""How devices that divide the length meet the keys of the others: they gather all of them, they
exchange the length for heads, or they pass them round."""


@dataclass(frozen=True)
class ScoreOptions:
    """What is static about the scores of a call, as `attention` takes it."""

    scale: float
    softcap: float | None
    window: int | None
    causal: bool


@dataclass(frozen=True)
class AttentionCall:
    """Shapes, dtypes and options of one call: what implementations look at when they decline.

    Rows and heads are those of one device, where the mesh in use divides them; the length is whole.
    """

    platform: str
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    causal: bool
    window: int | None
    softcap: float | None
    sinks: bool
    positions: bool
    """Whether positions were given; without them a token's index is its position."""
    consecutive: bool
    """Whether, between two tokens of one document, positions differ as indexes do."""
    balanced: bool
    """Whether tokens lie in balanced order over those devices; indexes are those in order."""
    segments: bool
    length_shards: int
    """Devices over which the mesh in use divides the length."""
    exchange: Exchange | Literal["auto"]
    """How those devices are to meet the keys of the others; auto where there is one."""


@dataclass(frozen=True)
class AttentionInputs:
    """The arrays and options of one call; positions and segments are None where not given."""

    q_BTNH: jax.Array
    k_BSKH: jax.Array
    v_BSKH: jax.Array
    positions_q_BT: jax.Array | None
    positions_k_BS: jax.Array | None
    segment_ids_q_BT: jax.Array | None
    segment_ids_k_BS: jax.Array | None
    sinks_N: jax.Array | None
    scale: float
    causal: bool
    window: int | None
    softcap: float | None
    consecutive: bool
    balanced: bool
    exchange: Exchange | Literal["auto"]

    @property
    def score_options(self) -> ScoreOptions:
        """What is static about the scores."""
        return ScoreOptions(self.scale, self.softcap, self.window, self.causal)


def by_heads(call: AttentionCall) -> AttentionCall | str:
    """The call of a device that has a part of the heads in place of a part of the length.

    The same where the length is whole; where heads or lengths do not divide, the reason.
    """
    parts = call.length_shards
    if parts == 1:
        return call
    if call.kv_heads % parts or call.queries % parts or call.keys % parts:
        return (
            f"the mesh divides the length over {parts} devices, and over those {call.kv_heads} key "
            f"heads, {call.queries} queries and {call.keys} keys of a device do not all divide"
        )
    return replace(
        call,
        heads=call.heads // parts,
        kv_heads=call.kv_heads // parts,
        length_shards=1,
        balanced=False,
    )


def fill(inputs: AttentionInputs) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return positions of queries and keys and segment ids of both, with the defaults filled in.

    A position left out is the index; a segment id left out is 1 (one document, no padding).
    """
    B, T = inputs.q_BTNH.shape[:2]
    S = inputs.k_BSKH.shape[1]

    def positions(given: jax.Array | None, length: int) -> jax.Array:
        if given is not None:
            return given
        return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (B, length))

    def segments(given: jax.Array | None, length: int) -> jax.Array:
        return given if given is not None else jnp.ones((B, length), jnp.int32)

    return (
        positions(inputs.positions_q_BT, T),
        positions(inputs.positions_k_BS, S),
        segments(inputs.segment_ids_q_BT, T),
        segments(inputs.segment_ids_k_BS, S),
    )


def describe(inputs: AttentionInputs, length_shards: int) -> AttentionCall:
    """Check the inputs of a call against each other and describe it.

    Raises:
        KernelError: shapes or options that do not fit together.
    """
    _check(inputs)
    B, T, N, H = inputs.q_BTNH.shape
    rows, heads = map(shards, divide(inputs.q_BTNH, inputs.k_BSKH))
    return AttentionCall(
        platform=current_platform(),
        batch=B // rows,
        queries=T,
        keys=inputs.k_BSKH.shape[1],
        heads=N // heads,
        kv_heads=inputs.k_BSKH.shape[2] // heads,
        head_dim=H,
        value_dim=inputs.v_BSKH.shape[3],
        dtype=jnp.dtype(inputs.q_BTNH.dtype).name,
        causal=inputs.causal,
        window=inputs.window,
        softcap=inputs.softcap,
        sinks=inputs.sinks_N is not None,
        positions=inputs.positions_q_BT is not None,
        consecutive=inputs.consecutive or inputs.positions_q_BT is None,
        balanced=inputs.balanced,
        segments=inputs.segment_ids_q_BT is not None,
        length_shards=length_shards,
        exchange=inputs.exchange if length_shards > 1 else "auto",
    )


def _check(inputs: AttentionInputs) -> None:
    q, k, v = inputs.q_BTNH, inputs.k_BSKH, inputs.v_BSKH
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise KernelError(
            f"attention: q{q.shape}, k{k.shape}, v{v.shape} need four dimensions each: "
            "[B, T, N, H], [B, S, K, H], [B, S, K, H]"
        )
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    if k.shape[0] != B or k.shape[3] != H or v.shape[:3] != k.shape[:3]:
        raise KernelError(
            f"attention: q{q.shape}, k{k.shape}, v{v.shape} do not fit together; "
            "batch, key length, key heads and head width must agree"
        )
    if K == 0 or N % K:
        raise KernelError(
            f"attention: {N} query heads do not divide over {K} key heads; use a multiple of {K}"
        )
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise KernelError(
            f"attention: q is {q.dtype}, k {k.dtype}, v {v.dtype}; use one floating dtype for all"
        )
    _check_pair("positions", inputs.positions_q_BT, inputs.positions_k_BS, (B, T), (B, S))
    if inputs.balanced and inputs.positions_q_BT is None:
        raise KernelError(
            "attention: tokens in balanced order have positions that are not their indexes; pass "
            "positions_q_BT and positions_k_BS"
        )
    _check_pair("segment_ids", inputs.segment_ids_q_BT, inputs.segment_ids_k_BS, (B, T), (B, S))
    if inputs.positions_q_BT is None and T != S and (inputs.causal or inputs.window is not None):
        raise KernelError(
            f"attention: {T} queries and {S} keys without positions leave open which key comes "
            "before which query; pass positions_q_BT and positions_k_BS"
        )
    if inputs.exchange not in (known := ("auto", *get_args(Exchange))):
        raise KernelError(
            f"attention: exchange={inputs.exchange!r} is unknown; use one of: {', '.join(known)}"
        )
    if inputs.window is not None and inputs.window < 1:
        raise KernelError(f"attention: window={inputs.window} sees nothing; use 1 or more, or None")
    if inputs.softcap is not None and not inputs.softcap > 0:
        raise KernelError(f"attention: softcap={inputs.softcap} must be above 0; use None for none")
    if inputs.sinks_N is not None and inputs.sinks_N.shape != (N,):
        raise KernelError(
            f"attention: sinks{inputs.sinks_N.shape} must have one value per query head: ({N},)"
        )


def _check_pair(
    name: str,
    for_q: jax.Array | None,
    for_k: jax.Array | None,
    shape_q: tuple[int, int],
    shape_k: tuple[int, int],
) -> None:
    if (for_q is None) != (for_k is None):
        raise KernelError(
            f"attention: {name} was given for the {'keys' if for_q is None else 'queries'} only; "
            "pass it for both or for neither"
        )
    if for_q is None or for_k is None:
        return
    if for_q.shape != shape_q or for_k.shape != shape_k:
        raise KernelError(
            f"attention: {name} of shapes {for_q.shape} and {for_k.shape} must be "
            f"{shape_q} for the queries and {shape_k} for the keys"
        )
    if not (jnp.issubdtype(for_q.dtype, jnp.integer) and jnp.issubdtype(for_k.dtype, jnp.integer)):
        raise KernelError(f"attention: {name} must be integers, not {for_q.dtype}, {for_k.dtype}")
