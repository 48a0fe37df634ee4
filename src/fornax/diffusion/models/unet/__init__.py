"""U-Nets of Stable Diffusion 1.x, 2.x and XL, unconditional U-Nets, and ControlNets."""

from fornax.diffusion.models.unet.components import CONTROLNET, UNET_2D, UNET_2D_CONDITION
from fornax.diffusion.models.unet.config import ControlNetConfig, UNetConfig
from fornax.diffusion.models.unet.control import ControlNet
from fornax.diffusion.models.unet.network import UNet, conditions

COMPONENTS = (CONTROLNET, UNET_2D, UNET_2D_CONDITION)
"""Every class of diffusers that these are."""

__all__ = [
    "COMPONENTS",
    "CONTROLNET",
    "UNET_2D",
    "UNET_2D_CONDITION",
    "ControlNet",
    "ControlNetConfig",
    "UNet",
    "UNetConfig",
    "conditions",
]
