"""Attention by the native CPU kernel (`_native/attention.cc`), with its gradient.

Legend: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fornax.kernels import _native
from fornax.kernels._attention.call import (
    AttentionCall,
    AttentionInputs,
    ScoreOptions,
    by_heads,
    fill,
)
from fornax.kernels._attention.sharded import over_mesh
from fornax.kernels._checkpoint_name import name_in_rule, wants_bits

__all__ = ["attend_native", "declines", "native", "pull_native"]

_FEWEST_QUERIES = 8
"""Below this, preparing the keys costs more than XLA's whole product."""


def declines(call: AttentionCall) -> str | None:
    """Say why the native kernel cannot run `call`."""
    if call.dtype not in ("float32", "bfloat16"):
        return f"it computes in float32 or bfloat16, not {call.dtype}"
    if isinstance(own := by_heads(call), str):
        return own
    if call.queries < _FEWEST_QUERIES:
        return f"{call.queries} queries are too few to pay for preparing the keys"
    if 0 in (own.batch, own.keys, own.heads, own.head_dim, own.value_dim):
        return "an array is empty"
    return _native.unavailable("attention")


def _attributes(options: ScoreOptions) -> dict[str, object]:
    """Return what the kernel takes: 0 stands for none."""
    return {
        "scale": np.float32(options.scale),
        "softcap": np.float32(options.softcap or 0),
        "window": np.int64(options.window or 0),
        "causal": np.bool_(options.causal),
    }


def native(inputs: AttentionInputs) -> jax.Array:
    """Compute attention, on each device for its own rows and heads."""
    options = inputs.score_options
    tokens = tuple(ids.astype(jnp.int32) for ids in fill(inputs))
    sinks_N = jnp.zeros((0,)) if inputs.sinks_N is None else inputs.sinks_N.astype(jnp.float32)
    attend = functools.partial(_attend, options, wants_bits(inputs.q_BTNH))
    arrays = inputs.q_BTNH, inputs.k_BSKH, inputs.v_BSKH
    return over_mesh(attend, *arrays, tokens, sinks_N, balanced=inputs.balanced)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    options: ScoreOptions,
    bits: bool,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    tokens: tuple[jax.Array, ...],
    sinks_N: jax.Array,
) -> jax.Array:
    return _forward(options, bits, q_BTNH, k_BSKH, v_BSKH, tokens, sinks_N)[0]


def attend_native(
    options: ScoreOptions,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    tokens: tuple[jax.Array, ...],
    sinks_N: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel, without a derivative.

    Args:
        options: of the scores.
        q_BTNH: queries.
        k_BSKH: keys.
        v_BSKH: values.
        tokens: int32 positions of queries and of keys, then segment ids of both.
        sinks_N: float32, a logit for each query head, or empty.

    Returns:
        o [B, T, N, H] in the dtype of q, and the float32 log-sum-exp [B, N, T]: where a query sees
        no key they are zeros and the sink, or zeros too where there is none.
    """
    B, T, N, _ = q_BTNH.shape
    call = jax.ffi.ffi_call(
        "fornax_attention_forward",
        (
            jax.ShapeDtypeStruct((B, T, N, v_BSKH.shape[3]), q_BTNH.dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        ),
        vmap_method="sequential",
    )
    o_BTNH, lse_BNT = call(q_BTNH, k_BSKH, v_BSKH, *tokens, sinks_N, **_attributes(options))
    return o_BTNH, lse_BNT


def pull_native(
    options: ScoreOptions,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    tokens: tuple[jax.Array, ...],
    lse_BNT: jax.Array,
    o_BTNH: jax.Array,
    do_BTNH: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return dq, dk and dv in the arrays' dtype.

    Args:
        options: of the scores.
        q_BTNH: queries.
        k_BSKH: keys, all that the queries see or some of them.
        v_BSKH: values.
        tokens: as `attend_native` takes them.
        lse_BNT: float32 log-sum-exp of all that the queries see.
        o_BTNH: the whole output.
        do_BTNH: its gradient.
    """
    call = jax.ffi.ffi_call(
        "fornax_attention_backward",
        tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q_BTNH, k_BSKH, v_BSKH)),
        vmap_method="sequential",
    )
    arrays = (q_BTNH, k_BSKH, v_BSKH, *tokens, lse_BNT, o_BTNH, do_BTNH)
    dq_BTNH, dk_BSKH, dv_BSKH = call(*arrays, **_attributes(options))
    return dq_BTNH, dk_BSKH, dv_BSKH


def _forward(
    options: ScoreOptions,
    bits: bool,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    tokens: tuple[jax.Array, ...],
    sinks_N: jax.Array,
) -> tuple[jax.Array, tuple[Any, ...]]:
    o_BTNH, lse_BNT = attend_native(options, q_BTNH, k_BSKH, v_BSKH, tokens, sinks_N)
    # Named, so that a remat policy that saves "attention" need not run the kernel again.
    o_BTNH = name_in_rule(o_BTNH, "attention", bits=bits)
    lse_BNT = name_in_rule(lse_BNT, "attention", bits=False)
    return o_BTNH, (q_BTNH, k_BSKH, v_BSKH, tokens, sinks_N, o_BTNH, lse_BNT)


def _backward(
    options: ScoreOptions, bits: bool, saved: tuple[Any, ...], do_BTNH: jax.Array
) -> tuple[Any, ...]:
    del bits
    q_BTNH, k_BSKH, v_BSKH, tokens, sinks_N, o_BTNH, lse_BNT = saved
    arrays = (q_BTNH, k_BSKH, v_BSKH)
    dq_BTNH, dk_BSKH, dv_BSKH = pull_native(options, *arrays, tokens, lse_BNT, o_BTNH, do_BTNH)
    dsinks_N = jnp.zeros_like(sinks_N)
    if sinks_N.size:
        delta_BTN = jnp.sum(do_BTNH.astype(jnp.float32) * o_BTNH.astype(jnp.float32), axis=-1)
        share_BNT = jnp.exp(sinks_N[:, None] - lse_BNT)
        dsinks_N = -jnp.einsum("BTN,BNT->N", delta_BTN, share_BNT)
    return dq_BTNH, dk_BSKH, dv_BSKH, (None,) * len(tokens), dsinks_N


_attend.defvjp(_forward, _backward)
