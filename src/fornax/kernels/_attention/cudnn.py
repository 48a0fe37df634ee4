"""Attention on GPU: cuDNN's flash attention, through `jax.nn.dot_product_attention`.

One document per row goes to cuDNN as it is. Packed documents, and positions that an index does not
tell, go by a mask. cuDNN reads it as a bias of the queries' dtype, two bytes for each query and
key, and returns as large a gradient of it. So the queries are taken a chunk at a time, each with
the keys that one of its queries may see, and the mask of a chunk is bounded.

Legend: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head width,
C queries of a chunk.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from fornax.kernels._attention.call import AttentionCall, AttentionInputs, by_heads, describe, fill
from fornax.kernels._attention.dense import visible
from fornax.kernels._attention.sharded import over_mesh
from fornax.kernels.registry import interpreting
from fornax.mesh import axes_in_use, shards

__all__ = ["MOST_CHUNKS", "MOST_MASK_BYTES", "chunk_of", "cudnn", "declines"]

MOST_MASK_BYTES = 2**28
"""Of one chunk's mask; its gradient takes as much again."""
MOST_CHUNKS = 16
"""Each has kernels of its own to compile."""
_CHUNK = 1024
"""Queries of a chunk where the keys' order lets each chunk leave later keys out."""
_WIDEST, _WIDEST_AMPERE = 256, 128


def declines(call: AttentionCall) -> str | None:
    """Say why cuDNN cannot run `call`."""
    widest = _widest()
    if call.dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, not {call.dtype}"
    if call.head_dim % 8 or call.head_dim > widest:
        return f"it needs heads whose width is a multiple of 8 up to {widest}, not {call.head_dim}"
    if call.value_dim != call.head_dim:
        return f"it needs values as wide as keys, not {call.value_dim} beside {call.head_dim}"
    if call.softcap is not None:
        return "it does not support softcap"
    if call.sinks:
        return "it does not support sinks"
    if isinstance(own := by_heads(call), str):
        return own
    if 0 in (own.batch, own.queries, own.keys, own.heads):
        return "an array is empty"
    return None if _by_index(own) else _declines_mask(own)


def _declines_mask(call: AttentionCall) -> str | None:
    if call.queries % 2 or call.keys % 2:
        return (
            f"it takes a mask for even lengths, not for {call.queries} queries and {call.keys} keys"
        )
    if chunk_of(call) is None:
        size = 2 * call.batch * call.queries * call.keys
        return (
            f"its mask of {size:,} bytes does not divide into {MOST_CHUNKS} chunks of at most "
            f"{MOST_MASK_BYTES:,}"
        )
    return None


def _by_index(call: AttentionCall) -> bool:
    """Whether cuDNN can tell from the indexes alone which keys a query sees."""
    if call.segments:
        return False
    if not call.causal:
        return call.window is None
    return call.consecutive and call.queries == call.keys


def chunk_of(call: AttentionCall) -> int | None:
    """Return how many queries share a mask, None where no number fits.

    An even divisor of the queries whose mask is within bounds, the one nearest to 1024 that leaves
    no more than `MOST_CHUNKS` chunks.
    """
    T = call.queries
    wanted = _CHUNK if _in_order(call) else T
    fits = [
        C
        for C in (T // n for n in range(1, MOST_CHUNKS + 1) if T % n == 0)
        if C % 2 == 0 and 2 * call.batch * C * call.keys <= MOST_MASK_BYTES
    ]
    return min(fits, key=lambda C: abs(C - wanted), default=None)


def _in_order(call: AttentionCall) -> bool:
    """Whether no query sees a key of a higher index."""
    return call.causal and call.consecutive and call.queries == call.keys


def _widest() -> int:
    """Return the widest heads that this machine's GPU takes; Hopper's where there is none to
    ask."""
    if jax.default_backend() == "gpu":
        capability = getattr(jax.local_devices()[0], "compute_capability", "")
        return _WIDEST if float(capability or 0) >= 9 else _WIDEST_AMPERE
    return _WIDEST


def cudnn(inputs: AttentionInputs) -> jax.Array:
    """Compute attention, on each device for its own rows and heads."""
    call = by_heads(describe(inputs, shards(axes_in_use("length"))))
    assert isinstance(call, AttentionCall)
    attend = functools.partial(_by_index_alone if _by_index(call) else _masked, call, inputs.scale)
    tokens = () if _by_index(call) else fill(inputs)

    def local(
        q: jax.Array, k: jax.Array, v: jax.Array, tokens: tuple[jax.Array, ...], _: jax.Array
    ) -> jax.Array:
        return attend(q, k, v, *tokens)

    arrays = inputs.q_BTNH, inputs.k_BSKH, inputs.v_BSKH
    return over_mesh(local, *arrays, tokens, jnp.zeros((0,)), balanced=inputs.balanced)


def _by_index_alone(
    call: AttentionCall, scale: float, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array
) -> jax.Array:
    return _attend(_Options(scale, call.causal, call.window), q_BTNH, k_BSKH, v_BSKH, None)


def _masked(
    call: AttentionCall,
    scale: float,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    positions_q_BT: jax.Array,
    positions_k_BS: jax.Array,
    segments_q_BT: jax.Array,
    segments_k_BS: jax.Array,
) -> jax.Array:
    C = chunk_of(call) or call.queries
    parts = []
    for first in range(0, call.queries, C):
        here, there = slice(first, first + C), _keys_of(call, first, first + C)
        mask_BCS = visible(
            positions_q_BT[:, here],
            positions_k_BS[:, there],
            segments_q_BT[:, here],
            segments_k_BS[:, there],
            causal=call.causal,
            window=call.window,
        )
        k, v = k_BSKH[:, there], v_BSKH[:, there]
        o_BCNH = _attend(_Options(scale), q_BTNH[:, here], k, v, mask_BCS[:, None])
        # Where every score is masked, the softmax is that of equal scores.
        parts.append(jnp.where(jnp.any(mask_BCS, axis=-1)[..., None, None], o_BCNH, 0))
    return jnp.concatenate(parts, axis=1)


def _keys_of(call: AttentionCall, first: int, stop: int) -> slice:
    """Return the keys, an even number, that queries `first` to `stop` may see."""
    if not _in_order(call):
        return slice(0, call.keys)
    low = 0 if call.window is None else max(0, first - call.window + 1)
    return slice(low // 2 * 2, stop)


@dataclass(frozen=True)
class _Options:
    scale: float
    causal: bool = False
    window: int | None = None


def _library(
    options: _Options, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None
) -> jax.Array:
    """Call cuDNN; interpreted, the library's implementation for XLA, which means the same."""
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=options.scale,
        is_causal=options.causal,
        local_window_size=None if options.window is None else (options.window - 1, 0),
        implementation="xla" if interpreting() else "cudnn",
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    options: _Options, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None
) -> jax.Array:
    """Attend, what the backward pass needs of the result carrying the name "attention".

    So a remat policy that saves "attention" need not run the kernel again.
    """
    return checkpoint_name(_library(options, q, k, v, mask), "attention")


def _forward(
    options: _Options, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, Any]:
    o, pull = jax.vjp(lambda q, k, v: _library(options, q, k, v, mask), q, k, v)
    B, T, N, _ = q.shape

    def named(leaf: jax.Array) -> jax.Array:
        given = any(leaf is one for one in (q, k, v))
        made = leaf.shape in (o.shape, (B, N, T)) and not given  # the result, the log-sum-exp
        return checkpoint_name(leaf, "attention") if made else leaf

    return checkpoint_name(o, "attention"), jax.tree.map(named, pull)


def _backward(options: _Options, pull: Any, do: jax.Array) -> tuple[Any, ...]:
    del options
    return (*pull(do), None)


_attend.defvjp(_forward, _backward)
