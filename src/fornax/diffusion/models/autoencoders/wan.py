"""The autoencoder of Wan 2.1, Wan 2.2 and Qwen-Image: causal over frames, streamed.

Legend: B batch, F frames, H height, W width, C channels in, N channels out.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.config.errors import ConfigError
from fornax.diffusion.models.autoencoders.frames import (
    CausalConv,
    Past,
    from_patches,
    in_chunks,
    mean_of_places,
    on_video,
    per_frame,
    repeated_places,
    tiled_video,
    to_patches,
)
from fornax.diffusion.models.autoencoders.kl import Gaussian
from fornax.diffusion.models.autoencoders.tiling import Tiling
from fornax.diffusion.models.image_blocks import enlarged
from fornax.diffusion.models.parts import Conv, Dense, Make, RMSNorm
from fornax.models.scope import scoped

__all__ = ["WanAutoencoder", "WanAutoencoderConfig"]

_EPS = 1e-24
"""Of all norms: x is divided by its length, of at least 1e-12."""


@dataclass(frozen=True, kw_only=True)
class WanAutoencoderConfig:
    """A causal autoencoder of videos (Wan Team 2025); the defaults are those of Wan 2.1.

    Tuples of levels go from the whole video down; each but the last halves height and width.
    """

    in_channels: int = 3
    """Of what is encoded, patches counted in: 12 in Wan 2.2."""
    out_channels: int = 3
    """Likewise of what is decoded."""
    channels: int = 96
    """Of the encoder, times the multiplier of a level."""
    decoder_channels: int | None = None
    """Of the decoder; None for the encoder's."""
    multipliers: tuple[int, ...] = (1, 2, 4, 4)
    """Of each level."""
    layers: int = 2
    """Residual blocks of a level of the encoder; the decoder has one more."""
    temporal: tuple[bool, ...] = (False, True, True)
    """Which levels halve the frames too, of all but the last."""
    latent_channels: int = 16
    mean: tuple[float, ...] = ()
    """Of each latent channel; nothing for 0."""
    deviation: tuple[float, ...] = ()
    """Of each; nothing for 1."""
    residual: bool = False
    """Whether changes of size have shortcuts without parameters, as in Wan 2.2 (Chen et al.
    2024)."""
    patch: int | None = None
    """Pixels of the side of a patch that is one place for the network; None for 1."""
    class_name: Literal["AutoencoderKLWan", "AutoencoderKLQwenImage"] = "AutoencoderKLWan"
    """The class of diffusers as which it is stored."""

    def __post_init__(self) -> None:
        if len(self.temporal) != len(self.multipliers) - 1:
            raise ConfigError(
                f"temporal={self.temporal} must have one entry for each of the "
                f"{len(self.multipliers)} multipliers but the last"
            )
        for name in ("mean", "deviation"):
            values = getattr(self, name)
            if values and len(values) != self.latent_channels:
                raise ConfigError(
                    f"{name} has {len(values)} values for latent_channels={self.latent_channels}; "
                    "give one for each"
                )
        if self.residual and self.multipliers[-2:-1] != self.multipliers[-1:]:
            raise ConfigError(
                f"multipliers={self.multipliers} of a residual autoencoder must end in two that "
                "are equal: its last level has a shortcut, and no places to make channels of"
            )
        if self.class_name == "AutoencoderKLQwenImage" and (
            self.residual
            or self.patch is not None
            or self.decoder_channels is not None
            or self.in_channels != self.out_channels
        ):
            raise ConfigError(
                "AutoencoderKLQwenImage has no residual, patch, decoder_channels or out_channels; "
                "store it as AutoencoderKLWan"
            )

    @property
    def factor(self) -> int:
        """Pixels of a video's side to one of z's."""
        return 2 ** (len(self.multipliers) - 1) * (self.patch or 1)

    @property
    def frame_factor(self) -> int:
        """k of the 1 + k n frames that become 1 + n of z."""
        return 2 ** sum(self.temporal)


class _ResidualBlock(nnx.Module):
    """shortcut(x) + conv2(silu(norm2(conv1(silu(norm1(x))))))."""

    def __init__(self, channels: int, outputs: int, make: Make):
        self.norm1 = RMSNorm(channels, eps=_EPS, dtype=make["dtype"])
        self.conv1 = CausalConv(channels, outputs, 3, **make)
        self.norm2 = RMSNorm(outputs, eps=_EPS, dtype=make["dtype"])
        self.conv2 = CausalConv(outputs, outputs, 3, axes=("mlp", "embed"), **make)
        self.shortcut = None if channels == outputs else CausalConv(channels, outputs, 1, **make)

    @scoped
    def __call__(self, x_BFHWC: jax.Array, past: Past) -> jax.Array:
        h_BFHWN = self.conv1(jax.nn.silu(self.norm1(x_BFHWC)), past)
        h_BFHWN = self.conv2(jax.nn.silu(self.norm2(h_BFHWN)), past)
        if self.shortcut is not None:
            x_BFHWC = self.shortcut(x_BFHWC, past)
        return x_BFHWC + h_BFHWN


class _Attention(nnx.Module):
    """x + out(attention over the places of each frame of norm(x)), with one head."""

    def __init__(self, channels: int, make: Make):
        head = {"groups": 1, "head_dim": channels}  # which no mesh divides
        self.norm = RMSNorm(channels, eps=_EPS, dtype=make["dtype"])
        self.query, self.key, self.value = (Dense(channels, head, **make) for _ in range(3))
        self.out = Dense(head, {"embed": channels}, **make)

    @scoped
    def __call__(self, x_BFHWC: jax.Array) -> jax.Array:
        B, F, H, W, C = x_BFHWC.shape
        tokens_BTC = self.norm(x_BFHWC).reshape(B * F, H * W, C)
        q_BTNH, k_BTNH, v_BTNH = (each(tokens_BTC) for each in (self.query, self.key, self.value))
        o_BTNH = kernels.attention(q_BTNH, k_BTNH, v_BTNH, scale=C**-0.5, causal=False)
        return x_BFHWC + self.out(o_BTNH).reshape(x_BFHWC.shape)


class _Middle(nnx.Module):
    """Attention between two residual blocks."""

    def __init__(self, channels: int, make: Make):
        self.blocks = nnx.List(_ResidualBlock(channels, channels, make) for _ in range(2))
        self.attention = _Attention(channels, make)

    @scoped
    def __call__(self, x_BFHWC: jax.Array, past: Past) -> jax.Array:
        x_BFHWC = self.attention(self.blocks[0](x_BFHWC, past))
        return self.blocks[1](x_BFHWC, past)


class _Downsample(nnx.Module):
    """Height and width halved by a convolution, then the frames after the first by another."""

    def __init__(self, channels: int, outputs: int, temporal: bool, make: Make):
        pair = functools.partial(Conv, window=(3, 1, 1), stride=(2, 1, 1), padding=0)
        self.conv = Conv(channels, outputs, 3, stride=2, padding=((0, 1), (0, 1)), **make)
        self.time = pair(outputs, outputs, **make) if temporal else None

    @scoped
    def __call__(self, x_BFHWC: jax.Array, past: Past) -> jax.Array:
        x_BFHWC = per_frame(self.conv, x_BFHWC)
        if self.time is None:
            return on_video(x_BFHWC)
        if not past.first:
            return on_video(self.time(past.extend(x_BFHWC, 1)))
        past.kept.append(x_BFHWC[:, -1:])
        if x_BFHWC.shape[1] == 1:
            return on_video(x_BFHWC)
        return on_video(jnp.concatenate([x_BFHWC[:, :1], self.time(x_BFHWC)], axis=1))


class _Upsample(nnx.Module):
    """Two frames of each after the first by a convolution, then height and width doubled."""

    def __init__(self, channels: int, outputs: int, temporal: bool, make: Make):
        self.time = CausalConv(channels, 2 * channels, (3, 1, 1), **make) if temporal else None
        self.conv = Conv(channels, outputs, 3, **make)

    @scoped
    def __call__(self, x_BFHWC: jax.Array, past: Past) -> jax.Array:
        if self.time is not None:
            x_BFHWC = self._frames(self.time, x_BFHWC, past)
        return on_video(per_frame(lambda x_BHWC: self.conv(enlarged(x_BHWC)), x_BFHWC))

    @staticmethod
    def _frames(time: CausalConv, x_BFHWC: jax.Array, past: Past) -> jax.Array:
        head_BFHWC, tail_BFHWC = x_BFHWC[:, :0], x_BFHWC
        if past.first:  # the first frame stays alone, and none after sees it
            head_BFHWC, tail_BFHWC = x_BFHWC[:, :1], x_BFHWC[:, 1:]
            if tail_BFHWC.shape[1] == 0:
                past.extend(tail_BFHWC, time.frames)
                return head_BFHWC
        B, F, H, W, C = tail_BFHWC.shape
        pairs = time(tail_BFHWC, past).reshape(B, F, H, W, 2, C)
        pairs = jnp.moveaxis(pairs, 4, 2).reshape(B, 2 * F, H, W, C)
        return jnp.concatenate([head_BFHWC, pairs], axis=1)


class _DownLevel(nnx.Module):
    """Residual blocks, then a change of size or none."""

    def __init__(
        self,
        config: WanAutoencoderConfig,
        channels: int,
        outputs: int,
        level: int,
        make: Make,
    ):
        last = level == len(config.multipliers) - 1
        temporal = not last and config.temporal[level]
        widths = (channels, *(outputs,) * (config.layers - 1))
        self.blocks = nnx.List(_ResidualBlock(width, outputs, make) for width in widths)
        self.resize = None if last else _Downsample(outputs, outputs, temporal, make)
        self.outputs, self.block = outputs, (1 + temporal, 1 + (not last))
        self.residual = config.residual

    @scoped
    def __call__(self, x_BFHWC: jax.Array, past: Past) -> jax.Array:
        before = x_BFHWC
        for block in self.blocks:
            x_BFHWC = block(x_BFHWC, past)
        if self.resize is not None:
            x_BFHWC = self.resize(x_BFHWC, past)
        if not self.residual:
            return x_BFHWC
        return x_BFHWC + mean_of_places(before, self.outputs, *self.block)


class _UpLevel(nnx.Module):
    """Residual blocks, then a change of size or none."""

    def __init__(
        self,
        config: WanAutoencoderConfig,
        channels: int,
        outputs: int,
        level: int,
        make: Make,
    ):
        last = level == len(config.multipliers) - 1
        temporal = not last and config.temporal[-1 - level]
        widths = (channels, *(outputs,) * config.layers)
        after = outputs if config.residual else outputs // 2
        self.blocks = nnx.List(_ResidualBlock(width, outputs, make) for width in widths)
        self.resize = None if last else _Upsample(outputs, after, temporal, make)
        self.outputs, self.block = outputs, (1 + temporal, 2)
        self.residual = config.residual and not last

    @scoped
    def __call__(self, x_BFHWC: jax.Array, past: Past) -> jax.Array:
        before = x_BFHWC
        for block in self.blocks:
            x_BFHWC = block(x_BFHWC, past)
        if self.resize is not None:
            x_BFHWC = self.resize(x_BFHWC, past)
        if not self.residual:
            return x_BFHWC
        return x_BFHWC + repeated_places(before, self.outputs, *self.block, past.first)


class _Encoder(nnx.Module):
    """Patches of a video to the moments of z."""

    def __init__(self, config: WanAutoencoderConfig, make: Make):
        widths = [config.channels * by for by in (1, *config.multipliers)]
        self.conv_in = CausalConv(config.in_channels, widths[0], 3, axes=(None, "embed"), **make)
        self.levels = nnx.List(
            _DownLevel(config, widths[level], widths[level + 1], level, make)
            for level in range(len(config.multipliers))
        )
        self.middle = _Middle(widths[-1], make)
        self.norm = RMSNorm(widths[-1], eps=_EPS, dtype=make["dtype"])
        moments = 2 * config.latent_channels
        self.conv_out = CausalConv(widths[-1], moments, 3, axes=("embed", None), **make)

    @scoped
    def __call__(self, x_BFHWC: jax.Array, past: Past) -> jax.Array:
        x_BFHWC = self.conv_in(x_BFHWC, past)
        for level in self.levels:
            x_BFHWC = level(x_BFHWC, past)
        x_BFHWC = self.middle(x_BFHWC, past)
        return self.conv_out(jax.nn.silu(self.norm(x_BFHWC)), past)


class _Decoder(nnx.Module):
    """z to patches of a video; the levels in the order in which they run."""

    def __init__(self, config: WanAutoencoderConfig, make: Make):
        base = config.decoder_channels or config.channels
        ups = config.multipliers[::-1]
        widths = [base * by for by in (ups[0], *ups)]
        latent = config.latent_channels
        self.conv_in = CausalConv(latent, widths[0], 3, axes=(None, "embed"), **make)
        self.middle = _Middle(widths[0], make)
        halved = [1 if level == 0 or config.residual else 2 for level in range(len(ups))]
        self.levels = nnx.List(
            _UpLevel(config, widths[level] // halved[level], widths[level + 1], level, make)
            for level in range(len(ups))
        )
        self.norm = RMSNorm(widths[-1], eps=_EPS, dtype=make["dtype"])
        outputs = config.out_channels
        self.conv_out = CausalConv(widths[-1], outputs, 3, axes=("embed", None), **make)

    @scoped
    def __call__(self, x_BFHWC: jax.Array, past: Past) -> jax.Array:
        x_BFHWC = self.middle(self.conv_in(x_BFHWC, past), past)
        for level in self.levels:
            x_BFHWC = level(x_BFHWC, past)
        return self.conv_out(jax.nn.silu(self.norm(x_BFHWC)), past)


class WanAutoencoder(nnx.Module):
    """Videos in -1..1 to latents and back, a few frames at a time; an image is a video of one.

    `encode` and `decode` are the network's; `latents` and `videos` are what a denoiser's caller
    needs, with mean and deviation applied once.
    """

    def __init__(
        self,
        config: WanAutoencoderConfig,
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
        square = functools.partial(CausalConv, window=1, axes=(None, None), **make)
        self.quant, self.post_quant = square(2 * latent, 2 * latent), square(latent, latent)

    def encode(
        self, video_BFHWC: jax.Array, *, chunk: int | None = 1, tiling: Tiling | None = None
    ) -> Gaussian:
        """Encode a video -> the distribution of z, whose frames are 1 + (F - 1) / frame_factor.

        Args:
          video_BFHWC: in -1..1, of 1 + k frame_factor frames, sides multiples of `config.factor`.
          chunk: frames of z that are made at a time, after the first; None for all at once. The
            result is the same, the memory is not.
          tiling: how videos larger than a tile are cut; None for no cut.

        Raises:
          ConfigError: a video of another size, number of frames or channels.
        """
        config, patch = self.config, self.config.patch or 1
        _, F, H, W, C = video_BFHWC.shape if video_BFHWC.ndim == 5 else (0,) * 5
        wanted = config.in_channels // patch**2
        if wanted != C or (F - 1) % config.frame_factor or H % config.factor or W % config.factor:
            raise ConfigError(
                f"a video of shape {video_BFHWC.shape} does not fit an autoencoder of "
                f"[B, F, H, W, {wanted}] with 1 + {config.frame_factor} k frames and sides that "
                f"are multiples of {config.factor}; leave out frames, crop or resize it"
            )
        _check_chunk(chunk)
        run = functools.partial(_moments, *nnx.split(self), chunk)
        moments = tiled_video(run, video_BFHWC, tiling, shrinks=config.factor)
        mean, logvar = jnp.split(moments.astype(jnp.float32), 2, axis=-1)
        return Gaussian(mean, jnp.clip(logvar, -30.0, 20.0))

    @scoped
    def moments(self, video_BFHWC: jax.Array, chunk: int | None = 1) -> jax.Array:
        """Mean and logarithm of the variance of z, one after another in the last axis."""
        x_BFHWC = to_patches(video_BFHWC.astype(self.compute_dtype), self.config.patch or 1)
        chunk = None if chunk is None else chunk * self.config.frame_factor
        x_BFHWC = in_chunks(self.encoder, x_BFHWC, first=1, chunk=chunk)
        return self.quant(x_BFHWC, Past(None))

    def decode(
        self, z_BFHWC: jax.Array, *, chunk: int | None = 1, tiling: Tiling | None = None
    ) -> jax.Array:
        """Decode z -> a video in the compute dtype, in -1..1.

        Args:
          z_BFHWC: [B, F, H, W, latent_channels].
          chunk: frames of z that are decoded at a time, after the first; None for all at once. The
            result is the same, the memory is not.
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
        _check_chunk(chunk)
        run = functools.partial(_decoded, *nnx.split(self), chunk)
        return jnp.clip(tiled_video(run, z_BFHWC, tiling, grows=self.config.factor), -1.0, 1.0)

    @scoped
    def decoded(self, z_BFHWC: jax.Array, chunk: int | None = 1) -> jax.Array:
        """Decode the whole, not yet clipped."""
        z_BFHWC = self.post_quant(z_BFHWC.astype(self.compute_dtype), Past(None))
        x_BFHWC = in_chunks(self.decoder, z_BFHWC, first=1, chunk=chunk)
        return from_patches(x_BFHWC, self.config.patch or 1)

    def scaled(self, z_BFHWC: jax.Array) -> jax.Array:
        """What a denoiser is given of z, float32."""
        mean, deviation = self._scaling()
        return (z_BFHWC.astype(jnp.float32) - mean) / deviation

    def unscaled(self, latents_BFHWC: jax.Array) -> jax.Array:
        """z of what a denoiser gives, float32."""
        mean, deviation = self._scaling()
        return latents_BFHWC.astype(jnp.float32) * deviation + mean

    def _scaling(self) -> tuple[jax.Array, jax.Array]:
        config = self.config
        mean, deviation = config.mean or 0.0, config.deviation or 1.0
        return jnp.asarray(mean, jnp.float32), jnp.asarray(deviation, jnp.float32)

    def latents(
        self,
        video_BFHWC: jax.Array,
        noise_BFHWC: jax.Array | None = None,
        *,
        chunk: int | None = 1,
        tiling: Tiling | None = None,
    ) -> jax.Array:
        """The float32 latents of a video, as a denoiser is trained on them.

        Args:
          video_BFHWC: as for `encode`.
          noise_BFHWC: standard normal, of the shape of z, for a sample; None for the mean.
          chunk: as for `encode`.
          tiling: as for `encode`.
        """
        found = self.encode(video_BFHWC, chunk=chunk, tiling=tiling)
        z_BFHWC = found.mean_BHWC if noise_BFHWC is None else found.sample(noise_BFHWC)
        return self.scaled(z_BFHWC)

    def videos(
        self, latents_BFHWC: jax.Array, *, chunk: int | None = 1, tiling: Tiling | None = None
    ) -> jax.Array:
        """Videos of a denoiser's latents; see `decode`."""
        return self.decode(self.unscaled(latents_BFHWC), chunk=chunk, tiling=tiling)


def _check_chunk(chunk: int | None) -> None:
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk={chunk} frames at a time are none; use at least 1, or None")


@functools.partial(jax.jit, static_argnums=(0, 2))
def _moments(graphdef: Any, state: nnx.State, chunk: int | None, video: jax.Array) -> jax.Array:
    """One compiled program for each of the few shapes of tiles."""
    return nnx.merge(graphdef, state).moments(video, chunk)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _decoded(graphdef: Any, state: nnx.State, chunk: int | None, z: jax.Array) -> jax.Array:
    return nnx.merge(graphdef, state).decoded(z, chunk)
