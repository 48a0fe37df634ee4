"""Grouped-query attention.

Legend: B batch, T query tokens, S key/cache tokens, D model width, N query heads, K key/value
heads, H head width.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.kernels import checkpoint_name
from fornax.mesh import constrain
from fornax.models.attend import AttendOptions, LayerCache, attend_uncached, grow_queries
from fornax.models.config import DecoderConfig, LayerKind
from fornax.models.context import LayerContext
from fornax.models.norm import RMSNorm
from fornax.models.projection import Projection, project, residual_std
from fornax.models.scope import scoped

__all__ = ["Attention"]


class Attention(nnx.Module):
    """Grouped-query attention with the options of `DecoderConfig`."""

    def __init__(
        self,
        config: DecoderConfig,
        kind: LayerKind,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the projections, the norms of queries and keys, and the sinks of a kind of layer."""
        N, (K, H) = config.num_heads, config.kv_shape(kind)
        own = kind.keys != "shared"
        wide = config.global_heads if kind.global_heads else None
        with_values = own and not (wide is not None and wide.keys_as_values)
        make = functools.partial(Projection, rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        embed = {"embed": config.hidden_size}
        into = functools.partial(make, embed, bias=config.qkv_bias, std=config.initializer_range)
        # With a gate, a head's query lies before its gate.
        self.q = into({"heads": N, "head_dim": 2 * H if config.attention_gate else H})
        self.k = into({"kv_heads": K, "head_dim": H}) if own else None
        self.v = into({"kv_heads": K, "head_dim": H}) if with_values else None
        self.o = make(
            {"heads": N, "head_dim": H},
            embed,
            bias=config.attention_output_bias,
            std=residual_std(config),
        )
        self.q_norm = _qk_norm(config, N, H, dtype)
        self.k_norm = _qk_norm(config, K, H, dtype) if own else None
        self.value_eps = config.norm_eps if config.value_norm else None
        self.kv_heads = K
        sinks = jnp.zeros((N,), dtype)
        self.sinks = nnx.Param(sinks, axes=("heads",)) if config.attention_sinks else None
        self.unweighted_eps = config.norm_eps if config.qk_norm == "unweighted" else None
        self.gated = config.attention_gate
        self.clip = config.qkv_clip
        self.query_scaling = config.query_scaling
        self.scale = config.attention_scale
        self.softcap = config.attention_logit_softcap

    @scoped
    def __call__(
        self,
        x_BTD: jax.Array,
        kind: LayerKind,
        context: LayerContext,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attend; returns y [B, T, D] and the cache layer with this pass's keys and values."""
        into = [module for module in (self.q, self.k, self.v) if module is not None]
        q_BTNH, *kv = project(x_BTD, *into)
        # Keys come first, and are values too where those have no projection.
        k_BTKH, v_BTKH = (kv[0], kv[-1]) if kv else (None, None)
        gate_BTNH = None
        if self.gated:
            q_BTNH, gate_BTNH = jnp.split(q_BTNH, 2, axis=-1)
        q_BTNH = self._prepared(q_BTNH, self.q_norm, kind, context)
        if k_BTKH is not None and v_BTKH is not None:
            k_BTKH = self._prepared(k_BTKH, self.k_norm, kind, context)
            if self.value_eps is not None:
                v_BTKH = _unweighted_norm(v_BTKH, self.value_eps)
            if self.clip is not None:
                v_BTKH = jnp.clip(v_BTKH, -self.clip, self.clip)
        scaling = self.query_scaling
        if scaling is not None and (scaling.layers == "all" or kind.rope == "none"):
            q_BTNH = grow_queries(q_BTNH, context.positions_BT, scaling)
        q_BTNH = constrain(q_BTNH, ("batch", "length", "activation_heads", None))
        sinks_N = None if self.sinks is None else self.sinks[...]
        options = AttendOptions(
            scale=self.scale,
            window=kind.window,
            softcap=self.softcap,
            chunked=kind.chunked,
            kv_heads=self.kv_heads,
        )
        if cache is not None:
            o_BTNH, cache = cache.attend(q_BTNH, k_BTKH, v_BTKH, options, sinks_N)
        else:
            if k_BTKH is None or v_BTKH is None:
                raise ValueError("a layer that shares keys needs a cache, or PassKeys")
            o_BTNH = attend_uncached(q_BTNH, k_BTKH, v_BTKH, context, options, sinks_N)
        return checkpoint_name(self.o(_gate(o_BTNH, gate_BTNH)), "attention_out"), cache

    def _prepared(
        self, x_BTNH: jax.Array, norm: RMSNorm | None, kind: LayerKind, context: LayerContext
    ) -> jax.Array:
        """Queries or keys, normalised, cut and rotated."""
        if norm is not None:
            x_BTNH = norm(x_BTNH)
        if self.clip is not None:
            x_BTNH = jnp.clip(x_BTNH, -self.clip, self.clip)
        if kind.rope != "none":
            with jax.named_scope("rope"):
                x_BTNH = kernels.rotary_embedding(x_BTNH, *context.rotations[kind.rope])
            if self.unweighted_eps is not None:
                x_BTNH = _unweighted_norm(x_BTNH, self.unweighted_eps)
        return x_BTNH


def _gate(o_BTNH: jax.Array, gate_BTNH: jax.Array | None) -> jax.Array:
    return o_BTNH if gate_BTNH is None else o_BTNH * jax.nn.sigmoid(gate_BTNH)


def _unweighted_norm(x_BTNH: jax.Array, eps: float) -> jax.Array:
    return kernels.rms_norm(x_BTNH, jnp.ones(x_BTNH.shape[3]), eps=eps)


def _qk_norm(config: DecoderConfig, heads: int, width: int, dtype: DTypeLike) -> RMSNorm | None:
    if config.qk_norm in ("none", "unweighted"):
        return None
    over = (width,) if config.qk_norm == "head" else (heads, width)
    return RMSNorm(over, config, dtype=dtype)
