"""The ControlNet: a copy of a U-Net's way down that reads an image, such as edges or a pose.

Legend: B batch, H and W height and width of latents, C channels, I channels of the image.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.config.errors import ConfigError
from fornax.diffusion.models.condition import Condition, require
from fornax.diffusion.models.image_blocks import on_image
from fornax.diffusion.models.parts import Conv, Make
from fornax.diffusion.models.unet.config import ControlNetConfig
from fornax.diffusion.models.unet.embedding import TimeEmbedding
from fornax.diffusion.models.unet.levels import DownLevel, MiddleLevel
from fornax.diffusion.models.unet.network import conditions, start, text_projection
from fornax.models import Remat
from fornax.models.scope import scoped

__all__ = ["ControlNet", "ImageReader"]


class ImageReader(nnx.Module):
    """Convolutions from an image to the size of its latents, the last of zeros at first."""

    def __init__(
        self,
        channels: int,
        widths: Sequence[int],
        outputs: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        compute_dtype: DTypeLike,
    ):
        """Make the convolutions: one to `widths[0]`, two to each further width."""
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        self.first = Conv(channels, widths[0], 3, axes=(None, "mlp"), **make)
        blocks = []
        for width, wider in itertools.pairwise(widths):
            blocks.append(Conv(width, width, 3, **make))
            blocks.append(Conv(width, wider, 3, stride=2, padding=1, **make))
        self.blocks = nnx.List(blocks)
        self.last = Conv(widths[-1], outputs, 3, std=0.0, axes=("mlp", "embed"), **make)

    @scoped
    def __call__(self, image_BHWI: jax.Array) -> jax.Array:
        """Read an image -> [B, H, W, C], each width but the first half the size of the one
        before."""
        x_BHWC = jax.nn.silu(self.first(image_BHWI))
        for block in self.blocks:
            x_BHWC = jax.nn.silu(block(x_BHWC))
        return on_image(self.last(x_BHWC))


class ControlNet(nnx.Module):
    """Residuals for a U-Net from a noisy image, its time, a condition and an image to follow."""

    def __init__(
        self,
        config: ControlNetConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        compute_dtype: DTypeLike | None = None,
    ):
        """Make the parameters, as `UNet` does; the last convolutions are zeros at first."""
        compute_dtype = dtype if compute_dtype is None else compute_dtype
        make = Make(rngs=rngs, dtype=dtype, compute_dtype=compute_dtype)
        unet = config.unet
        self.config = config
        self.compute_dtype = compute_dtype
        widths, first = unet.channels, unet.channels[0]
        self.embedding = TimeEmbedding(unet, **make)
        self.text = text_projection(unet, make)
        window = unet.conv_in_kernel
        self.conv_in = Conv(unet.in_channels, first, window, axes=(None, "embed"), **make)
        self.reader = ImageReader(config.image_channels, config.image_widths, first, **make)
        self.down = nnx.List(DownLevel(unet, level, **make) for level in range(len(widths)))
        self.middle = MiddleLevel(unet, **make)
        passed = [first]
        for level, (width, layers) in enumerate(zip(widths, unet.layers, strict=True)):
            passed += [width] * (layers + (level < len(widths) - 1))
        self.across = nnx.List(
            Conv(width, width, 1, std=0.0, **make) for width in (*passed, widths[-1])
        )

    @scoped
    def __call__(
        self,
        x_BHWC: jax.Array,
        time_B: jax.Array,
        image_BHWI: jax.Array,
        condition: Condition = Condition(),  # noqa: B008
        *,
        scale: float | jax.Array = 1.0,
        guess: bool = False,
        remat: str | Remat = "none",
    ) -> tuple[jax.Array, ...]:
        """Read the image -> what is to be added, for `Condition.control`: the middle's last.

        Args:
          x_BHWC: the noisy image, as the U-Net has it.
          time_B: likewise.
          image_BHWI: the image to follow, in 0..1 and RGB, of the size of the decoded image.
          condition: likewise; without image_BX and control.
          scale: factor on all residuals.
          guess: whether residuals are weighted from 0.1 at the largest image to 1 in the middle,
            for sampling without a prompt.
          remat: as of the U-Net.

        Raises:
          ConfigError: a condition that is missing or would be ignored, or an image that does not
            come to the size of the latents.
        """
        unet = self.config.unet
        needs = conditions(unet)
        takes = (*needs, "text_mask_BS") if unet.takes_text else needs
        require(condition, takes, needs, "a ControlNet of this config")
        self._check(x_BHWC, image_BHWI)
        if self.config.image_order == "bgr":
            image_BHWI = image_BHWI[..., ::-1]
        x_BHWC, given = start(self, unet, x_BHWC, time_B, condition)
        x_BHWC = self.conv_in(x_BHWC) + self.reader(image_BHWI.astype(self.compute_dtype))
        x_BHWC = on_image(x_BHWC)
        passed = [x_BHWC]
        for level in self.down:
            x_BHWC, more = level(x_BHWC, given, remat)
            passed += more
        passed.append(self.middle(x_BHWC, given, remat))
        residuals = [conv(x) for conv, x in zip(self.across, passed, strict=True)]
        scales = jnp.full(len(residuals), scale, jnp.float32)
        if self.config.pool:
            residuals = [jnp.mean(x, axis=(1, 2), keepdims=True) for x in residuals]
        elif guess:
            scales = scales * jnp.logspace(-1, 0, len(residuals))
        return tuple(x * by.astype(x.dtype) for x, by in zip(residuals, scales, strict=True))

    def _check(self, x_BHWC: jax.Array, image_BHWI: jax.Array) -> None:
        config = self.config
        factor = 2 ** (len(config.image_widths) - 1)
        want = (*(factor * n for n in x_BHWC.shape[1:3]), config.image_channels)
        if image_BHWI.shape[1:] != want or x_BHWC.shape[-1] != config.unet.in_channels:
            raise ConfigError(
                f"a ControlNet takes latents of {config.unet.in_channels} channels with an image "
                f"{factor} times their size of {config.image_channels}, and got "
                f"{x_BHWC.shape[1:]} with {image_BHWI.shape[1:]}; give an image of {want}"
            )
