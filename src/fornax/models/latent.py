"""Multi-head latent attention.

Without a cache keys and values of all heads are made of the latent (the expanded form). A cache
keeps the latent itself: the up-projection of keys is then applied to the queries, and that of
values to what was gathered of the latents (the absorbed form), so that all heads read one key of
`cached_dim` numbers, whose beginning is its value.

Legend: B batch, T query tokens, D model width, N query heads, Q rank of queries, R rank of keys and
values, U unrotated and P rotated width, H = U + P, V value width.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.kernels import checkpoint_name, rotary_embedding
from fornax.mesh import constrain
from fornax.models.attend import AttendOptions, LayerCache, attend_uncached, grow_queries
from fornax.models.config import DecoderConfig, LayerKind
from fornax.models.context import LayerContext
from fornax.models.norm import RMSNorm
from fornax.models.projection import Projection, project, residual_std
from fornax.models.scope import scoped

__all__ = ["LatentAttention"]

_EPS = 1e-6


class LatentAttention(nnx.Module):
    """Multi-head latent attention with the options of `LatentConfig` (DeepSeek-V2, section 2.1).

    Attributes:
      q: queries of the residual stream, or None.
      q_down: the queries' latent, or None; where there is one, so are the next two.
      q_norm: its norm.
      q_up: queries of the latent.
      kv_down: the latent of keys and values, then the key that all heads share.
      kv_norm: the latent's norm.
      kv_up: each head's unrotated key, then its value, of the latent.
      o: the output projection.
    """

    def __init__(
        self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike, compute_dtype: DTypeLike
    ):
        """Make the projections and norms.

        Raises:
          ValueError: when the config has no latent attention.
        """
        latent = config.latent
        if latent is None:
            raise ValueError("the config has no latent attention")
        N, Q, R = config.num_heads, latent.query_rank, latent.key_value_rank
        self.config = latent
        make = functools.partial(Projection, rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        into = functools.partial(make, std=config.initializer_range)
        down = functools.partial(into, {"embed": config.hidden_size}, bias=latent.bias)
        heads = {"heads": N, "head_dim": config.head_width}
        self.q = None if Q else into({"embed": config.hidden_size}, heads, bias=False)
        self.q_down = down({"latent": Q}) if Q else None
        self.q_norm = RMSNorm((Q,), config, dtype=dtype, eps=_EPS) if Q else None
        self.q_up = into({"latent": Q}, heads, bias=False) if Q else None
        self.kv_down = down({"latent": latent.cached_dim})
        self.kv_norm = RMSNorm((R,), config, dtype=dtype, eps=_EPS)
        width = latent.unrotated_dim + latent.value_dim
        self.kv_up = into({"latent": R}, {"heads": N, "head_dim": width}, bias=False)
        self.o = make(
            {"heads": N, "head_dim": latent.value_dim},
            {"embed": config.hidden_size},
            bias=config.attention_output_bias,
            std=residual_std(config),
        )
        self.query_scaling = config.query_scaling
        self.scale = config.attention_scale
        self.softcap = config.attention_logit_softcap
        self.compute_dtype = compute_dtype

    @scoped
    def __call__(
        self,
        x_BTD: jax.Array,
        kind: LayerKind,
        context: LayerContext,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attend; returns y [B, T, D] and the cache layer with this pass's latents."""
        q_BTNH, latent_BTR, shared_BT1P = self._project(x_BTD, kind, context)
        if cache is not None:
            o_BTNV, cache = self._absorbed(q_BTNH, latent_BTR, shared_BT1P, kind, cache)
            return self.o(o_BTNV), cache
        up_BTNX = self.kv_up(latent_BTR)
        k_BTNU, v_BTNV = jnp.split(up_BTNX, [self.config.unrotated_dim], axis=-1)
        shared_BTNP = jnp.broadcast_to(shared_BT1P, (*k_BTNU.shape[:3], shared_BT1P.shape[3]))
        k_BTNH = jnp.concatenate([k_BTNU, shared_BTNP], axis=-1)
        k_BTNH = constrain(k_BTNH, ("batch", "length", "activation_heads", None))
        o_BTNV = attend_uncached(q_BTNH, k_BTNH, v_BTNV, context, self._options(kind))
        return checkpoint_name(self.o(o_BTNV), "attention_out"), None

    def _project(
        self, x_BTD: jax.Array, kind: LayerKind, context: LayerContext
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, T, N, H], latents [B, T, R] and shared keys [B, T, 1, P], rotated."""
        first = self.q_down if self.q is None else self.q
        assert first is not None
        q_BTNH, down_BTX = project(x_BTD, first, self.kv_down)
        if self.q_norm is not None and self.q_up is not None:
            q_BTNH = self.q_up(self.q_norm(q_BTNH))
        latent_BTR, shared_BTP = jnp.split(down_BTX, [self.config.key_value_rank], axis=-1)
        shared_BT1P = shared_BTP[:, :, None]
        if kind.rope != "none":
            rotation = context.rotations[kind.rope]
            q_BTNU, q_BTNP = jnp.split(q_BTNH, [self.config.unrotated_dim], axis=-1)
            with jax.named_scope("rope"):
                q_BTNH = jnp.concatenate([q_BTNU, rotary_embedding(q_BTNP, *rotation)], axis=-1)
                shared_BT1P = rotary_embedding(shared_BT1P, *rotation)
        scaling = self.query_scaling
        if scaling is not None and (scaling.layers == "all" or kind.rope == "none"):
            q_BTNH = grow_queries(q_BTNH, context.positions_BT, scaling)
        q_BTNH = constrain(q_BTNH, ("batch", "length", "activation_heads", None))
        return q_BTNH, self.kv_norm(latent_BTR), shared_BT1P

    def _absorbed(
        self,
        q_BTNH: jax.Array,
        latent_BTR: jax.Array,
        shared_BT1P: jax.Array,
        kind: LayerKind,
        cache: LayerCache,
    ) -> tuple[jax.Array, LayerCache]:
        """Attend to latents in a cache; returns o [B, T, N, V]."""
        up_RNX = self._up()
        up_RNU, up_RNV = jnp.split(up_RNX, [self.config.unrotated_dim], axis=-1)
        q_BTNU, q_BTNP = jnp.split(q_BTNH, [self.config.unrotated_dim], axis=-1)
        with jax.named_scope("kv_up"):
            q_BTNR = jnp.einsum("BTNU,RNU->BTNR", q_BTNU, up_RNU)
        o_BTNR, cache = cache.attend(
            jnp.concatenate([q_BTNR, q_BTNP], axis=-1),
            jnp.concatenate([latent_BTR[:, :, None], shared_BT1P], axis=-1),
            None,
            self._options(kind),
        )
        with jax.named_scope("kv_up"):
            o_BTNV = jnp.einsum("BTNR,RNV->BTNV", o_BTNR[..., : latent_BTR.shape[2]], up_RNV)
        return o_BTNV, cache

    def _options(self, kind: LayerKind) -> AttendOptions:
        return AttendOptions(
            scale=self.scale, window=kind.window, softcap=self.softcap, chunked=kind.chunked
        )

    def _up(self) -> jax.Array:
        """The up-projection w [R, N, U + V] in the compute dtype."""
        weight = self.kv_up.kernel.get_value() if type(self.kv_up) is Projection else None
        if isinstance(weight, jax.Array):
            return weight.astype(self.compute_dtype)
        # One that is adapted or packed is read as what it makes of unit vectors.
        return self.kv_up(jnp.eye(self.config.key_value_rank, dtype=self.compute_dtype))
