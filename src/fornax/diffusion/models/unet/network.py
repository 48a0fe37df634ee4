"""The U-Net, and the ControlNet that adds to what it passes across.

Legend: B batch, H height, W width, C channels, S text tokens, D width of the text states.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fornax.config.errors import ConfigError
from fornax.diffusion.models.condition import Condition, check_widths, require
from fornax.diffusion.models.image_blocks import on_image
from fornax.diffusion.models.parts import ACTIVATIONS, Conv, Dense, GroupNorm, Make
from fornax.diffusion.models.unet.config import UNetConfig
from fornax.diffusion.models.unet.embedding import TimeEmbedding
from fornax.diffusion.models.unet.levels import DownLevel, Given, MiddleLevel, UpLevel
from fornax.models import Remat
from fornax.models.scope import scoped

__all__ = ["UNet", "conditions", "start", "text_projection"]


class UNet(nnx.Module):
    """Predicts noise, v or data of images from a noisy image, its time and a condition.

    Residual blocks and attention compute in the compute dtype; norms, softmax, and the sines and
    cosines of the time in float32.
    """

    def __init__(
        self,
        config: UNetConfig,
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
        levels = range(len(config.channels))
        first = config.channels[0]
        self.embedding = TimeEmbedding(config, **make)
        self.text = text_projection(config, make)
        window = config.conv_in_kernel
        self.conv_in = Conv(config.in_channels, first, window, axes=(None, "embed"), **make)
        self.down = nnx.List(DownLevel(config, level, **make) for level in levels)
        self.middle = None if config.mid_attention is None else MiddleLevel(config, **make)
        self.up = nnx.List(UpLevel(config, index, **make) for index in levels)
        self.norm = GroupNorm(first, groups=config.norm_groups, eps=config.norm_eps, dtype=dtype)
        window = config.conv_out_kernel
        self.conv_out = Conv(first, config.out_channels, window, axes=("embed", None), **make)

    @scoped
    def __call__(
        self,
        x_BHWC: jax.Array,
        time_B: jax.Array,
        condition: Condition = Condition(),  # noqa: B008
        *,
        remat: str | Remat = "none",
    ) -> jax.Array:
        """Predict -> [B, H, W, out_channels] in the dtype of x.

        Args:
          x_BHWC: the noisy image, of any height and width.
          time_B: float32, in steps of the training's schedule (0 to 1000).
          condition: what the config asks for, and `image_BX` and `control` where there are any.
          remat: what the backward pass computes again of each residual block and each transformer
            (`fornax.models.remat`).

        Raises:
          ConfigError: a condition that is missing or would be ignored, or channels that are not
            the config's.
        """
        needs = conditions(self.config)
        takes = (*needs, "image_BX", "control")
        takes = (*takes, "text_mask_BS") if self.config.takes_text else takes
        require(condition, takes, needs, "a U-Net of this config")
        check_widths(condition, _widths(self.config), "a U-Net of this config")
        dtype = x_BHWC.dtype
        x_BHWC = _join_image(x_BHWC, condition.image_BX, self.config)
        x_BHWC, given = start(self, self.config, x_BHWC, time_B, condition)
        x_BHWC = on_image(self.conv_in(x_BHWC))
        passed = [x_BHWC]
        for level in self.down:
            x_BHWC, more = level(x_BHWC, given, remat)
            passed += more
        if self.middle is not None:
            x_BHWC = self.middle(x_BHWC, given, remat)
        if condition.control is not None:
            passed, x_BHWC = _add_control(passed, x_BHWC, condition.control)
        for level in self.up:
            count = len(level.blocks)
            own, passed = passed[-count:], passed[:-count]
            size = (passed[-1].shape[1], passed[-1].shape[2]) if passed else None
            x_BHWC = level(x_BHWC, own, given, size, remat)
        if self.config.activation == "silu":
            x_BHWC = self.norm(x_BHWC, activation="silu")
        else:
            x_BHWC = ACTIVATIONS[self.config.activation](self.norm(x_BHWC))
        return on_image(self.conv_out(x_BHWC)).astype(dtype)


def conditions(config: UNetConfig) -> tuple[str, ...]:
    """The fields of a condition that a U-Net of a config needs."""
    needs = {
        "text_BSD": config.takes_text,
        "guidance_B": config.time_condition_dim is not None,
        "classes_B": config.class_embedding != "none",
        "pooled_BD": config.size_dim is not None,
        "sizes_BN": config.size_dim is not None,
    }
    return tuple(name for name, needed in needs.items() if needed)


def _widths(config: UNetConfig) -> dict[str, int | None]:
    """Of states and pooled text, where all levels attend to one width."""
    text = config.text_input_dim or max(config.text_dims)
    sizes = 6 * (config.size_dim or 0)
    return {
        "text_BSD": text if config.takes_text and len(set(config.text_dims)) == 1 else None,
        "pooled_BD": None if config.projection_dim is None else config.projection_dim - sizes,
    }


def text_projection(config: UNetConfig, make: Make) -> Dense | None:
    """The projection of text states to the width that the levels attend to, if there is one."""
    if config.text_input_dim is None:
        return None
    return Dense(config.text_input_dim, config.text_dims[0], **make)


def _join_image(x_BHWC: jax.Array, image_BHWC: jax.Array | None, config: UNetConfig) -> jax.Array:
    """The sample with the condition's channels after its own.

    Raises:
      ConfigError: together they are not `in_channels`.
    """
    own, more = x_BHWC.shape[-1], 0 if image_BHWC is None else image_BHWC.shape[-1]
    if own + more != config.in_channels:
        raise ConfigError(
            f"the sample has {own} channels and the condition's image {more}, and the U-Net takes "
            f"in_channels={config.in_channels} together; give latents of that autoencoder, and for "
            "inpainting the mask and masked latents as Condition.image_BX"
        )
    return x_BHWC if image_BHWC is None else jnp.concatenate([x_BHWC, image_BHWC], axis=-1)


def start(
    network: Any, config: UNetConfig, x_BHWC: jax.Array, time_B: jax.Array, condition: Condition
) -> tuple[jax.Array, Given]:
    """The input in the compute dtype, and what all levels take in.

    Args:
      network: with `embedding`, `text` and `compute_dtype`.
      config: of its levels.
      x_BHWC: the noisy image.
      time_B: float32.
      condition: of the fields that `conditions` names.
    """
    dtype = network.compute_dtype
    x_BHWC = x_BHWC.astype(dtype)
    if config.center_input:
        x_BHWC = 2 * x_BHWC - 1
    text_BSD = condition.text_BSD
    if text_BSD is not None:
        text_BSD = text_BSD.astype(dtype)
        text_BSD = text_BSD if network.text is None else network.text(text_BSD)
    given = Given(
        embedding_BE=network.embedding(time_B, condition),
        text_BSD=text_BSD,
        mask_BS=condition.text_mask_BS,
    )
    return x_BHWC, given


def _add_control(
    passed: list[jax.Array], x_BHWC: jax.Array, control: tuple[jax.Array, ...]
) -> tuple[list[jax.Array], jax.Array]:
    """What the way down passes and the middle's output, each with its residual added."""
    if len(control) != len(passed) + 1:
        raise ConfigError(
            f"control has {len(control)} residuals and the U-Net passes {len(passed)} across and "
            "one through the middle; use a ControlNet made for it"
        )
    *across, middle = control
    passed = [x + more.astype(x.dtype) for x, more in zip(passed, across, strict=True)]
    return passed, x_BHWC + middle.astype(x_BHWC.dtype)
