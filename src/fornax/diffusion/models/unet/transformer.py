"""The transformers of a U-Net's levels: image tokens that attend to each other and to text.

Legend: B batch, H height, W width, T image tokens, S text tokens, C channels, N heads, D width of
the text states.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.diffusion.models.image_blocks import on_image
from fornax.diffusion.models.parts import Dense, GatedMLP, GroupNorm, LayerNorm, Make
from fornax.mesh import constrain
from fornax.models import Remat
from fornax.models.remat import rematerialise
from fornax.models.scope import scoped
from fornax.models.stack import stack_layers

__all__ = ["ImageTransformer"]

_EXPAND = 4
"""Hidden width of the MLP over C."""


class _Attention(nnx.Module):
    """Attention of image tokens to tokens of width `keys`."""

    def __init__(
        self,
        channels: int,
        keys: int,
        *,
        heads: int,
        upcast: bool,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        wide = {"heads": heads, "head_dim": channels // heads}
        self.query = Dense(channels, wide, bias=False, **make)
        self.key = Dense(keys, wide, bias=False, **make)
        self.value = Dense(keys, wide, bias=False, **make)
        self.out = Dense(wide, {"embed": channels}, **make)
        self.upcast = upcast

    @scoped
    def __call__(
        self, x_BTC: jax.Array, keys_BSD: jax.Array, mask_BS: jax.Array | None = None
    ) -> jax.Array:
        q_BTNH, k_BSNH, v_BSNH = self.query(x_BTC), self.key(keys_BSD), self.value(keys_BSD)
        if self.upcast:
            q_BTNH, k_BSNH, v_BSNH = (x.astype(jnp.float32) for x in (q_BTNH, k_BSNH, v_BSNH))
        o_BTNH = kernels.attention(
            q_BTNH,
            k_BSNH,
            v_BSNH,
            scale=q_BTNH.shape[-1] ** -0.5,
            causal=False,
            segment_ids_q_BT=None if mask_BS is None else jnp.ones(x_BTC.shape[:2], jnp.int32),
            segment_ids_k_BS=mask_BS,
        )
        return self.out(o_BTNH)


class _Block(nnx.Module):
    """Attention to the image or, with `only_cross`, to the text; to the text; a GEGLU."""

    def __init__(
        self,
        channels: int,
        text_dim: int,
        *,
        heads: int,
        only_cross: bool,
        upcast: bool,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        norm = functools.partial(LayerNorm, channels, eps=1e-5, dtype=dtype)
        attention = functools.partial(_Attention, channels, heads=heads, upcast=upcast, **make)
        self.norm1, self.norm2, self.norm3 = norm(), norm(), norm()
        self.attention1 = attention(text_dim if only_cross else channels)
        self.attention2 = attention(text_dim)
        self.mlp = GatedMLP(channels, _EXPAND * channels, channels, activation="gelu", **make)
        self.only_cross = only_cross

    @scoped
    def __call__(
        self, x_BTC: jax.Array, text_BSD: jax.Array, mask_BS: jax.Array | None
    ) -> jax.Array:
        normed_BTC = self.norm1(x_BTC)
        if self.only_cross:
            x_BTC = x_BTC + self.attention1(normed_BTC, text_BSD)
        else:
            x_BTC = x_BTC + self.attention1(normed_BTC, normed_BTC)
        x_BTC = x_BTC + self.attention2(self.norm2(x_BTC), text_BSD, mask_BS)
        x_BTC = x_BTC + self.mlp(self.norm3(x_BTC))
        return constrain(x_BTC, ("batch", None, None))


class ImageTransformer(nnx.Module):
    """x + out(blocks(in(norm(x)))) over the places of an image, run as a scan over the blocks.

    Attributes:
      blocks: one block whose parameters have a leading axis over the blocks.
    """

    def __init__(
        self,
        channels: int,
        text_dim: int,
        *,
        layers: int,
        heads: int,
        groups: int,
        only_cross: bool = False,
        upcast: bool = False,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the parameters.

        Args:
          channels: C.
          text_dim: D.
          layers: blocks.
          heads: N, a divisor of C.
          groups: of the norm.
          only_cross: whether the first attention of a block is to the text too.
          upcast: whether attention runs in float32.
          rngs: source of randomness.
          dtype: of the parameters.
          compute_dtype: of the products.
        """
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        self.norm = GroupNorm(channels, groups=groups, eps=1e-6, dtype=dtype)
        self.layers = layers
        self.project_in = Dense(channels, channels, **make)
        self.blocks = stack_layers(
            lambda rngs: _Block(
                channels,
                text_dim,
                heads=heads,
                only_cross=only_cross,
                upcast=upcast,
                rngs=rngs,
                dtype=dtype,
                compute_dtype=compute_dtype,
            ),
            layers,
            rngs,
        )
        self.project_out = Dense({"mlp": channels}, {"embed": channels}, **make)

    @scoped
    def __call__(
        self,
        x_BHWC: jax.Array,
        text_BSD: jax.Array,
        mask_BS: jax.Array | None = None,
        remat: str | Remat = "none",
    ) -> jax.Array:
        """Apply -> y [B, H, W, C] in the compute dtype.

        Args:
          x_BHWC: the image.
          text_BSD: the text states.
          mask_BS: int32, 0 for text tokens that are padding; None for no padding.
          remat: what the backward pass computes again of each block.
        """
        B, H, W, C = x_BHWC.shape
        tokens_BTC = self.project_in(self.norm(x_BHWC)).reshape(B, H * W, C)
        graphdef, state = nnx.split(self.blocks)

        def block(x_BTC: jax.Array, layer: nnx.State) -> jax.Array:
            return nnx.merge(graphdef, layer)(x_BTC, text_BSD, mask_BS)

        # A scan of one step is not a loop once compiled.
        run = rematerialise(block, remat, prevent_cse=self.layers == 1)
        tokens_BTC, _ = jax.lax.scan(lambda x, layer: (run(x, layer), None), tokens_BTC, state)
        return on_image(x_BHWC + self.project_out(tokens_BTC.reshape(B, H, W, C)))
