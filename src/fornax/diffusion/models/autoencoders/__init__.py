"""Autoencoders: images and videos to the latents that denoisers see, and back."""

from fornax.diffusion.models.autoencoders.components import (
    AUTOENCODER_DC,
    AUTOENCODER_KL,
    AUTOENCODER_KL_FLUX2,
)
from fornax.diffusion.models.autoencoders.config import (
    DeepCompressionConfig,
    KLConfig,
    LTXAutoencoderConfig,
)
from fornax.diffusion.models.autoencoders.dc import DeepCompressionAutoencoder
from fornax.diffusion.models.autoencoders.hunyuan import (
    FrameTiling,
    HunyuanAutoencoder,
    HunyuanAutoencoderConfig,
)
from fornax.diffusion.models.autoencoders.kl import AutoencoderKL, Gaussian, latent_moments
from fornax.diffusion.models.autoencoders.ltx import LTXAutoencoder
from fornax.diffusion.models.autoencoders.ltx_files import AUTOENCODER_KL_LTX_VIDEO
from fornax.diffusion.models.autoencoders.tiling import Tiling
from fornax.diffusion.models.autoencoders.video_files import (
    AUTOENCODER_KL_HUNYUAN_VIDEO,
    AUTOENCODER_KL_QWEN_IMAGE,
    AUTOENCODER_KL_WAN,
)
from fornax.diffusion.models.autoencoders.wan import WanAutoencoder, WanAutoencoderConfig

COMPONENTS = (
    AUTOENCODER_DC,
    AUTOENCODER_KL,
    AUTOENCODER_KL_FLUX2,
    AUTOENCODER_KL_HUNYUAN_VIDEO,
    AUTOENCODER_KL_LTX_VIDEO,
    AUTOENCODER_KL_QWEN_IMAGE,
    AUTOENCODER_KL_WAN,
)
"""Every class of diffusers that these are."""

__all__ = [
    "AUTOENCODER_DC",
    "AUTOENCODER_KL",
    "AUTOENCODER_KL_FLUX2",
    "COMPONENTS",
    "AutoencoderKL",
    "DeepCompressionAutoencoder",
    "DeepCompressionConfig",
    "FrameTiling",
    "Gaussian",
    "HunyuanAutoencoder",
    "HunyuanAutoencoderConfig",
    "KLConfig",
    "LTXAutoencoder",
    "LTXAutoencoderConfig",
    "Tiling",
    "WanAutoencoder",
    "WanAutoencoderConfig",
    "latent_moments",
]
