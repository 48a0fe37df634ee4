"""What U-Nets and image autoencoders are made of: residual blocks, attention over an image, and
convolutions that halve or double it.

Legend: B batch, H height, W width, C channels in, N channels out, E width of the time embedding.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax import kernels
from fornax.diffusion.models.parts import ACTIVATIONS, Activation, Conv, Dense, GroupNorm, Make
from fornax.mesh import constrain
from fornax.models import Remat
from fornax.models.remat import rematerialise
from fornax.models.scope import scoped

__all__ = [
    "Downsample",
    "ImageAttention",
    "ResidualBlock",
    "Upsample",
    "channels_to_space",
    "enlarged",
    "on_image",
    "recomputed",
    "space_to_channels",
]


class ResidualBlock(nnx.Module):
    """(shortcut(x) + conv2(act(norm2(conv1(act(norm1(x))) + time)))) / scale.

    With `scale_shift` the time's projection scales and shifts the second norm instead of being
    added before it (Dhariwal and Nichol 2021).
    """

    def __init__(
        self,
        channels: int,
        outputs: int,
        *,
        embedding: int | None = None,
        groups: int,
        eps: float,
        activation: Activation = "silu",
        scale_shift: bool = False,
        scale: float = 1.0,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the parameters.

        Args:
          channels: C.
          outputs: N; where it is C, there is no convolution in the shortcut.
          embedding: E, or None for a block that takes no time.
          groups: of both norms.
          eps: likewise.
          activation: before each convolution and before the time's projection.
          scale_shift: see the class.
          scale: what the sum is divided by.
          rngs: source of randomness.
          dtype: of the parameters.
          compute_dtype: of the products.
        """
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        self.norm1 = GroupNorm(channels, groups=groups, eps=eps, dtype=dtype)
        self.conv1 = Conv(channels, outputs, 3, **make)
        width = 2 * outputs if scale_shift else outputs
        self.time = None if embedding is None else Dense(embedding, width, **make)
        self.norm2 = GroupNorm(outputs, groups=groups, eps=eps, dtype=dtype)
        self.conv2 = Conv(outputs, outputs, 3, axes=("mlp", "embed"), **make)
        self.shortcut = None if channels == outputs else Conv(channels, outputs, 1, **make)
        self.activation: Activation = activation
        self.scale_shift, self.scale = scale_shift, scale

    @scoped
    def __call__(self, x_BHWC: jax.Array, embedding_BE: jax.Array | None = None) -> jax.Array:
        """Apply -> y [B, H, W, N] in the compute dtype."""
        h_BHWN = self.conv1(_normed(self.norm1, x_BHWC, self.activation))
        if self.time is not None:
            assert embedding_BE is not None, "a block with a projection of the time takes one"
            time_BN = self.time(ACTIVATIONS[self.activation](embedding_BE))[:, None, None]
            if self.scale_shift:
                scale, shift = jnp.split(time_BN, 2, axis=-1)
                h_BHWN = self.norm2(h_BHWN) * (1 + scale) + shift
                h_BHWN = ACTIVATIONS[self.activation](h_BHWN)
            else:
                h_BHWN = _normed(self.norm2, h_BHWN + time_BN, self.activation)
        else:
            h_BHWN = _normed(self.norm2, h_BHWN, self.activation)
        x_BHWC = x_BHWC if self.shortcut is None else self.shortcut(x_BHWC)
        y_BHWN = x_BHWC + self.conv2(h_BHWN)
        return on_image(y_BHWN if self.scale == 1 else y_BHWN / self.scale)


def _normed(norm: GroupNorm, x_BHWC: jax.Array, activation: str) -> jax.Array:
    """The norm and the activation, in one kernel where it has the activation."""
    if activation == "silu":
        return norm(x_BHWC, activation="silu")
    return ACTIVATIONS[activation](norm(x_BHWC))


class ImageAttention(nnx.Module):
    """(x + out(attention over the places of norm(x))) / scale."""

    def __init__(
        self,
        channels: int,
        *,
        heads: int = 1,
        groups: int,
        eps: float,
        scale: float = 1.0,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the parameters; `groups` and `eps` are the norm's, `scale` divides the sum."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        wide = {"heads": heads, "head_dim": channels // heads}
        if heads == 1:  # that no mesh divides
            wide = {"groups": 1, "head_dim": channels}
        self.norm = GroupNorm(channels, groups=groups, eps=eps, dtype=dtype)
        self.query = Dense(channels, wide, **make)
        self.key = Dense(channels, wide, **make)
        self.value = Dense(channels, wide, **make)
        self.out = Dense(wide, {"embed": channels}, **make)
        self.scale = scale

    @scoped
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Apply -> y [B, H, W, C]."""
        B, H, W, C = x_BHWC.shape
        tokens_BTC = self.norm(x_BHWC).reshape(B, H * W, C)
        q_BTNH, k_BTNH, v_BTNH = (
            self.query(tokens_BTC),
            self.key(tokens_BTC),
            self.value(tokens_BTC),
        )
        o_BTNH = kernels.attention(
            q_BTNH, k_BTNH, v_BTNH, scale=q_BTNH.shape[-1] ** -0.5, causal=False
        )
        y_BHWC = x_BHWC + self.out(o_BTNH).reshape(B, H, W, C)
        return on_image(y_BHWC if self.scale == 1 else y_BHWC / self.scale)


class Downsample(nnx.Module):
    """A convolution of window 3 and stride 2."""

    def __init__(
        self,
        channels: int,
        *,
        padding: int = 1,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make it; `padding` 1 is a pixel on all sides, 0 one after the last row and column."""
        pads = ((0, 1), (0, 1)) if padding == 0 else padding
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        self.conv = Conv(channels, channels, 3, stride=2, padding=pads, **make)

    @scoped
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Halve the image, rounded up with padding 1 and down with 0."""
        return on_image(self.conv(x_BHWC))


class Upsample(nnx.Module):
    """Each pixel four times, then a convolution of window 3."""

    def __init__(
        self, channels: int, *, rngs: nnx.Rngs, dtype: DTypeLike, compute_dtype: DTypeLike
    ):
        """Make the convolution."""
        self.conv = Conv(channels, channels, 3, rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)

    @scoped
    def __call__(self, x_BHWC: jax.Array, size: tuple[int, int] | None = None) -> jax.Array:
        """Double the image; `size` cuts a last row or column off, of a size that was odd."""
        wide_BHWC = enlarged(x_BHWC)
        if size is not None:
            wide_BHWC = wide_BHWC[:, : size[0], : size[1]]
        return on_image(self.conv(wide_BHWC))


def enlarged(x_BHWC: jax.Array) -> jax.Array:
    """Each pixel four times: [B, 2 H, 2 W, C]."""
    B, H, W, C = x_BHWC.shape
    wide = jnp.broadcast_to(x_BHWC[:, :, None, :, None], (B, H, 2, W, 2, C))
    return wide.reshape(B, 2 * H, 2 * W, C)


def space_to_channels(x_BHWC: jax.Array, patch: tuple[int, int]) -> jax.Array:
    """Patches of h x w places as one: [B, H / h, W / w, C h w], of each channel its rows and
    columns in order, as torch's `pixel_unshuffle`."""
    B, H, W, C = x_BHWC.shape
    h, w = patch
    patches = x_BHWC.reshape(B, H // h, h, W // w, w, C).transpose(0, 1, 3, 5, 2, 4)
    return patches.reshape(B, H // h, W // w, C * h * w)


def channels_to_space(x_BHWC: jax.Array, patch: tuple[int, int]) -> jax.Array:
    """The inverse of `space_to_channels`."""
    B, H, W, C = x_BHWC.shape
    h, w = patch
    patches = x_BHWC.reshape(B, H, W, C // (h * w), h, w).transpose(0, 1, 4, 2, 5, 3)
    return patches.reshape(B, H * h, W * w, C // (h * w))


def on_image(x_BHWC: jax.Array) -> jax.Array:
    """`x_BHWC` laid out on the enclosing mesh: its batch divided, channels whole."""
    return constrain(x_BHWC, ("batch", None, None, None))


def recomputed(block: nnx.Module, remat: str | Remat) -> Callable[..., jax.Array]:
    """A call of `block` of which the backward pass computes again what `remat` says."""
    if remat == "none":
        return block  # pyrefly: ignore[bad-return]
    graphdef, state = nnx.split(block)

    def run(state: nnx.State, *inputs: jax.Array | None) -> jax.Array:
        return nnx.merge(graphdef, state)(*inputs)  # pyrefly: ignore[not-callable]

    return functools.partial(rematerialise(run, remat, prevent_cse=True), state)
