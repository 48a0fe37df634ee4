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
from fornax.preflight.formulas import growth, normed, project, seen, turned

__all__ = ["PlainLatent"]

_EPS = 1e-6
"""Of the norms of latents, whatever the model's own is."""


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
        down_BSX = project("BSD,DX->BSX", x_BTD, self.kv_down)
        latent_BSR = normed(down_BSX[..., :R], self.kv_norm, _EPS)
        up_RNX = self.kv_up.kernel[...].astype(jnp.float32)
        up_RNU, up_RNV = jnp.split(up_RNX, [self.config.unrotated_dim], axis=-1)
        scores_BNTS = jnp.einsum("BTNU,RNU,BSR->BNTS", q_BTNU, up_RNU, latent_BSR)
        scores_BNTS += jnp.einsum(
            "BTNP,BSP->BNTS",
            turned(q_BTNP, rotation),
            turned(down_BSX[..., None, R:], rotation)[:, :, 0],
        )
        grown_B1T1 = growth(self.query_scaling, kind, context)[:, None, :, None]
        scores_BNTS = scores_BNTS * self.scale * grown_B1T1
        if self.softcap is not None:
            scores_BNTS = self.softcap * jnp.tanh(scores_BNTS / self.softcap)
        seen_BNTS = seen(kind, context)[:, None]
        weights_BNTS = jax.nn.softmax(jnp.where(seen_BNTS, scores_BNTS, -1e30), axis=-1)
        weights_BNTS = jnp.where(seen_BNTS, weights_BNTS, 0)  # padding sees nothing
        o_BTNV = jnp.einsum("BNTS,BSR,RNV->BTNV", weights_BNTS, latent_BSR, up_RNV)
        return project("BTNV,NVD->BTD", o_BTNV, self.o), None

    def _queries(self, x_BTD: jax.Array) -> jax.Array:
        if self.q is not None:
            return project("BTD,DNH->BTNH", x_BTD, self.q)
        down_BTQ = normed(project("BTD,DQ->BTQ", x_BTD, self.q_down), self.q_norm, _EPS)
        return project("BTQ,QNH->BTNH", down_BTQ, self.q_up)
