"""The autoencoder of LTX-Video: patches, an encoder causal over frames, a decoder that may denoise.

The decoder of released models sees frames on both sides, so videos are decoded whole, or in tiles
of all their frames. Legend: B batch, F frames, H height, W width, C channels in, N channels out.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.config.errors import ConfigError
from fornax.diffusion.models.autoencoders.config import Downsampling, LTXAutoencoderConfig
from fornax.diffusion.models.autoencoders.frames import (
    from_patches,
    mean_of_places,
    on_video,
    repeated_places,
    tiled_video,
    to_patches,
)
from fornax.diffusion.models.autoencoders.kl import Gaussian
from fornax.diffusion.models.autoencoders.tiling import Tiling
from fornax.diffusion.models.parts import (
    MLP,
    Conv,
    LayerNorm,
    Make,
    RMSNorm,
    timestep_embedding,
)
from fornax.models.scope import scoped

__all__ = ["LTXAutoencoder"]

_EPS = 1e-8
"""Of the norms without weights."""
_WAVES = 256
"""Sines and cosines of the decoder's time."""


class _Conv(nnx.Module):
    """A convolution over frames, height and width; frames at the ends are repeated."""

    def __init__(
        self,
        channels: int,
        outputs: int,
        causal: bool,
        make: Make,
        *,
        window: int = 3,
        stride: int = 1,
        axes: tuple[str | None, str | None] = ("embed", "mlp"),
    ):
        side = (window // 2, window // 2)
        self.conv = Conv(
            channels,
            outputs,
            (window,) * 3,
            stride=(stride,) * 3,
            padding=((0, 0), side, side),
            axes=axes,
            **make,
        )
        self.frames = (window - 1, 0) if causal else side

    @scoped
    def __call__(self, x_BFHWC: jax.Array) -> jax.Array:
        none = (0, 0)
        x_BFHWC = jnp.pad(x_BFHWC, (none, self.frames, none, none, none), mode="edge")
        return on_video(self.conv(x_BFHWC))


class _TimeTable(nnx.Module):
    """Shifts and scales: vectors of a time's embedding and a table's, added."""

    def __init__(self, count: int, channels: int, make: Make):
        drawn = jax.random.normal(make["rngs"].params(), (count, channels)) * channels**-0.5
        self.table = nnx.Param(drawn.astype(make["dtype"]), axes=(None, "norm"))

    def __call__(self, embedding_BE: jax.Array, dtype: DTypeLike) -> list[jax.Array]:
        """The vectors [B, 1, 1, 1, C] of an embedding that is this many times as wide."""
        count, channels = self.table.shape
        vectors = embedding_BE.reshape(-1, count, channels) + self.table[...]
        return [vectors[:, i, None, None, None].astype(dtype) for i in range(count)]


def _embedder(width: int, make: Make) -> MLP:
    whole = Make(rngs=make["rngs"], dtype=make["dtype"], compute_dtype=jnp.float32)
    return MLP(_WAVES, width, width, activation="silu", **whole)


def _modulated(x: jax.Array, vectors: list[jax.Array]) -> jax.Array:
    shift, scale = vectors
    return x * (1 + scale) + shift


class _ResidualBlock(nnx.Module):
    """shortcut(x) + conv2(silu(norm(conv1(silu(norm(x)))))), norms modulated where it is timed."""

    def __init__(
        self, channels: int, outputs: int, causal: bool, eps: float, make: Make, timed: bool = False
    ):
        dtype, wide = make["dtype"], channels != outputs
        self.norm1 = RMSNorm(channels, eps=_EPS, scale=False, dtype=dtype)
        self.conv1 = _Conv(channels, outputs, causal, make)
        self.norm2 = RMSNorm(outputs, eps=_EPS, scale=False, dtype=dtype)
        self.conv2 = _Conv(outputs, outputs, causal, make, axes=("mlp", "embed"))
        self.shortcut_norm = LayerNorm(channels, eps=eps, dtype=dtype) if wide else None
        self.shortcut = _Conv(channels, outputs, causal, make, window=1) if wide else None
        self.times = _TimeTable(4, channels, make) if timed else None

    @scoped
    def __call__(self, x_BFHWC: jax.Array, embedding_BE: jax.Array | None = None) -> jax.Array:
        h = self.norm1(x_BFHWC)
        vectors: list[jax.Array] = []
        if self.times is not None:
            assert embedding_BE is not None, "a decoder that is timed embeds its time"
            vectors = self.times(embedding_BE, x_BFHWC.dtype)
            h = _modulated(h, vectors[:2])
        h = self.norm2(self.conv1(jax.nn.silu(h)))
        if vectors:
            h = _modulated(h, vectors[2:])
        h = self.conv2(jax.nn.silu(h))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x_BFHWC = self.shortcut(self.shortcut_norm(x_BFHWC))
        return x_BFHWC + h


class _PlacesDown(nnx.Module):
    """A convolution to fewer channels, then places as channels; groups averaged beside it."""

    def __init__(self, channels: int, outputs: int, kind: Downsampling, causal: bool, make: Make):
        self.block = (1 if kind == "spatial" else 2, 1 if kind == "temporal" else 2)
        frames, side = self.block
        self.outputs = outputs
        self.conv = _Conv(channels, outputs // (frames * side**2), causal, make)

    @scoped
    def __call__(self, x_BFHWC: jax.Array) -> jax.Array:
        first = x_BFHWC[:, : self.block[0] - 1]
        x_BFHWC = jnp.concatenate([first, x_BFHWC], axis=1)
        mean = mean_of_places(x_BFHWC, self.outputs, *self.block)
        return on_video(mean_of_places(self.conv(x_BFHWC), self.outputs, *self.block) + mean)


class _Up(nnx.Module):
    """A convolution to more channels, then channels as places; the first frame stays one."""

    def __init__(self, channels: int, by: int, residual: bool, causal: bool, make: Make):
        self.outputs, self.residual = channels // by, residual
        self.conv = _Conv(channels, 8 * self.outputs, causal, make)

    @scoped
    def __call__(self, x_BFHWC: jax.Array) -> jax.Array:
        y = repeated_places(self.conv(x_BFHWC), self.outputs, 2, 2, first=True)
        if self.residual:
            places = repeated_places(x_BFHWC, x_BFHWC.shape[-1] // 8, 2, 2, first=True)
            y = y + jnp.tile(places, self.outputs // places.shape[-1])
        return on_video(y)


class _Blocks(nnx.Module):
    """Residual blocks of one width, and the embedding of the time where they are timed."""

    def __init__(
        self, channels: int, count: int, causal: bool, eps: float, make: Make, timed: bool = False
    ):
        args = (channels, channels, causal, eps, make, timed)
        self.blocks = nnx.List(_ResidualBlock(*args) for _ in range(count))
        self.embedder = _embedder(4 * channels, make) if timed else None

    @scoped
    def __call__(self, x_BFHWC: jax.Array, waves_BC: jax.Array | None = None) -> jax.Array:
        embedding_BE = None
        if self.embedder is not None:
            assert waves_BC is not None, "a decoder that is timed has a time"
            embedding_BE = self.embedder(waves_BC)
        for block in self.blocks:
            x_BFHWC = block(x_BFHWC, embedding_BE)
        return x_BFHWC


class _DownLevel(nnx.Module):
    """Residual blocks, a change of size or none, and more channels or none."""

    def __init__(
        self, config: LTXAutoencoderConfig, channels: int, outputs: int, level: int, make: Make
    ):
        causal, eps = config.causal, config.shortcut_eps
        self.blocks = _Blocks(channels, config.layers[level], causal, eps, make)
        kind = config.downsamples[level]
        resize: Any = None
        if kind == "conv":
            resize = _Conv(channels, channels, causal, make, stride=2)
        elif kind is not None:
            resize = _PlacesDown(channels, outputs, kind, causal, make)
        self.resize = resize
        wide = config.widening == "block" and channels != outputs
        self.widen = _ResidualBlock(channels, outputs, causal, eps, make) if wide else None

    @scoped
    def __call__(self, x_BFHWC: jax.Array) -> jax.Array:
        for part in (self.blocks, self.resize, self.widen):
            x_BFHWC = x_BFHWC if part is None else part(x_BFHWC)
        return x_BFHWC


class _UpLevel(nnx.Module):
    """Other channels or none, a change of size or none, and residual blocks."""

    def __init__(self, config: LTXAutoencoderConfig, channels: int, level: int, make: Make):
        causal, eps = config.decoder_causal, config.shortcut_eps
        width, by = config.decoder_channels[level], config.upsample_factor[level]
        wide, residual = channels != width, config.upsample_residual[level]
        self.widen = _ResidualBlock(channels, width, causal, eps, make) if wide else None
        self.resize = _Up(width, by, residual, causal, make) if config.upsamples[level] else None
        layers = config.decoder_layers[level]
        self.blocks = _Blocks(width // by, layers, causal, eps, make, config.timed)

    @scoped
    def __call__(self, x_BFHWC: jax.Array, waves_BC: jax.Array | None) -> jax.Array:
        for part in (self.widen, self.resize):
            x_BFHWC = x_BFHWC if part is None else part(x_BFHWC)
        return self.blocks(x_BFHWC, waves_BC)


class _Encoder(nnx.Module):
    """Patches of a video to the mean of z and one logarithm of its variance."""

    def __init__(self, config: LTXAutoencoderConfig, make: Make):
        causal, widths = config.causal, config.channels
        ends = [*widths[1:], widths[-1]]
        inputs, latent = config.in_channels * config.patch**2, config.latent_channels
        self.conv_in = _Conv(inputs, widths[0], causal, make, axes=(None, "embed"))
        self.levels = nnx.List(
            _DownLevel(config, widths[level], ends[level], level, make)
            for level in range(len(config.downsamples))
        )
        self.middle = _Blocks(widths[-1], config.layers[-1], causal, config.shortcut_eps, make)
        self.norm = RMSNorm(widths[-1], eps=_EPS, scale=False, dtype=make["dtype"])
        self.conv_out = _Conv(widths[-1], latent + 1, causal, make, axes=("embed", None))

    @scoped
    def __call__(self, x_BFHWC: jax.Array) -> jax.Array:
        x_BFHWC = self.conv_in(x_BFHWC)
        for level in self.levels:
            x_BFHWC = level(x_BFHWC)
        return self.conv_out(jax.nn.silu(self.norm(self.middle(x_BFHWC))))


class _Decoder(nnx.Module):
    """z to patches of a video; the levels in the order in which they run."""

    def __init__(self, config: LTXAutoencoderConfig, make: Make):
        causal, timed, eps = config.decoder_causal, config.timed, config.shortcut_eps
        width, latent = config.decoder_channels[-1], config.latent_channels
        self.conv_in = _Conv(latent, width, causal, make, axes=(None, "embed"))
        self.middle = _Blocks(width, config.decoder_layers[-1], causal, eps, make, timed)
        levels = []
        for level in reversed(range(len(config.decoder_channels))):
            levels.append(_UpLevel(config, width, level, make))
            width = config.decoder_channels[level] // config.upsample_factor[level]
        self.levels = nnx.List(levels)
        self.norm = RMSNorm(width, eps=_EPS, scale=False, dtype=make["dtype"])
        self.times = _TimeTable(2, width, make) if timed else None
        self.embedder = _embedder(2 * width, make) if timed else None
        scale = jnp.asarray(1000.0, make["dtype"])
        self.time_scale = nnx.Param(scale, axes=()) if timed else None
        outputs = config.out_channels * config.patch**2
        self.conv_out = _Conv(width, outputs, causal, make, axes=("embed", None))

    @scoped
    def __call__(self, x_BFHWC: jax.Array, time_B: jax.Array) -> jax.Array:
        waves_BC = None
        if self.time_scale is not None:
            scale = self.time_scale[...].astype(jnp.float32)
            waves_BC = timestep_embedding(time_B.astype(jnp.float32) * scale, _WAVES)
        x_BFHWC = self.middle(self.conv_in(x_BFHWC), waves_BC)
        for level in self.levels:
            x_BFHWC = level(x_BFHWC, waves_BC)
        x_BFHWC = self.norm(x_BFHWC)
        if self.times is not None and self.embedder is not None:
            assert waves_BC is not None, "a decoder that is timed has a scale of its time"
            vectors = self.times(self.embedder(waves_BC), x_BFHWC.dtype)
            x_BFHWC = _modulated(x_BFHWC, vectors)
        return self.conv_out(jax.nn.silu(x_BFHWC))


class LTXAutoencoder(nnx.Module):
    """Videos in -1..1 to latents and back; an image is a video of one frame.

    `encode` and `decode` are the network's; `latents` and `videos` are what a denoiser's caller
    needs, with mean, deviation and scale applied once.

    Attributes:
      mean, deviation: [latent_channels] of z, stored with the weights.
    """

    def __init__(
        self,
        config: LTXAutoencoderConfig,
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
        """
        compute_dtype = dtype if compute_dtype is None else compute_dtype
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        self.config, self.compute_dtype = config, compute_dtype
        self.encoder, self.decoder = _Encoder(config, make), _Decoder(config, make)
        width = config.latent_channels
        self.mean = nnx.Param(jnp.zeros((width,), dtype), axes=("norm",))
        self.deviation = nnx.Param(jnp.ones((width,), dtype), axes=("norm",))

    def encode(self, video_BFHWC: jax.Array, *, tiling: Tiling | None = None) -> Gaussian:
        """Encode a video -> the distribution of z, whose frames are 1 + (F - 1) / frame_factor.

        Args:
          video_BFHWC: in -1..1, of 1 + k frame_factor frames, sides multiples of `config.factor`.
          tiling: how videos larger than a tile are cut; None for no cut.

        Raises:
          ConfigError: a video of another size, number of frames or channels.
        """
        config = self.config
        _, F, H, W, C = video_BFHWC.shape if video_BFHWC.ndim == 5 else (0,) * 5
        fits = config.in_channels == C and F % config.frame_factor == 1 % config.frame_factor
        if not fits or H % config.factor or W % config.factor:
            raise ConfigError(
                f"a video of shape {video_BFHWC.shape} does not fit an autoencoder of "
                f"[B, F, H, W, {config.in_channels}] with 1 + {config.frame_factor} k frames and "
                f"sides that are multiples of {config.factor}; leave out frames, crop or resize it"
            )
        run = functools.partial(_moments, *nnx.split(self))
        moments = tiled_video(run, video_BFHWC, tiling, shrinks=config.factor)
        mean, logvar = moments[..., :-1], moments[..., -1:]
        logvar = jnp.broadcast_to(logvar, mean.shape)
        return Gaussian(mean.astype(jnp.float32), jnp.clip(logvar.astype(jnp.float32), -30, 20))

    @scoped
    def moments(self, video_BFHWC: jax.Array) -> jax.Array:
        """Mean of z, and behind it one logarithm of the variance of all its channels."""
        return self.encoder(to_patches(video_BFHWC.astype(self.compute_dtype), self.config.patch))

    def decode(
        self,
        z_BFHWC: jax.Array,
        time_B: jax.Array | None = None,
        *,
        tiling: Tiling | None = None,
    ) -> jax.Array:
        """Decode z -> a video in the compute dtype, in -1..1 or a little outside.

        Args:
          z_BFHWC: [B, F, H, W, latent_channels].
          time_B: float32, share of noise in z, where the config is `timed`; None for none.
          tiling: how videos larger than a tile are cut; None for no cut.

        Raises:
          ConfigError: z of another number of channels, or a time that would be ignored.
        """
        config = self.config
        if z_BFHWC.ndim != 5 or z_BFHWC.shape[-1] != config.latent_channels:
            raise ConfigError(
                f"latents of shape {z_BFHWC.shape} do not fit an autoencoder of "
                f"[B, F, H, W, {config.latent_channels}]; decode those of its own encoder, or "
                "of a denoiser trained with it"
            )
        if time_B is not None and not config.timed:
            raise ConfigError("this autoencoder's decoder takes no time; leave time_B out")
        if time_B is None:
            time_B = jnp.zeros((z_BFHWC.shape[0],), jnp.float32)
        run = functools.partial(_decoded, *nnx.split(self), time_B)
        return tiled_video(run, z_BFHWC, tiling, grows=config.factor)

    @scoped
    def decoded(self, z_BFHWC: jax.Array, time_B: jax.Array) -> jax.Array:
        """Decode the whole at once."""
        x_BFHWC = self.decoder(z_BFHWC.astype(self.compute_dtype), time_B)
        return from_patches(x_BFHWC, self.config.patch)

    def scaled(self, z_BFHWC: jax.Array) -> jax.Array:
        """What a denoiser is given of z, float32."""
        mean, deviation = self._scaling()
        return (z_BFHWC.astype(jnp.float32) - mean) * self.config.scale / deviation

    def latents(
        self,
        video_BFHWC: jax.Array,
        noise_BFHWC: jax.Array | None = None,
        *,
        tiling: Tiling | None = None,
    ) -> jax.Array:
        """The float32 latents of a video, as a denoiser is trained on them.

        Args:
          video_BFHWC: as for `encode`.
          noise_BFHWC: standard normal, of the shape of z, for a sample; None for the mean.
          tiling: as for `encode`.
        """
        found = self.encode(video_BFHWC, tiling=tiling)
        z_BFHWC = found.mean_BHWC if noise_BFHWC is None else found.sample(noise_BFHWC)
        return self.scaled(z_BFHWC)

    def videos(
        self,
        latents_BFHWC: jax.Array,
        time_B: jax.Array | None = None,
        *,
        tiling: Tiling | None = None,
    ) -> jax.Array:
        """Videos of a denoiser's latents; see `decode`."""
        mean, deviation = self._scaling()
        z_BFHWC = latents_BFHWC.astype(jnp.float32) * deviation / self.config.scale + mean
        return self.decode(z_BFHWC, time_B, tiling=tiling)

    def _scaling(self) -> tuple[jax.Array, jax.Array]:
        return self.mean[...].astype(jnp.float32), self.deviation[...].astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def _moments(graphdef: Any, state: nnx.State, video: jax.Array) -> jax.Array:
    """One compiled program for each of the few shapes of tiles."""
    return nnx.merge(graphdef, state).moments(video)


@functools.partial(jax.jit, static_argnums=0)
def _decoded(graphdef: Any, state: nnx.State, time_B: jax.Array, z: jax.Array) -> jax.Array:
    return nnx.merge(graphdef, state).decoded(z, time_B)
