"""The autoencoder of HunyuanVideo: causal over frames, with norms and attention over all of them.

What norms and attention see depends on all frames, so long videos are cut into runs of frames that
overlap and are blended. Legend: B batch, F frames, H height, W width, C channels in, N channels
out, T places of all frames.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.config.errors import ConfigError
from fornax.diffusion.models.autoencoders.frames import on_video, per_frame, tiled_video
from fornax.diffusion.models.autoencoders.kl import Gaussian
from fornax.diffusion.models.autoencoders.tiling import Tiling, blended
from fornax.diffusion.models.image_blocks import enlarged
from fornax.diffusion.models.parts import Conv, Dense, GroupNorm, Make
from fornax.models.scope import scoped

__all__ = ["FrameTiling", "HunyuanAutoencoder", "HunyuanAutoencoderConfig"]

_EPS = 1e-6
"""Of all norms."""
_FRAMES = 4
"""Frames, after the first, that become one of z."""


@dataclass(frozen=True, kw_only=True)
class FrameTiling:
    """How a long video is cut along its frames; what overlaps is blended linearly."""

    size: int = 16
    """Frames of a run, beside the one that it begins with; videos no longer are not cut."""
    step: int = 12
    """Frames from the start of a run to that of the next."""

    def __post_init__(self) -> None:
        if self.size % _FRAMES or self.step % _FRAMES or not 0 < self.step <= self.size:
            raise ConfigError(
                f"runs of size={self.size} frames in steps of step={self.step} do not fit; use "
                f"multiples of {_FRAMES}, the step no larger than the size"
            )


@dataclass(frozen=True, kw_only=True)
class HunyuanAutoencoderConfig:
    """A causal autoencoder of videos (Kong et al. 2024); the defaults are those of HunyuanVideo."""

    in_channels: int = 3
    out_channels: int = 3
    channels: tuple[int, ...] = (128, 256, 512, 512)
    """Of each level, from the whole video down."""
    layers: int = 2
    """Residual blocks of a level of the encoder; the decoder has one more."""
    latent_channels: int = 16
    norm_groups: int = 32
    mid_attention: bool = True
    scale: float = 0.476986
    """Factor on z as a denoiser sees it."""
    factor: int = 8
    """Pixels of a video's side to one of z's: a power of two, at most one halving for a level."""

    def __post_init__(self) -> None:
        levels = len(self.channels)
        if self.factor not in [2**n for n in range(levels + 1)] or levels < 3:
            raise ConfigError(
                f"factor={self.factor} does not fit {levels} channels; use a power of two up to "
                f"{2**levels}, and at least 3 levels, of which two halve the frames"
            )
        for width in self.channels:
            if width % self.norm_groups:
                raise ConfigError(
                    f"{width} channels do not divide into norm_groups={self.norm_groups}; use a "
                    "multiple"
                )

    @property
    def class_name(self) -> str:
        """The class of diffusers."""
        return "AutoencoderKLHunyuanVideo"

    @property
    def frame_factor(self) -> int:
        """k of the 1 + k n frames that become 1 + n of z."""
        return _FRAMES

    def resizes(self, level: int) -> tuple[bool, bool]:
        """Whether frames, and whether height and width, are halved after a level of the encoder;
        or doubled after one of the decoder, in the order in which it runs."""
        last = len(self.channels) - 1
        return last - 2 <= level < last, level < self.factor.bit_length() - 1


class _Conv(nnx.Module):
    """A convolution of window 3 that sees a frame and those before it; edges are repeated."""

    def __init__(
        self,
        channels: int,
        outputs: int,
        make: Make,
        *,
        stride: tuple[int, int, int] = (1, 1, 1),
        axes: tuple[str | None, str | None] = ("embed", "mlp"),
    ):
        self.conv = Conv(channels, outputs, (3, 3, 3), stride=stride, padding=0, axes=axes, **make)

    @scoped
    def __call__(self, x_BFHWC: jax.Array) -> jax.Array:
        pads = ((0, 0), (2, 0), (1, 1), (1, 1), (0, 0))
        return on_video(self.conv(jnp.pad(x_BFHWC, pads, mode="edge")))


class _ResidualBlock(nnx.Module):
    """shortcut(x) + conv2(silu(norm2(conv1(silu(norm1(x))))))."""

    def __init__(self, config: HunyuanAutoencoderConfig, channels: int, outputs: int, make: Make):
        groups, dtype = config.norm_groups, make["dtype"]
        self.norm1 = GroupNorm(channels, groups=groups, eps=_EPS, dtype=dtype)
        self.conv1 = _Conv(channels, outputs, make)
        self.norm2 = GroupNorm(outputs, groups=groups, eps=_EPS, dtype=dtype)
        self.conv2 = _Conv(outputs, outputs, make, axes=("mlp", "embed"))
        one = (1, 1, 1)
        self.shortcut = None if channels == outputs else Conv(channels, outputs, one, **make)

    @scoped
    def __call__(self, x_BFHWC: jax.Array) -> jax.Array:
        h_BFHWN = self.conv1(self.norm1(x_BFHWC, activation="silu"))
        h_BFHWN = self.conv2(self.norm2(h_BFHWN, activation="silu"))
        return (x_BFHWC if self.shortcut is None else self.shortcut(x_BFHWC)) + h_BFHWN


class _Attention(nnx.Module):
    """x + out(attention of norm(x)), where places see all of their frame and of those before it."""

    def __init__(self, config: HunyuanAutoencoderConfig, channels: int, make: Make):
        head = {"groups": 1, "head_dim": channels}  # which no mesh divides
        groups, dtype = config.norm_groups, make["dtype"]
        self.norm = GroupNorm(channels, groups=groups, eps=_EPS, dtype=dtype)
        self.query, self.key, self.value = (Dense(channels, head, **make) for _ in range(3))
        self.out = Dense(head, {"embed": channels}, **make)

    @scoped
    def __call__(self, x_BFHWC: jax.Array) -> jax.Array:
        B, F, H, W, C = x_BFHWC.shape
        tokens_BTC = self.norm(x_BFHWC).reshape(B, F * H * W, C)
        q_BTNH, k_BTNH, v_BTNH = (each(tokens_BTC) for each in (self.query, self.key, self.value))
        frames_T = jnp.repeat(jnp.arange(F, dtype=jnp.int32), H * W)
        frames_BT = jnp.broadcast_to(frames_T, (B, F * H * W))
        o_BTNH = kernels.attention(
            q_BTNH,
            k_BTNH,
            v_BTNH,
            scale=C**-0.5,
            causal=True,
            positions_q_BT=frames_BT,
            positions_k_BS=frames_BT,
        )
        return x_BFHWC + self.out(o_BTNH).reshape(x_BFHWC.shape)


class _Middle(nnx.Module):
    """Two residual blocks, with attention between them where the config has it."""

    def __init__(self, config: HunyuanAutoencoderConfig, channels: int, make: Make):
        self.blocks = nnx.List(_ResidualBlock(config, channels, channels, make) for _ in range(2))
        self.attention = _Attention(config, channels, make) if config.mid_attention else None

    @scoped
    def __call__(self, x_BFHWC: jax.Array) -> jax.Array:
        x_BFHWC = self.blocks[0](x_BFHWC)
        x_BFHWC = x_BFHWC if self.attention is None else self.attention(x_BFHWC)
        return self.blocks[1](x_BFHWC)


class _Upsample(nnx.Module):
    """Frames after the first, height and width doubled as far as asked, then a convolution."""

    def __init__(self, channels: int, frames: bool, sides: bool, make: Make):
        self.frames, self.sides = frames, sides
        self.conv = _Conv(channels, channels, make)

    @scoped
    def __call__(self, x_BFHWC: jax.Array) -> jax.Array:
        if self.frames:
            pairs = jnp.repeat(x_BFHWC[:, 1:], 2, axis=1)
            x_BFHWC = jnp.concatenate([x_BFHWC[:, :1], pairs], axis=1)
        if self.sides:
            x_BFHWC = per_frame(enlarged, x_BFHWC)
        return self.conv(x_BFHWC)


def _downsample(channels: int, frames: bool, sides: bool, make: Make) -> _Conv:
    side = 2 if sides else 1
    return _Conv(channels, channels, make, stride=(2 if frames else 1, side, side))


class _Level(nnx.Module):
    """Residual blocks, then a change of size or none."""

    def __init__(
        self,
        config: HunyuanAutoencoderConfig,
        channels: int,
        outputs: int,
        level: int,
        layers: int,
        resize: Callable[..., nnx.Module],
        make: Make,
    ):
        widths = (channels, *(outputs,) * (layers - 1))
        self.blocks = nnx.List(_ResidualBlock(config, width, outputs, make) for width in widths)
        frames, sides = config.resizes(level)
        self.resize: Any = resize(outputs, frames, sides, make) if frames or sides else None

    @scoped
    def __call__(self, x_BFHWC: jax.Array) -> jax.Array:
        for block in self.blocks:
            x_BFHWC = block(x_BFHWC)
        return x_BFHWC if self.resize is None else self.resize(x_BFHWC)


def _levels(
    config: HunyuanAutoencoderConfig,
    widths: tuple[int, ...],
    layers: int,
    resize: Callable[..., nnx.Module],
    make: Make,
) -> nnx.List:
    return nnx.List(
        _Level(config, widths[max(level - 1, 0)], width, level, layers, resize, make)
        for level, width in enumerate(widths)
    )


class _Encoder(nnx.Module):
    """A video to the moments of z."""

    def __init__(self, config: HunyuanAutoencoderConfig, make: Make):
        widths, moments = config.channels, 2 * config.latent_channels
        self.conv_in = _Conv(config.in_channels, widths[0], make, axes=(None, "embed"))
        self.levels = _levels(config, widths, config.layers, _downsample, make)
        self.middle = _Middle(config, widths[-1], make)
        groups, dtype = config.norm_groups, make["dtype"]
        self.norm = GroupNorm(widths[-1], groups=groups, eps=_EPS, dtype=dtype)
        self.conv_out = _Conv(widths[-1], moments, make, axes=("embed", None))

    @scoped
    def __call__(self, x_BFHWC: jax.Array) -> jax.Array:
        x_BFHWC = self.conv_in(x_BFHWC)
        for level in self.levels:
            x_BFHWC = level(x_BFHWC)
        return self.conv_out(self.norm(self.middle(x_BFHWC), activation="silu"))


class _Decoder(nnx.Module):
    """z to a video; the levels in the order in which they run."""

    def __init__(self, config: HunyuanAutoencoderConfig, make: Make):
        widths = config.channels[::-1]
        self.conv_in = _Conv(config.latent_channels, widths[0], make, axes=(None, "embed"))
        self.middle = _Middle(config, widths[0], make)
        self.levels = _levels(config, widths, config.layers + 1, _Upsample, make)
        groups, dtype = config.norm_groups, make["dtype"]
        self.norm = GroupNorm(widths[-1], groups=groups, eps=_EPS, dtype=dtype)
        self.conv_out = _Conv(widths[-1], config.out_channels, make, axes=("embed", None))

    @scoped
    def __call__(self, x_BFHWC: jax.Array) -> jax.Array:
        x_BFHWC = self.middle(self.conv_in(x_BFHWC))
        for level in self.levels:
            x_BFHWC = level(x_BFHWC)
        return self.conv_out(self.norm(x_BFHWC, activation="silu"))


class HunyuanAutoencoder(nnx.Module):
    """Videos in -1..1 to latents and back; an image is a video of one frame.

    `encode` and `decode` are the network's; `latents` and `videos` are what a denoiser's caller
    needs, scaled once.
    """

    def __init__(
        self,
        config: HunyuanAutoencoderConfig,
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
        latent = config.latent_channels
        self.encoder, self.decoder = _Encoder(config, make), _Decoder(config, make)
        square = functools.partial(Conv, window=(1, 1, 1), axes=(None, None), **make)
        self.quant, self.post_quant = square(2 * latent, 2 * latent), square(latent, latent)

    def encode(
        self,
        video_BFHWC: jax.Array,
        *,
        frames: FrameTiling | None = FrameTiling(),
        tiling: Tiling | None = None,
    ) -> Gaussian:
        """Encode a video -> the distribution of z, whose frames are 1 + (F - 1) / 4.

        Args:
          video_BFHWC: in -1..1, of 1 + 4 k frames, sides multiples of `config.factor`.
          frames: how long videos are cut; None for no cut.
          tiling: how videos larger than a tile are cut; None for no cut.

        Raises:
          ConfigError: a video of another size, number of frames or channels.
        """
        config = self.config
        _, F, H, W, C = video_BFHWC.shape if video_BFHWC.ndim == 5 else (0,) * 5
        if config.in_channels != C or (F - 1) % _FRAMES or H % config.factor or W % config.factor:
            raise ConfigError(
                f"a video of shape {video_BFHWC.shape} does not fit an autoencoder of "
                f"[B, F, H, W, {config.in_channels}] with 1 + {_FRAMES} k frames and sides that "
                f"are multiples of {config.factor}; leave out frames, crop or resize it"
            )
        run = functools.partial(_moments, *nnx.split(self))
        tile = functools.partial(tiled_video, run, tiling=tiling, shrinks=config.factor)
        moments = _in_runs(tile, video_BFHWC, frames, 1, _FRAMES)
        mean, logvar = jnp.split(moments.astype(jnp.float32), 2, axis=-1)
        return Gaussian(mean, jnp.clip(logvar, -30.0, 20.0))

    @scoped
    def moments(self, video_BFHWC: jax.Array) -> jax.Array:
        """Mean and logarithm of the variance of z, one after another in the last axis."""
        return self.quant(self.encoder(video_BFHWC.astype(self.compute_dtype)))

    def decode(
        self,
        z_BFHWC: jax.Array,
        *,
        frames: FrameTiling | None = FrameTiling(),
        tiling: Tiling | None = None,
    ) -> jax.Array:
        """Decode z -> a video in the compute dtype, in -1..1 or a little outside.

        Args:
          z_BFHWC: [B, F, H, W, latent_channels].
          frames: how long videos are cut; None for no cut.
          tiling: how videos larger than a tile are cut; None for no cut.

        Raises:
          ConfigError: z of another number of channels.
        """
        if z_BFHWC.ndim != 5 or z_BFHWC.shape[-1] != self.config.latent_channels:
            raise ConfigError(
                f"latents of shape {z_BFHWC.shape} do not fit an autoencoder of "
                f"[B, F, H, W, {self.config.latent_channels}]; decode those of its own encoder, or "
                "of a denoiser trained with it"
            )
        run = functools.partial(_decoded, *nnx.split(self))
        tile = functools.partial(tiled_video, run, tiling=tiling, grows=self.config.factor)
        return _in_runs(tile, z_BFHWC, frames, _FRAMES, 1)

    @scoped
    def decoded(self, z_BFHWC: jax.Array) -> jax.Array:
        """Decode the whole at once."""
        return self.decoder(self.post_quant(z_BFHWC.astype(self.compute_dtype)))

    def scaled(self, z_BFHWC: jax.Array) -> jax.Array:
        """What a denoiser is given of z, float32."""
        return z_BFHWC.astype(jnp.float32) * self.config.scale

    def latents(
        self, video_BFHWC: jax.Array, noise_BFHWC: jax.Array | None = None, **options: Any
    ) -> jax.Array:
        """The float32 latents of a video, as a denoiser is trained on them.

        Args:
          video_BFHWC: as for `encode`, whose options may follow.
          noise_BFHWC: standard normal, of the shape of z, for a sample; None for the mean.
          options: those of `encode`.
        """
        found = self.encode(video_BFHWC, **options)
        z_BFHWC = found.mean_BHWC if noise_BFHWC is None else found.sample(noise_BFHWC)
        return self.scaled(z_BFHWC)

    def videos(self, latents_BFHWC: jax.Array, **options: Any) -> jax.Array:
        """Videos of a denoiser's latents; options are those of `decode`."""
        return self.decode(latents_BFHWC.astype(jnp.float32) / self.config.scale, **options)


def _in_runs(
    run: Callable[[jax.Array], jax.Array],
    x_BFHWC: jax.Array,
    frames: FrameTiling | None,
    grows: int,
    shrinks: int,
) -> jax.Array:
    """Run a function over runs of frames, each of which begins with the last of those before it
    that do not overlap, and blend what it returns."""
    F = x_BFHWC.shape[1]
    if frames is None or F * grows <= frames.size:
        return run(x_BFHWC)
    size, step = frames.size // grows, frames.step // grows
    wide, kept = (n * grows // shrinks for n in (size, step))
    found: list[jax.Array] = []
    for at in range(0, F - 1, step):
        y_BFHWC = run(x_BFHWC[:, at : at + size + 1])
        if found:
            y_BFHWC = blended(found[-1], y_BFHWC[:, 1:], wide - kept, axis=1)
        found.append(y_BFHWC)
    parts = [y_BFHWC[:, : kept + (not index)] for index, y_BFHWC in enumerate(found)]
    return jnp.concatenate(parts, axis=1)


@functools.partial(jax.jit, static_argnums=0)
def _moments(graphdef: Any, state: nnx.State, video: jax.Array) -> jax.Array:
    """One compiled program for each of the few shapes of tiles and runs."""
    return nnx.merge(graphdef, state).moments(video)


@functools.partial(jax.jit, static_argnums=0)
def _decoded(graphdef: Any, state: nnx.State, z: jax.Array) -> jax.Array:
    return nnx.merge(graphdef, state).decoded(z)
