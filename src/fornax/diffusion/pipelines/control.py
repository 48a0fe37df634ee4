"""A U-Net with its ControlNets, as one denoiser."""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fornax.config.errors import ConfigError
from fornax.diffusion.models.condition import Condition
from fornax.diffusion.models.unet import ControlNet, UNet

__all__ = ["Controlled", "check_control"]

_SHARED = ("in_channels", "channels", "layers", "text_dims", "size_dim", "projection_dim")
"""Fields of a U-Net's config that a ControlNet of it has too."""


class Controlled(nnx.Module):
    """A U-Net that ControlNets add to.

    Attributes:
      unet: the denoiser.
      controls: each reads its own three channels of `condition.image_BX`, the images to follow in
        [0, 1] one after another; their residuals are added.
      scales: factors on the residuals of each.
    """

    def __init__(self, unet: UNet, controls: Sequence[ControlNet], scales: Sequence[float]):
        """Put them together."""
        self.unet, self.controls, self.scales = unet, nnx.List(controls), tuple(scales)
        self.config = unet.config

    def __call__(self, x_BHWC: jax.Array, time_B: jax.Array, condition: Condition) -> jax.Array:
        """The U-Net's output, see there."""
        assert condition.image_BX is not None, "requests without an image are refused"
        images = jnp.split(condition.image_BX, len(self.controls), -1)
        own = dataclasses.replace(condition, image_BX=None)
        found = [
            control(x_BHWC, time_B, image_BHWC, own, scale=scale)
            for control, image_BHWC, scale in zip(self.controls, images, self.scales, strict=True)
        ]
        residuals = tuple(functools.reduce(operator.add, each) for each in zip(*found, strict=True))
        return self.unet(x_BHWC, time_B, dataclasses.replace(own, control=residuals))


def check_control(control: Any, unet: Any, factor: int, path: object) -> None:
    """Refuse a ControlNet of another model, before anything is drawn.

    Args:
      control: what was loaded as one.
      unet: that it is to add to.
      factor: pixels of an image to one of its latents.
      path: of the ControlNet, for messages.

    Raises:
      ConfigError: it is none, or one of another U-Net.
    """
    if not isinstance(control, ControlNet):
        raise ConfigError(f"{path} is not a ControlNet; name a folder of a ControlNetModel")
    if not isinstance(unet, UNet):
        raise ConfigError(f"{path} is a ControlNet, which adds to U-Nets; this model has none")
    own, config = control.config.unet, unet.config
    differs = [name for name in _SHARED if getattr(own, name) != getattr(config, name)]
    if differs:
        name = differs[0]
        raise ConfigError(
            f"{path} is a ControlNet of another model: its {name} is {getattr(own, name)}, and the "
            f"U-Net's {getattr(config, name)}; take one that was trained with this U-Net"
        )
    least = 2 ** (len(control.config.image_widths) - 1)
    if control.config.image_channels != 3 or least != factor:
        raise ConfigError(
            f"{path} reads images of {control.config.image_channels} channels, {least} times the "
            f"size of their latents; this model's have 3, {factor} times"
        )
