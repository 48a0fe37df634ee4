"""Attention of a transformer's blocks, in both directions.

Legend: B batch, T query tokens, S key tokens, D width, N heads, H head width.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.diffusion.models.parts import Dense, LayerNorm, Make, RMSNorm, constrain_tokens
from fornax.diffusion.models.transformer.config import NormConfig
from fornax.kernels import checkpoint_name
from fornax.models.scope import scoped

__all__ = ["Attention", "Heads", "Rope", "attend", "make_norm"]

Rope = tuple[jax.Array, jax.Array]
"""Cosines and sines, float32 [B, T, r], of the r pairs of each head or of all heads together."""

Heads = tuple[jax.Array, jax.Array, jax.Array]
"""Queries [B, T, N, H], keys and values [B, S, N, H]."""


def make_norm(config: NormConfig, width: int, dtype: DTypeLike) -> LayerNorm | RMSNorm:
    """The norm of a config."""
    if config.kind == "rms":
        return RMSNorm(width, eps=config.eps, scale=config.scale, dtype=dtype)
    return LayerNorm(width, eps=config.eps, scale=config.scale, bias=config.bias, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and options of an `Attention`."""

    width: int
    """D, of what queries are made of and of the output."""
    states: int
    """Width of what keys and values are made of."""
    num_heads: int
    head_dim: int
    qk_norm: NormConfig | None
    across_heads: bool
    bias: bool
    out_bias: bool
    images: bool = False
    """Whether there are keys and values of an image's states, D wide, too."""


class Attention(nnx.Module):
    """The projections of attention and the norms of queries and keys.

    Attributes:
      q, k, v: [D or states, N, H].
      q_norm, k_norm: of a head, or of all together; None for none.
      out: [N, H, D], or None where the output is not wanted.
      image_k, image_v, image_k_norm: likewise of an image's states, or None.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        wanted: bool = True,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the parameters; `wanted` says whether there is an output projection."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        heads = {"heads": shape.num_heads, "head_dim": shape.head_dim}
        self.q = Dense(shape.width, heads, bias=shape.bias, **make)
        self.k = Dense(shape.states, heads, bias=shape.bias, **make)
        self.v = Dense(shape.states, heads, bias=shape.bias, **make)
        self.across_heads, norm = shape.across_heads, shape.qk_norm
        width = shape.num_heads * shape.head_dim if shape.across_heads else shape.head_dim
        self.q_norm = None if norm is None else make_norm(norm, width, dtype)
        self.k_norm = None if norm is None else make_norm(norm, width, dtype)
        out = {"embed": shape.width}
        self.out = Dense(heads, out, bias=shape.out_bias, **make) if wanted else None
        images = functools.partial(Dense, shape.width, heads, bias=shape.bias, **make)
        self.image_k, self.image_v = (images() if shape.images else None for _ in range(2))
        normed = shape.images and norm is not None
        self.image_k_norm = make_norm(norm, width, dtype) if normed else None

    def heads(
        self, x_BTD: jax.Array, states_BSD: jax.Array | None = None, rope: Rope | None = None
    ) -> Heads:
        """Queries of x, keys and values of the states, or of x; normalised and rotated."""
        states_BSD = x_BTD if states_BSD is None else states_BSD
        q_BTNH = self._prepared(self.q(x_BTD), self.q_norm, rope)
        k_BSNH = self._prepared(self.k(states_BSD), self.k_norm, rope)
        v_BSNH = self.v(states_BSD)
        return (
            checkpoint_name(q_BTNH, "query"),
            checkpoint_name(k_BSNH, "key"),
            checkpoint_name(v_BSNH, "value"),
        )

    def _prepared(
        self, x_BTNH: jax.Array, norm: LayerNorm | RMSNorm | None, rope: Rope | None
    ) -> jax.Array:
        if norm is not None and self.across_heads:
            x_BTNH = norm(x_BTNH.reshape(*x_BTNH.shape[:2], -1)).reshape(x_BTNH.shape)
        elif norm is not None:
            x_BTNH = norm(x_BTNH)
        if rope is not None:
            with jax.named_scope("rope"):
                B, T, N, H = x_BTNH.shape
                if 2 * rope[0].shape[-1] > H:  # each head turns by its own: it is a token of one
                    cos, sin = (part.reshape(B, T * N, H // 2) for part in rope)
                    x_BTNH = x_BTNH.reshape(B, T * N, 1, H)
                    x_BTNH = kernels.rotary_embedding(x_BTNH, cos, sin, interleaved=True)
                    x_BTNH = x_BTNH.reshape(B, T, N, H)
                else:
                    x_BTNH = kernels.rotary_embedding(x_BTNH, *rope, interleaved=True)
        return constrain_tokens(x_BTNH, "activation_heads", None)

    @scoped
    def __call__(
        self,
        x_BTD: jax.Array,
        states_BSD: jax.Array | None = None,
        *,
        mask_BS: jax.Array | None = None,
        rope: Rope | None = None,
        linear: bool = False,
        images_BSD: jax.Array | None = None,
    ) -> jax.Array:
        """Attend from x to the states, or to itself -> [B, T, D].

        Args:
          x_BTD: what queries are made of.
          states_BSD: what keys and values are made of; None for x.
          mask_BS: int32, 1 for keys that are seen; None for all.
          rope: of queries and keys.
          linear: whether attention is linear, which takes no mask.
          images_BSD: an image's states, where there are keys and values of them.
        """
        heads = self.heads(x_BTD, states_BSD, rope)
        o_BTNH = _attend_linear(*heads) if linear else attend(*heads, mask_BS)
        if self.image_k is not None and self.image_v is not None and images_BSD is not None:
            k_BSNH = self._prepared(self.image_k(images_BSD), self.image_k_norm, None)
            o_BTNH = o_BTNH + attend(heads[0], k_BSNH, self.image_v(images_BSD), None)
        return self.project(o_BTNH)

    def project(self, o_BTNH: jax.Array) -> jax.Array:
        """The output projection -> [B, T, D]."""
        assert self.out is not None, "attention whose output is not wanted"
        return checkpoint_name(self.out(o_BTNH), "attention_out")


def attend(
    q_BTNH: jax.Array, k_BSNH: jax.Array, v_BSNH: jax.Array, mask_BS: jax.Array | None
) -> jax.Array:
    """softmax(q k^T / sqrt(H)) v over the keys that are seen -> [B, T, N, H]."""
    run = functools.partial(kernels.attention, scale=q_BTNH.shape[-1] ** -0.5, causal=False)
    if mask_BS is None:
        return run(q_BTNH, k_BSNH, v_BSNH)
    ones_BT = jnp.ones(q_BTNH.shape[:2], jnp.int32)
    return run(
        q_BTNH,
        k_BSNH,
        v_BSNH,
        segment_ids_q_BT=ones_BT,
        segment_ids_k_BS=mask_BS.astype(jnp.int32),
    )


def _attend_linear(q_BTNH: jax.Array, k_BSNH: jax.Array, v_BSNH: jax.Array) -> jax.Array:
    """relu(q) (relu(k)^T v) / (relu(q) sum relu(k)), in float32 (Katharopoulos et al. 2020)."""
    q, k, v = (x.astype(jnp.float32) for x in (q_BTNH, k_BSNH, v_BSNH))
    q, k = jax.nn.relu(q), jax.nn.relu(k)
    states_BNHh = jnp.einsum("bsnh,bsni->bnhi", k, v)
    sums_BNH = jnp.sum(k, axis=1)
    o = jnp.einsum("btnh,bnhi->btni", q, states_BNHh)
    weight_BTN = jnp.einsum("btnh,bnh->btn", q, sums_BNH)
    return (o / (weight_BTN[..., None] + 1e-15)).astype(q_BTNH.dtype)
