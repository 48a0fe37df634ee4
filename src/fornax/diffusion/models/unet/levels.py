"""The levels of a U-Net: residual blocks, each followed by attention, then a change of size.

Legend: B batch, H height, W width, C channels, E width of the embedding, S text tokens, D width of
the text states.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.diffusion.models.image_blocks import (
    Downsample,
    ImageAttention,
    ResidualBlock,
    Upsample,
    recomputed,
)
from fornax.diffusion.models.parts import Make
from fornax.diffusion.models.unet.config import LevelAttention, UNetConfig
from fornax.diffusion.models.unet.transformer import ImageTransformer
from fornax.models import Remat
from fornax.models.scope import scoped

__all__ = ["DownLevel", "Given", "MiddleLevel", "UpLevel"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Given:
    """What all levels take in beside the image."""

    embedding_BE: jax.Array
    text_BSD: jax.Array | None
    mask_BS: jax.Array | None


class DownLevel(nnx.Module):
    """One level on the way down."""

    def __init__(
        self,
        config: UNetConfig,
        level: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the level of a number, 0 for the largest image."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        width = config.channels[level]
        first = config.channels[max(level - 1, 0)]
        layers = config.layers[level]
        self.blocks = _blocks(config, [(first, width)] + [(width, width)] * (layers - 1), make)
        self.attentions = _attentions(
            config, level, config.down_attention[level], config.transformer_layers[level], make
        )
        last = level == len(config.channels) - 1
        self.down = None if last else Downsample(width, padding=config.downsample_padding, **make)

    @scoped
    def __call__(
        self, x_BHWC: jax.Array, given: Given, remat: str | Remat
    ) -> tuple[jax.Array, list[jax.Array]]:
        """Apply -> the image for the next level, and what the way up takes over."""
        passed = []
        for index, block in enumerate(self.blocks):
            x_BHWC = recomputed(block, remat)(x_BHWC, given.embedding_BE)
            if self.attentions:
                x_BHWC = _attend(self.attentions[index], x_BHWC, given, remat)
            passed.append(x_BHWC)
        if self.down is not None:
            x_BHWC = self.down(x_BHWC)
            passed.append(x_BHWC)
        return x_BHWC, passed


class MiddleLevel(nnx.Module):
    """Two residual blocks with attention between them, or one where there is no attention."""

    def __init__(
        self,
        config: UNetConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the level."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        kind = config.mid_attention or "none"
        width, scale = config.channels[-1], config.mid_scale
        count = 1 if kind == "none" else 2
        self.blocks = _blocks(config, [(width, width)] * count, make, scale=scale)
        layers = config.transformer_layers[-1][:1]
        self.attentions = _attentions(config, -1, kind, layers, make, middle=True)

    @scoped
    def __call__(self, x_BHWC: jax.Array, given: Given, remat: str | Remat) -> jax.Array:
        """Apply -> y of the shape of x."""
        x_BHWC = recomputed(self.blocks[0], remat)(x_BHWC, given.embedding_BE)
        for attention, block in zip(self.attentions, self.blocks[1:], strict=True):
            x_BHWC = _attend(attention, x_BHWC, given, remat)
            x_BHWC = recomputed(block, remat)(x_BHWC, given.embedding_BE)
        return x_BHWC


class UpLevel(nnx.Module):
    """One level on the way up: each block takes in what the way down passed beside its input."""

    def __init__(
        self,
        config: UNetConfig,
        index: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the level of an index, 0 for the smallest image."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        level = len(config.channels) - 1 - index
        width, layers = config.channels[level], config.layers[level]
        below = config.channels[min(level + 1, len(config.channels) - 1)]
        above = config.channels[max(level - 1, 0)]
        inputs = [below] + [width] * layers
        passed = [width] * layers + [above]
        widths = [(own + other, width) for own, other in zip(inputs, passed, strict=True)]
        self.blocks = _blocks(config, widths, make)
        self.attentions = _attentions(
            config, level, config.up_attention[index], config.up_transformer_layers[index], make
        )
        self.up = None if level == 0 else Upsample(width, **make)

    @scoped
    def __call__(
        self,
        x_BHWC: jax.Array,
        passed: Sequence[jax.Array],
        given: Given,
        size: tuple[int, int] | None,
        remat: str | Remat,
    ) -> jax.Array:
        """Apply -> the image for the next level.

        Args:
          x_BHWC: the image from below.
          passed: what the way down passed, one for each block, in the order in which it was made.
          given: what all levels take in.
          size: of the image above, of which one that was odd is a pixel smaller than twice this.
          remat: what the backward pass computes again.
        """
        for index, (block, other) in enumerate(zip(self.blocks, reversed(passed), strict=True)):
            x_BHWC = jnp.concatenate([x_BHWC, other], axis=-1)
            x_BHWC = recomputed(block, remat)(x_BHWC, given.embedding_BE)
            if self.attentions:
                x_BHWC = _attend(self.attentions[index], x_BHWC, given, remat)
        return x_BHWC if self.up is None else self.up(x_BHWC, size)


def _blocks(
    config: UNetConfig, widths: Sequence[tuple[int, int]], make: Make, *, scale: float = 1.0
) -> nnx.List:
    """Residual blocks of channels in and out."""
    return nnx.List(
        ResidualBlock(
            channels,
            outputs,
            embedding=config.embedding_dim,
            groups=config.norm_groups,
            eps=config.norm_eps,
            activation=config.activation,
            scale_shift=config.scale_shift,
            scale=scale,
            **make,
        )
        for channels, outputs in widths
    )


def _attentions(
    config: UNetConfig,
    level: int,
    kind: LevelAttention,
    layers: Sequence[int],
    make: Make,
    *,
    middle: bool = False,
) -> nnx.List:
    """One attention for each entry of `layers`, or none at all."""
    width, heads, groups = config.channels[level], config.heads[level], config.norm_groups
    if kind == "none":
        return nnx.List()
    if kind == "self":
        scale = config.mid_scale if middle else 1.0
        how = {"heads": heads, "groups": groups, "eps": config.norm_eps, "scale": scale}
        return nnx.List(ImageAttention(width, **how, **make) for _ in layers)
    return nnx.List(
        ImageTransformer(
            width,
            config.text_dims[level],
            layers=count,
            heads=heads,
            groups=groups,
            only_cross=config.only_cross_attention[level] and not middle,
            upcast=config.upcast_attention,
            **make,
        )
        for count in layers
    )


def _attend(
    attention: ImageTransformer | ImageAttention,
    x_BHWC: jax.Array,
    given: Given,
    remat: str | Remat,
) -> jax.Array:
    if isinstance(attention, ImageAttention):
        return recomputed(attention, remat)(x_BHWC)
    assert given.text_BSD is not None, "the network asks for what its config needs"
    return attention(x_BHWC, given.text_BSD, given.mask_BS, remat)
