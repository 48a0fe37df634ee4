"""The deep compression autoencoder (DC-AE, Chen et al. 2024) that Sana's latents come from.

Legend: B batch, H and W height and width, T places, C channels, G groups of heads, D width of a
head.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.config.errors import ConfigError
from fornax.diffusion.models.autoencoders.config import DeepCompressionConfig
from fornax.diffusion.models.autoencoders.tiling import Tiling, decode, tiled
from fornax.diffusion.models.image_blocks import (
    channels_to_space,
    enlarged,
    on_image,
    recomputed,
    space_to_channels,
)
from fornax.diffusion.models.parts import ACTIVATIONS, Conv, Dense, Make, RMSNorm
from fornax.models import Remat
from fornax.models.scope import scoped

__all__ = ["DeepCompressionAutoencoder"]

_EPS = 1e-5
"""Of all norms."""
_EXPAND = 4
"""Hidden channels of the gated convolution over C."""
_HALF = (2, 2)


class _Residual(nnx.Module):
    """x + norm(conv2(act(conv1(x))))."""

    def __init__(self, channels: int, activation: str, make: Make):
        self.conv1 = Conv(channels, channels, 3, **make)
        self.conv2 = Conv(channels, channels, 3, bias=False, axes=("mlp", "embed"), **make)
        self.norm = RMSNorm(channels, eps=_EPS, bias=True, dtype=make["dtype"])
        self.activation = activation

    @scoped
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        h_BHWC = self.conv2(ACTIVATIONS[self.activation](self.conv1(x_BHWC)))
        return on_image(x_BHWC + self.norm(h_BHWC))


class _LinearAttention(nnx.Module):
    """x + norm(out(attention)) with relu(q) . relu(k) in place of softmax's exponential.

    Queries, keys and values are seen beside convolutions of themselves, of several windows.
    """

    def __init__(self, channels: int, head_dim: int, windows: Sequence[int], make: Make):
        heads = channels // head_dim
        width = heads * head_dim
        self.head_dim = head_dim
        self.query = Dense(channels, width, bias=False, **make)
        self.key = Dense(channels, width, bias=False, **make)
        self.value = Dense(channels, width, bias=False, **make)
        wide = 3 * width
        conv = functools.partial(Conv, wide, wide, bias=False, axes=(None, "mlp"), **make)
        self.depthwise = nnx.List(conv(window, groups=wide) for window in windows)
        self.mixing = nnx.List(conv(1, groups=3 * heads) for _ in windows)
        wide = width * (1 + len(windows))
        self.out = Dense({"mlp": wide}, {"embed": channels}, bias=False, **make)
        self.norm = RMSNorm(channels, eps=_EPS, bias=True, dtype=make["dtype"])

    @scoped
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        B, H, W, _ = x_BHWC.shape
        own = [self.query(x_BHWC), self.key(x_BHWC), self.value(x_BHWC)]
        scales = [jnp.concatenate(own, axis=-1)]
        for depthwise, mixing in zip(self.depthwise, self.mixing, strict=True):
            scales.append(mixing(depthwise(scales[0])))
        wide = jnp.concatenate(scales, axis=-1).astype(jnp.float32)
        # Three neighbouring heads of the channels are a query, a key and a value.
        triples_BTG3D = wide.reshape(B, H * W, -1, 3, self.head_dim)
        q_BTGD = jax.nn.relu(triples_BTG3D[..., 0, :])
        k_BTGD = jax.nn.relu(triples_BTG3D[..., 1, :])
        state_BGDE = jnp.einsum("btgd,btge->bgde", k_BTGD, triples_BTG3D[..., 2, :])
        o_BTGD = jnp.einsum("btgd,bgde->btge", q_BTGD, state_BGDE)
        sums_BTG = jnp.einsum("btgd,bgd->btg", q_BTGD, jnp.sum(k_BTGD, axis=1))
        o_BTGD = o_BTGD / (sums_BTG[..., None] + 1e-15)
        y_BHWC = self.out(o_BTGD.reshape(B, H, W, -1).astype(x_BHWC.dtype))
        return on_image(x_BHWC + self.norm(y_BHWC))


class _GatedConv(nnx.Module):
    """x + norm(point(a * silu(b))) of a depthwise convolution's halves a and b."""

    def __init__(self, channels: int, make: Make):
        hidden = 2 * _EXPAND * channels
        self.inverted = Conv(channels, hidden, 1, **make)
        self.depth = Conv(hidden, hidden, 3, groups=hidden, axes=(None, "mlp"), **make)
        self.point = Conv(hidden // 2, channels, 1, bias=False, axes=("mlp", "embed"), **make)
        self.norm = RMSNorm(channels, eps=_EPS, bias=True, dtype=make["dtype"])

    @scoped
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        h_BHWC = self.depth(jax.nn.silu(self.inverted(x_BHWC)))
        up, gate = jnp.split(h_BHWC, 2, axis=-1)
        return on_image(x_BHWC + self.norm(self.point(up * jax.nn.silu(gate))))


class _Attending(nnx.Module):
    """Linear attention, then a gated convolution."""

    def __init__(self, channels: int, head_dim: int, windows: Sequence[int], make: Make):
        self.attention = _LinearAttention(channels, head_dim, windows, make)
        self.conv = _GatedConv(channels, make)

    @scoped
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        return self.conv(self.attention(x_BHWC))


class _Down(nnx.Module):
    """Half the size: a convolution and, with `shortcut`, the mean of neighbouring channels of the
    patches."""

    def __init__(
        self, channels: int, outputs: int, unshuffle: bool, shortcut: bool, make: Make, axes: Any
    ):
        self.unshuffle, self.shortcut, self.outputs = unshuffle, shortcut, outputs
        width, stride = (outputs // 4, 1) if unshuffle else (outputs, 2)
        self.conv = Conv(channels, width, 3, stride=stride, padding=1, axes=axes, **make)

    @scoped
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        y_BHWC = self.conv(x_BHWC)
        y_BHWC = space_to_channels(y_BHWC, _HALF) if self.unshuffle else y_BHWC
        if self.shortcut:
            y_BHWC = y_BHWC + _averaged(space_to_channels(x_BHWC, _HALF), self.outputs)
        return on_image(y_BHWC)


class _Up(nnx.Module):
    """Twice the size: a convolution and, with `shortcut`, repeated channels made into patches."""

    def __init__(
        self, channels: int, outputs: int, shuffle: bool, shortcut: bool, make: Make, axes: Any
    ):
        self.shuffle, self.shortcut, self.outputs = shuffle, shortcut, outputs
        width = 4 * outputs if shuffle else outputs
        self.conv = Conv(channels, width, 3, axes=axes, **make)

    @scoped
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        if self.shuffle:
            y_BHWC = channels_to_space(self.conv(x_BHWC), _HALF)
        else:
            y_BHWC = self.conv(enlarged(x_BHWC))
        if self.shortcut:
            y_BHWC = y_BHWC + channels_to_space(_repeated(x_BHWC, 4 * self.outputs), _HALF)
        return on_image(y_BHWC)


def _averaged(x_BHWC: jax.Array, outputs: int) -> jax.Array:
    return jnp.mean(x_BHWC.reshape(*x_BHWC.shape[:3], outputs, -1), axis=-1)


def _repeated(x_BHWC: jax.Array, outputs: int) -> jax.Array:
    return jnp.repeat(x_BHWC, outputs // x_BHWC.shape[-1], axis=-1)


class _Stage(nnx.Module):
    """Blocks of one size and the change to or from the next, in the order in which they run."""

    def __init__(self, parts: Sequence[nnx.Module]):
        self.parts = nnx.List(parts)

    @scoped
    def __call__(self, x_BHWC: jax.Array, remat: str | Remat) -> jax.Array:
        for part in self.parts:
            x_BHWC = recomputed(part, remat)(x_BHWC)
        return x_BHWC


def _blocks(
    config: DeepCompressionConfig, side: str, stage: int, activation: str, make: Make
) -> list[nnx.Module]:
    """The blocks of a stage of the encoder or decoder."""
    kind = getattr(config, f"{side}_blocks")[stage]
    width = getattr(config, f"{side}_channels")[stage]
    windows = getattr(config, f"{side}_scales")[stage]
    one: Callable[[], nnx.Module] = functools.partial(_Residual, width, activation, make)
    if kind == "EfficientViTBlock":
        one = functools.partial(_Attending, width, config.head_dim, windows, make)
    return [one() for _ in range(getattr(config, f"{side}_layers")[stage])]


_INNER = ("embed", "mlp")


class _Encoder(nnx.Module):
    """Images to latents."""

    def __init__(self, config: DeepCompressionConfig, make: Make):
        widths, layers = config.encoder_channels, config.encoder_layers
        unshuffle = config.downsample == "pixel_unshuffle"
        self.config = config
        self.conv_in: Conv | _Down
        if layers[0]:
            self.conv_in = Conv(config.in_channels, widths[0], 3, axes=(None, "embed"), **make)
        else:
            axes = (None, "embed")
            self.conv_in = _Down(config.in_channels, widths[1], unshuffle, False, make, axes)
        stages = []
        for stage, width in enumerate(widths):
            parts = _blocks(config, "encoder", stage, "silu", make)
            if parts and stage < len(widths) - 1:
                parts.append(_Down(width, widths[stage + 1], unshuffle, True, make, _INNER))
            stages.append(_Stage(parts))
        self.stages = nnx.List(stages)
        self.conv_out = Conv(widths[-1], config.latent_channels, 3, axes=("embed", None), **make)

    @scoped
    def __call__(self, x_BHWC: jax.Array, remat: str | Remat) -> jax.Array:
        x_BHWC = on_image(self.conv_in(x_BHWC))
        for stage in self.stages:
            x_BHWC = stage(x_BHWC, remat)
        z_BHWC = self.conv_out(x_BHWC)
        if self.config.encoder_out_shortcut:
            z_BHWC = z_BHWC + _averaged(x_BHWC, self.config.latent_channels)
        return on_image(z_BHWC)


class _Decoder(nnx.Module):
    """Latents to images; stages are numbered as the encoder's, and run from the last."""

    def __init__(self, config: DeepCompressionConfig, make: Make):
        widths, layers = config.decoder_channels, config.decoder_layers
        shuffle = config.upsample == "pixel_shuffle"
        self.config = config
        self.conv_in = Conv(config.latent_channels, widths[-1], 3, axes=(None, "embed"), **make)
        stages = []
        for stage, width in enumerate(widths):
            activation = config.decoder_activations[stage]
            parts = _blocks(config, "decoder", stage, activation, make)
            if parts and stage < len(widths) - 1:
                parts.insert(0, _Up(widths[stage + 1], width, shuffle, True, make, _INNER))
            stages.append(_Stage(parts))
        self.stages = nnx.List(stages)
        width = widths[0] if layers[0] else widths[1]
        self.norm = RMSNorm(width, eps=_EPS, bias=True, dtype=make["dtype"])
        self.conv_out: Conv | _Up
        axes = ("embed", None)
        if layers[0]:
            self.conv_out = Conv(width, config.in_channels, 3, axes=axes, **make)
        else:
            self.conv_out = _Up(width, config.in_channels, shuffle, False, make, axes)

    @scoped
    def __call__(self, z_BHWC: jax.Array, remat: str | Remat) -> jax.Array:
        x_BHWC = self.conv_in(z_BHWC)
        if self.config.decoder_in_shortcut:
            x_BHWC = x_BHWC + _repeated(z_BHWC, x_BHWC.shape[-1])
        x_BHWC = on_image(x_BHWC)
        for stage in reversed(self.stages):
            x_BHWC = stage(x_BHWC, remat)
        return on_image(self.conv_out(ACTIVATIONS[self.config.out_activation](self.norm(x_BHWC))))


class DeepCompressionAutoencoder(nnx.Module):
    """Images in -1..1 to latents and back, without a distribution.

    `encode` and `decode` are the network's; `latents` and `images` are what a denoiser's caller
    needs, with the scale applied once.
    """

    def __init__(
        self,
        config: DeepCompressionConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        compute_dtype: DTypeLike | None = None,
    ):
        """Make the parameters; arguments as of `AutoencoderKL`."""
        compute_dtype = dtype if compute_dtype is None else compute_dtype
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        self.config, self.compute_dtype = config, compute_dtype
        self.encoder = _Encoder(config, make)
        self.decoder = _Decoder(config, make)

    def encode(
        self, images_BHWC: jax.Array, *, tiling: Tiling | None = None, remat: str | Remat = "none"
    ) -> jax.Array:
        """Encode images -> z in the compute dtype.

        Args:
          images_BHWC: in -1..1, sides multiples of `config.factor`.
          tiling: how images larger than a tile are cut; None for no cut.
          remat: what the backward pass computes again of each block; tiles keep everything.

        Raises:
          ConfigError: images of another size or number of channels.
        """
        config = self.config
        sides = images_BHWC.shape[1:3]
        if (
            images_BHWC.ndim != 4
            or images_BHWC.shape[-1] != config.in_channels
            or any(side % config.factor for side in sides)
        ):
            raise ConfigError(
                f"images of shape {images_BHWC.shape} do not fit an autoencoder of "
                f"[B, H, W, {config.in_channels}] with sides that are multiples of "
                f"{config.factor}; crop or resize them"
            )
        if tiling is None or max(sides) <= tiling.size:
            return self.encoded(images_BHWC, remat)
        run = functools.partial(_encoded_tile, *nnx.split(self))
        out = tiling.size // config.factor
        return tiled(run, images_BHWC, tiling, side=tiling.size, out=out)

    def decode(
        self, z_BHWC: jax.Array, *, tiling: Tiling | None = None, remat: str | Remat = "none"
    ) -> jax.Array:
        """Decode z -> images in the compute dtype.

        Args:
          z_BHWC: [B, H, W, latent_channels].
          tiling: how images larger than a tile are cut; None for no cut.
          remat: what the backward pass computes again of each block; tiles keep everything.

        Raises:
          ConfigError: z of another number of channels.
        """
        return decode(self, z_BHWC, tiling, remat)

    @scoped
    def encoded(self, images_BHWC: jax.Array, remat: str | Remat = "none") -> jax.Array:
        """Encode the whole at once."""
        return self.encoder(images_BHWC.astype(self.compute_dtype), remat)

    @scoped
    def decoded(self, z_BHWC: jax.Array, remat: str | Remat = "none") -> jax.Array:
        """Decode the whole at once."""
        return self.decoder(z_BHWC.astype(self.compute_dtype), remat)

    def scaled(self, z_BHWC: jax.Array) -> jax.Array:
        """What a denoiser is given of z, float32."""
        return z_BHWC.astype(jnp.float32) * self.config.scale

    def unscaled(self, latents_BHWC: jax.Array) -> jax.Array:
        """z of what a denoiser gives, float32."""
        return latents_BHWC.astype(jnp.float32) / self.config.scale

    def latents(
        self,
        images_BHWC: jax.Array,
        noise_BHWC: jax.Array | None = None,
        *,
        tiling: Tiling | None = None,
    ) -> jax.Array:
        """The float32 latents of images; see `encode`.

        Raises:
          ConfigError: noise, of which there is none here.
        """
        if noise_BHWC is not None:
            raise ConfigError(
                "this autoencoder's latents are not a distribution and noise_BHWC would be "
                "ignored; leave it None"
            )
        return self.scaled(self.encode(images_BHWC, tiling=tiling))

    def images(self, latents_BHWC: jax.Array, *, tiling: Tiling | None = None) -> jax.Array:
        """Images of a denoiser's latents; see `decode`."""
        return self.decode(self.unscaled(latents_BHWC), tiling=tiling)


@functools.partial(jax.jit, static_argnums=0)
def _encoded_tile(graphdef: Any, state: nnx.State, tile_BHWC: jax.Array) -> jax.Array:
    return nnx.merge(graphdef, state).encoded(tile_BHWC)
