"""The autoencoder of Stable Diffusion, SDXL, SD3, Flux and FLUX.2: images to a Gaussian and back.

Legend: B batch, H and W height and width of images or latents, C channels.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.config.errors import ConfigError
from fornax.diffusion.models.autoencoders.config import KLConfig
from fornax.diffusion.models.autoencoders.tiling import Tiling, decode, tiled
from fornax.diffusion.models.image_blocks import (
    Downsample,
    ImageAttention,
    ResidualBlock,
    Upsample,
    channels_to_space,
    on_image,
    recomputed,
    space_to_channels,
)
from fornax.diffusion.models.parts import Conv, GroupNorm, Make
from fornax.models import Remat
from fornax.models.scope import scoped

__all__ = ["AutoencoderKL", "Gaussian"]

_EPS = 1e-6
"""Of all norms."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gaussian:
    """A normal distribution over z, of an image or a video, with a diagonal covariance, in
    float32."""

    mean_BHWC: jax.Array
    logvar_BHWC: jax.Array

    def sample(self, noise_BHWC: jax.Array) -> jax.Array:
        """mean + deviation * noise, of standard normal noise."""
        return self.mean_BHWC + jnp.exp(0.5 * self.logvar_BHWC) * noise_BHWC

    def divergence(self) -> jax.Array:
        """float32 [B]: the Kullback-Leibler divergence from a standard normal, in nats."""
        terms = self.mean_BHWC**2 + jnp.exp(self.logvar_BHWC) - 1.0 - self.logvar_BHWC
        return 0.5 * jnp.sum(terms, axis=tuple(range(1, terms.ndim)))


def latent_moments(
    autoencoder: Any, x_BX: jax.Array, tiling: Tiling | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Mean and standard deviation of the latents that a denoiser is given, float32.

    Args:
      autoencoder: any of images or of videos; its scaling is affine, of each number by itself.
      x_BX: images or videos as for its `encode`.
      tiling: how those larger than a tile are cut; None for no cut.

    Returns:
      Both of the latents' shape; no deviation where they are not a distribution.
    """
    found = autoencoder.encode(x_BX, tiling=tiling)
    if not isinstance(found, Gaussian):
        return autoencoder.scaled(found), None
    mean, deviation = found.mean_BHWC, jnp.exp(0.5 * found.logvar_BHWC)
    nothing = autoencoder.scaled(jnp.zeros_like(mean))
    return autoencoder.scaled(mean), autoencoder.scaled(deviation) - nothing


class _Level(nnx.Module):
    """Residual blocks, then a change of size or none."""

    def __init__(
        self,
        config: KLConfig,
        channels: int,
        outputs: int,
        layers: int,
        resize: Callable[..., Downsample | Upsample] | None,
        make: Make,
    ):
        self.blocks = nnx.List(
            _block(config, channels if index == 0 else outputs, outputs, make)
            for index in range(layers)
        )
        self.resize = None if resize is None else resize(outputs, **make)

    @scoped
    def __call__(self, x_BHWC: jax.Array, remat: str | Remat) -> jax.Array:
        for block in self.blocks:
            x_BHWC = recomputed(block, remat)(x_BHWC)
        return x_BHWC if self.resize is None else self.resize(x_BHWC)


class _Middle(nnx.Module):
    """Two residual blocks, with attention between them where the config has it."""

    def __init__(self, config: KLConfig, width: int, make: Make):
        self.blocks = nnx.List(_block(config, width, width, make) for _ in range(2))
        attention = functools.partial(ImageAttention, width, groups=config.norm_groups, eps=_EPS)
        self.attention = attention(**make) if config.mid_attention else None

    @scoped
    def __call__(self, x_BHWC: jax.Array, remat: str | Remat) -> jax.Array:
        x_BHWC = recomputed(self.blocks[0], remat)(x_BHWC)
        if self.attention is not None:
            x_BHWC = recomputed(self.attention, remat)(x_BHWC)
        return recomputed(self.blocks[1], remat)(x_BHWC)


def _block(config: KLConfig, channels: int, outputs: int, make: Make) -> ResidualBlock:
    act, groups = config.activation, config.norm_groups
    return ResidualBlock(channels, outputs, groups=groups, eps=_EPS, activation=act, **make)


class _Encoder(nnx.Module):
    """Images to the moments of z."""

    def __init__(self, config: KLConfig, make: Make):
        widths, moments = config.channels, 2 * config.latent_channels
        self.conv_in = Conv(config.in_channels, widths[0], 3, axes=(None, "embed"), **make)
        levels = []
        for level, width in enumerate(widths):
            last = level == len(widths) - 1
            resize = None if last else functools.partial(Downsample, padding=0)
            before = widths[max(level - 1, 0)]
            levels.append(_Level(config, before, width, config.layers, resize, make))
        self.levels = nnx.List(levels)
        self.middle = _Middle(config, widths[-1], make)
        groups, dtype = config.norm_groups, make["dtype"]
        self.norm = GroupNorm(widths[-1], groups=groups, eps=_EPS, dtype=dtype)
        self.conv_out = Conv(widths[-1], moments, 3, axes=("embed", None), **make)

    @scoped
    def __call__(self, x_BHWC: jax.Array, remat: str | Remat) -> jax.Array:
        x_BHWC = on_image(self.conv_in(x_BHWC))
        for level in self.levels:
            x_BHWC = level(x_BHWC, remat)
        x_BHWC = self.middle(x_BHWC, remat)
        return on_image(self.conv_out(self.norm(x_BHWC, activation="silu")))


class _Decoder(nnx.Module):
    """z to images; the levels in the order in which they run."""

    def __init__(self, config: KLConfig, make: Make):
        widths = (config.decoder_channels or config.channels)[::-1]
        latent = config.latent_channels
        self.conv_in = Conv(latent, widths[0], 3, axes=(None, "embed"), **make)
        self.middle = _Middle(config, widths[0], make)
        levels = []
        for index, width in enumerate(widths):
            resize = None if index == len(widths) - 1 else Upsample
            before = widths[max(index - 1, 0)]
            levels.append(_Level(config, before, width, config.layers + 1, resize, make))
        self.levels = nnx.List(levels)
        groups, dtype = config.norm_groups, make["dtype"]
        self.norm = GroupNorm(widths[-1], groups=groups, eps=_EPS, dtype=dtype)
        self.conv_out = Conv(widths[-1], config.out_channels, 3, axes=("embed", None), **make)

    @scoped
    def __call__(self, z_BHWC: jax.Array, remat: str | Remat) -> jax.Array:
        x_BHWC = self.middle(on_image(self.conv_in(z_BHWC)), remat)
        for level in self.levels:
            x_BHWC = level(x_BHWC, remat)
        return on_image(self.conv_out(self.norm(x_BHWC, activation="silu")))


class _Statistics(nnx.Module):
    """Mean and variance of each channel of latent patches."""

    def __init__(self, width: int):
        self.mean = nnx.Param(jnp.zeros((width,), jnp.float32), axes=("norm",))
        self.variance = nnx.Param(jnp.ones((width,), jnp.float32), axes=("norm",))


class AutoencoderKL(nnx.Module):
    """Images in -1..1 to latents and back.

    `encode` and `decode` are the network's; `latents` and `images` are what a denoiser's caller
    needs, with shift and scale applied once.
    """

    def __init__(
        self,
        config: KLConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        compute_dtype: DTypeLike | None = None,
    ):
        """Make the parameters.

        Args:
          config: what it is.
          rngs: source of randomness.
          dtype: of the parameters.
          compute_dtype: of the products; None for `dtype`.

        Raises:
          ConfigError: float16, in which its activations overflow.
        """
        compute_dtype = dtype if compute_dtype is None else compute_dtype
        if config.force_upcast and jnp.dtype(compute_dtype) == jnp.float16:
            raise ConfigError(
                "this autoencoder's activations overflow float16 (force_upcast in its config.json);"
                " compute in bfloat16 or float32"
            )
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        self.config, self.compute_dtype = config, compute_dtype
        latent, moments = config.latent_channels, 2 * config.latent_channels
        self.encoder = _Encoder(config, make)
        self.decoder = _Decoder(config, make)
        square = functools.partial(Conv, window=1, axes=(None, None), **make)
        self.quant = square(moments, moments) if config.quant_conv else None
        self.post_quant = square(latent, latent) if config.post_quant_conv else None
        width = latent * config.patch[0] * config.patch[1]
        self.statistics = _Statistics(width) if config.batch_statistics else None

    def encode(
        self, images_BHWC: jax.Array, *, tiling: Tiling | None = None, remat: str | Remat = "none"
    ) -> Gaussian:
        """Encode images -> the distribution of z.

        Args:
          images_BHWC: in -1..1, sides multiples of `config.factor` (and the patch's).
          tiling: how images larger than a tile are cut; None for no cut.
          remat: what the backward pass computes again of each block; tiles keep everything.

        Raises:
          ConfigError: images of another size or number of channels.
        """
        config = self.config
        sides = config.factor * config.patch[0], config.factor * config.patch[1]
        if (
            images_BHWC.ndim != 4
            or images_BHWC.shape[-1] != config.in_channels
            or images_BHWC.shape[1] % sides[0]
            or images_BHWC.shape[2] % sides[1]
        ):
            raise ConfigError(
                f"images of shape {images_BHWC.shape} do not fit an autoencoder of "
                f"[B, H, W, {config.in_channels}] with sides that are multiples of {sides[0]} and "
                f"{sides[1]}; crop or resize them"
            )
        if tiling is None or max(images_BHWC.shape[1:3]) <= tiling.size:
            moments = self.moments(images_BHWC, remat)
        else:
            run = functools.partial(_moments_of_tile, *nnx.split(self))
            out = tiling.size // config.factor
            moments = tiled(run, images_BHWC, tiling, side=tiling.size, out=out)
        mean, logvar = jnp.split(moments.astype(jnp.float32), 2, axis=-1)
        return Gaussian(mean, jnp.clip(logvar, -30.0, 20.0))

    @scoped
    def moments(self, images_BHWC: jax.Array, remat: str | Remat = "none") -> jax.Array:
        """Mean and logarithm of the variance of z, one after another in the last axis."""
        x_BHWC = self.encoder(images_BHWC.astype(self.compute_dtype), remat)
        return x_BHWC if self.quant is None else self.quant(x_BHWC)

    def decode(
        self, z_BHWC: jax.Array, *, tiling: Tiling | None = None, remat: str | Remat = "none"
    ) -> jax.Array:
        """Decode z -> images in the compute dtype, in -1..1 or a little outside.

        Args:
          z_BHWC: [B, H, W, latent_channels].
          tiling: how images larger than a tile are cut; None for no cut.
          remat: what the backward pass computes again of each block; tiles keep everything.

        Raises:
          ConfigError: z of another number of channels.
        """
        return decode(self, z_BHWC, tiling, remat)

    @scoped
    def decoded(self, z_BHWC: jax.Array, remat: str | Remat = "none") -> jax.Array:
        """Decode the whole at once."""
        z_BHWC = z_BHWC.astype(self.compute_dtype)
        z_BHWC = z_BHWC if self.post_quant is None else self.post_quant(z_BHWC)
        return self.decoder(z_BHWC, remat)

    def scaled(self, z_BHWC: jax.Array) -> jax.Array:
        """What a denoiser is given of z, float32."""
        z_BHWC = z_BHWC.astype(jnp.float32)
        mean, deviation, config = *self._scaling(), self.config
        return (space_to_channels(z_BHWC, config.patch) - mean) / deviation * config.scale

    def unscaled(self, latents_BHWC: jax.Array) -> jax.Array:
        """z of what a denoiser gives, float32."""
        mean, deviation, config = *self._scaling(), self.config
        z_BHWC = latents_BHWC.astype(jnp.float32) / config.scale * deviation + mean
        return channels_to_space(z_BHWC, config.patch)

    def _scaling(self) -> tuple[jax.Array, jax.Array]:
        config = self.config
        if self.statistics is not None:
            variance = self.statistics.variance[...] + config.statistics_eps
            return self.statistics.mean[...], jnp.sqrt(variance)
        mean = config.mean if config.mean is not None else (config.shift or 0.0)
        deviation = 1.0 if config.deviation is None else config.deviation
        return jnp.asarray(mean, jnp.float32), jnp.asarray(deviation, jnp.float32)

    def latents(
        self,
        images_BHWC: jax.Array,
        noise_BHWC: jax.Array | None = None,
        *,
        tiling: Tiling | None = None,
    ) -> jax.Array:
        """The float32 latents of images, as a denoiser is trained on them.

        Args:
          images_BHWC: as for `encode`.
          noise_BHWC: standard normal, of the shape of z, for a sample; None for the mean.
          tiling: as for `encode`.
        """
        found = self.encode(images_BHWC, tiling=tiling)
        z_BHWC = found.mean_BHWC if noise_BHWC is None else found.sample(noise_BHWC)
        return self.scaled(z_BHWC)

    def images(self, latents_BHWC: jax.Array, *, tiling: Tiling | None = None) -> jax.Array:
        """Images of a denoiser's latents; see `decode`."""
        return self.decode(self.unscaled(latents_BHWC), tiling=tiling)


@functools.partial(jax.jit, static_argnums=0)
def _moments_of_tile(graphdef: Any, state: nnx.State, tile_BHWC: jax.Array) -> jax.Array:
    """One compiled program for each of the few shapes of tiles."""
    return nnx.merge(graphdef, state).moments(tile_BHWC)
