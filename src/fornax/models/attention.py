"""Grouped-query attention.

Legend: B batch, T query tokens, S key/cache tokens, D model width, N query heads, K key/value
heads, H head width.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from fornax import kernels
from fornax.mesh import constrain
from fornax.models.attend import AttendOptions, LayerCache, attend_uncached, grow_queries
from fornax.models.config import DecoderConfig, LayerKind
from fornax.models.context import LayerContext
from fornax.models.norm import RMSNorm
from fornax.models.projection import Projection, project, residual_std
from fornax.models.rope import apply_rope

__all__ = ["Attention"]


class Attention(nnx.Module):
    """Grouped-query attention with the options of `DecoderConfig`."""

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike, compute_dtype: DTypeLike
    ):
        """Make the projections, the norms of queries and keys, and the sinks."""
        N, K, H = config.num_heads, config.kv_heads, config.head_width
        make = functools.partial(Projection, rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        embed = {"embed": config.hidden_size}
        into = functools.partial(make, embed, bias=config.qkv_bias, std=config.initializer_range)
        # With a gate, a head's query lies before its gate.
        self.q = into({"heads": N, "head_dim": 2 * H if config.attention_gate else H})
        self.k = into({"kv_heads": K, "head_dim": H})
        self.v = into({"kv_heads": K, "head_dim": H})
        self.o = make(
            {"heads": N, "head_dim": H},
            embed,
            bias=config.attention_output_bias,
            std=residual_std(config),
        )
        self.q_norm = _qk_norm(config, N, dtype)
        self.k_norm = _qk_norm(config, K, dtype)
        sinks = jnp.zeros((N,), dtype)
        self.sinks = nnx.Param(sinks, axes=("heads",)) if config.attention_sinks else None
        self.unweighted_eps = config.norm_eps if config.qk_norm == "unweighted" else None
        self.gated = config.attention_gate
        self.clip = config.qkv_clip
        self.query_scaling = config.query_scaling
        self.scale = config.attention_scale
        self.softcap = config.attention_logit_softcap

    def __call__(
        self,
        x_BTD: jax.Array,
        kind: LayerKind,
        context: LayerContext,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attend; returns y [B, T, D] and the cache layer with this pass's keys and values."""
        q_BTNH, k_BTKH, v_BTKH = project(x_BTD, self.q, self.k, self.v)
        gate_BTNH = None
        if self.gated:
            q_BTNH, gate_BTNH = jnp.split(q_BTNH, 2, axis=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        if self.clip is not None:
            q_BTNH, k_BTKH, v_BTKH = (
                jnp.clip(x, -self.clip, self.clip) for x in (q_BTNH, k_BTKH, v_BTKH)
            )
        if kind.rope != "none":
            rotation = context.rotations[kind.rope]
            q_BTNH, k_BTKH = apply_rope(q_BTNH, rotation), apply_rope(k_BTKH, rotation)
            if self.unweighted_eps is not None:
                ones_H = jnp.ones(q_BTNH.shape[3])
                q_BTNH, k_BTKH = (
                    kernels.rms_norm(x, ones_H, eps=self.unweighted_eps) for x in (q_BTNH, k_BTKH)
                )
        scaling = self.query_scaling
        if scaling is not None and (scaling.layers == "all" or kind.rope == "none"):
            q_BTNH = grow_queries(q_BTNH, context.positions_BT, scaling)
        q_BTNH = constrain(q_BTNH, ("batch", "length", "activation_heads", None))
        sinks_N = None if self.sinks is None else self.sinks[...]
        options = AttendOptions(
            scale=self.scale, window=kind.window, softcap=self.softcap, chunked=kind.chunked
        )
        if cache is not None:
            o_BTNH, cache = cache.attend(q_BTNH, k_BTKH, v_BTKH, options, sinks_N)
            return self.o(_gate(o_BTNH, gate_BTNH)), cache
        o_BTNH = attend_uncached(q_BTNH, k_BTKH, v_BTKH, context, options, sinks_N)
        return checkpoint_name(self.o(_gate(o_BTNH, gate_BTNH)), "attention_out"), None


def _gate(o_BTNH: jax.Array, gate_BTNH: jax.Array | None) -> jax.Array:
    return o_BTNH if gate_BTNH is None else o_BTNH * jax.nn.sigmoid(gate_BTNH)


def _qk_norm(config: DecoderConfig, heads: int, dtype: DTypeLike) -> RMSNorm | None:
    if config.qk_norm in ("none", "unweighted"):
        return None
    over = (config.head_width,) if config.qk_norm == "head" else (heads, config.head_width)
    return RMSNorm(over, config, dtype=dtype)
