"""A U-Net with its ControlNet, as one denoiser."""

import dataclasses

import jax
from flax import nnx

from fornax.diffusion.models.condition import Condition
from fornax.diffusion.models.unet import ControlNet, UNet

__all__ = ["Controlled"]


class Controlled(nnx.Module):
    """A U-Net that a ControlNet adds to.

    Attributes:
      unet: the denoiser.
      control: reads `condition.image_BX`, the image to follow in [0, 1].
    """

    def __init__(self, unet: UNet, control: ControlNet):
        """Put them together."""
        self.unet, self.control = unet, control
        self.config = unet.config

    def __call__(self, x_BHWC: jax.Array, time_B: jax.Array, condition: Condition) -> jax.Array:
        """The U-Net's output, see there."""
        image_BHWC = condition.image_BX
        assert image_BHWC is not None, "requests without an image are refused"
        own = dataclasses.replace(condition, image_BX=None)
        residuals = self.control(x_BHWC, time_B, image_BHWC, own)
        return self.unet(x_BHWC, time_B, dataclasses.replace(own, control=residuals))
