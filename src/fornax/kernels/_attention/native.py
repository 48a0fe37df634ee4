"""Attention by the native CPU kernel (`_native/attention.cc`), with its gradient.

Legend: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head width.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from fornax.kernels import _native
from fornax.kernels._attention.call import AttentionCall, AttentionInputs, by_heads, fill
from fornax.kernels._attention.sharded import over_mesh

__all__ = ["declines", "native"]

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


@dataclass(frozen=True)
class _Options:
    scale: float
    softcap: float | None
    window: int | None
    causal: bool

    def attributes(self) -> dict[str, object]:
        """Return what the kernel takes: 0 stands for none."""
        return {
            "scale": np.float32(self.scale),
            "softcap": np.float32(self.softcap or 0),
            "window": np.int64(self.window or 0),
            "causal": np.bool_(self.causal),
        }


def native(inputs: AttentionInputs) -> jax.Array:
    """Compute attention, on each device for its own rows and heads."""
    options = _Options(inputs.scale, inputs.softcap, inputs.window, inputs.causal)
    tokens = tuple(ids.astype(jnp.int32) for ids in fill(inputs))
    sinks_N = jnp.zeros((0,)) if inputs.sinks_N is None else inputs.sinks_N.astype(jnp.float32)
    attend = functools.partial(_attend, options)
    arrays = inputs.q_BTNH, inputs.k_BSKH, inputs.v_BSKH
    return over_mesh(attend, *arrays, tokens, sinks_N, balanced=inputs.balanced)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    options: _Options,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    tokens: tuple[jax.Array, ...],
    sinks_N: jax.Array,
) -> jax.Array:
    return _forward(options, q_BTNH, k_BSKH, v_BSKH, tokens, sinks_N)[0]


def _forward(
    options: _Options,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    tokens: tuple[jax.Array, ...],
    sinks_N: jax.Array,
) -> tuple[jax.Array, tuple[Any, ...]]:
    B, T, N, _ = q_BTNH.shape
    call = jax.ffi.ffi_call(
        "fornax_attention_forward",
        (
            jax.ShapeDtypeStruct((B, T, N, v_BSKH.shape[3]), q_BTNH.dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        ),
        vmap_method="sequential",
    )
    o_BTNH, lse_BNT = call(q_BTNH, k_BSKH, v_BSKH, *tokens, sinks_N, **options.attributes())
    # Named, so that a remat policy that saves "attention" need not run the kernel again.
    o_BTNH = checkpoint_name(o_BTNH, "attention")
    lse_BNT = checkpoint_name(lse_BNT, "attention")
    return o_BTNH, (q_BTNH, k_BSKH, v_BSKH, tokens, sinks_N, o_BTNH, lse_BNT)


def _backward(options: _Options, saved: tuple[Any, ...], do_BTNH: jax.Array) -> tuple[Any, ...]:
    q_BTNH, k_BSKH, v_BSKH, tokens, sinks_N, o_BTNH, lse_BNT = saved
    call = jax.ffi.ffi_call(
        "fornax_attention_backward",
        tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q_BTNH, k_BSKH, v_BSKH)),
        vmap_method="sequential",
    )
    arrays = (q_BTNH, k_BSKH, v_BSKH, *tokens, lse_BNT, o_BTNH, do_BTNH)
    dq_BTNH, dk_BSKH, dv_BSKH = call(*arrays, **options.attributes())
    dsinks_N = jnp.zeros_like(sinks_N)
    if sinks_N.size:
        delta_BTN = jnp.sum(do_BTNH.astype(jnp.float32) * o_BTNH.astype(jnp.float32), axis=-1)
        share_BNT = jnp.exp(sinks_N[:, None] - lse_BNT)
        dsinks_N = -jnp.einsum("BTN,BNT->N", delta_BTN, share_BNT)
    return dq_BTNH, dk_BSKH, dv_BSKH, (None,) * len(tokens), dsinks_N


_attend.defvjp(_forward, _backward)
