"""Latent attention written down plainly: scores of the latents themselves, for all pairs of tokens.

The trainer makes keys and values of each head (the expanded form). Here the up-projections are
summed over in the formula instead (DeepSeek-V2, section 2.1 and appendix C). It shares parameters
and angles with `models.LatentAttention`, and neither projections, norms, rotation nor a kernel.

Legend: B rows, T query tokens, S key tokens, D model width, N query heads, Q rank of queries,
R rank of keys and values, U unrotated and P rotated width, H = U + P, V value width.
"""

import jax
import jax.numpy as jnp

from fornax.models.attend import LayerCache
from fornax.models.config import LayerKind
from fornax.models.context import LayerContext
from fornax.models.latent import LatentAttention
from fornax.models.norm import RMSNorm
from fornax.models.projection import Projection
from fornax.models.rope import Rotation

__all__ = ["PlainLatent"]


class PlainLatent(LatentAttention):
    """The formula, in float32."""

    def __call__(
        self,
        x_BTD: jax.Array,
        kind: LayerKind,
        context: LayerContext,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attend among the tokens themselves -> y [B, T, D]."""
        x_BTD, R = x_BTD.astype(jnp.float32), self.config.key_value_rank
        rotation = None if kind.rope == "none" else context.rotations[kind.rope]
        q_BTNH = self._queries(x_BTD)
        q_BTNU, q_BTNP = jnp.split(q_BTNH, [self.config.unrotated_dim], axis=-1)
        down_BSX = _project("BSD,DX->BSX", x_BTD, self.kv_down)
        latent_BSR = _normed(down_BSX[..., :R], self.kv_norm)
        up_RNX = self.kv_up.kernel[...].astype(jnp.float32)
        up_RNU, up_RNV = jnp.split(up_RNX, [self.config.unrotated_dim], axis=-1)
        scores_BNTS = jnp.einsum("BTNU,RNU,BSR->BNTS", q_BTNU, up_RNU, latent_BSR)
        scores_BNTS += jnp.einsum(
            "BTNP,BSP->BNTS",
            _turned(q_BTNP, rotation),
            _turned(down_BSX[..., None, R:], rotation)[:, :, 0],
        )
        scores_BNTS = scores_BNTS * self.scale * self._growth(kind, context)
        if self.softcap is not None:
            scores_BNTS = self.softcap * jnp.tanh(scores_BNTS / self.softcap)
        seen_BNTS = _seen(kind, context)[:, None]
        weights_BNTS = jax.nn.softmax(jnp.where(seen_BNTS, scores_BNTS, -1e30), axis=-1)
        weights_BNTS = jnp.where(seen_BNTS, weights_BNTS, 0)  # padding sees nothing
        o_BTNV = jnp.einsum("BNTS,BSR,RNV->BTNV", weights_BNTS, latent_BSR, up_RNV)
        return _project("BTNV,NVD->BTD", o_BTNV, self.o), None

    def _growth(self, kind: LayerKind, context: LayerContext) -> jax.Array | float:
        """What multiplies scores for the query's position, [B, 1, T, 1]."""
        scaling = self.query_scaling
        if scaling is None or (scaling.layers == "unrotated" and kind.rope != "none"):
            return 1.0
        lengths_BT = jnp.floor((context.positions_BT + scaling.shift) / scaling.length)
        return (1 + scaling.beta * jnp.log(1 + lengths_BT))[:, None, :, None]

    def _queries(self, x_BTD: jax.Array) -> jax.Array:
        if self.q is not None:
            return _project("BTD,DNH->BTNH", x_BTD, self.q)
        down_BTQ = _normed(_project("BTD,DQ->BTQ", x_BTD, self.q_down), self.q_norm)
        return _project("BTQ,QNH->BTNH", down_BTQ, self.q_up)


def _project(formula: str, x: jax.Array, projection: Projection | None) -> jax.Array:
    assert projection is not None
    y = jnp.einsum(formula, x, projection.kernel[...].astype(jnp.float32))
    return y if projection.bias is None else y + projection.bias[...].astype(jnp.float32)


def _normed(x: jax.Array, norm: RMSNorm | None) -> jax.Array:
    assert norm is not None
    scale = norm.scale[...].astype(jnp.float32) + norm.unit_offset
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _turned(x_BTNP: jax.Array, rotation: Rotation | None) -> jax.Array:
    """Pairs of numbers turned by matrices [[cos, -sin], [sin, cos]]; queries and keys alike keep
    pairs in one order, which their products do not see."""
    if rotation is None:
        return x_BTNP
    half = rotation.cos_BTr.shape[-1]
    order = (-1, half, 2) if rotation.interleaved else (-1, 2, half)
    pairs = x_BTNP.reshape(*x_BTNP.shape[:2], *order)
    pairs = pairs if rotation.interleaved else jnp.swapaxes(pairs, -1, -2)
    cos, sin = rotation.cos_BTr, rotation.sin_BTr
    rows = [jnp.stack([cos, -sin], axis=-1), jnp.stack([sin, cos], axis=-1)]
    turned = jnp.einsum("BTrij,BTNrj->BTNri", jnp.stack(rows, axis=-2), pairs)
    return turned.reshape(x_BTNP.shape)


def _seen(kind: LayerKind, context: LayerContext) -> jax.Array:
    """Which keys each query sees, bool [B, T, S]."""
    place = context.positions_BT
    distance_BTS = place[:, :, None] - place[:, None, :]
    seen_BTS = distance_BTS >= 0
    if kind.window is not None:
        seen_BTS &= distance_BTS < kind.window
        if kind.chunked:
            chunk_BT = place // kind.window
            seen_BTS &= chunk_BT[:, :, None] == chunk_BT[:, None, :]
    segments = context.segment_ids_BT
    if segments is not None:
        seen_BTS &= (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] > 0)
    return seen_BTS
