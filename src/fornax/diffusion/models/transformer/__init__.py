"""One transformer by config, and the classes of diffusers whose files it reads and writes."""

from fornax.diffusion.models.transformer.config import (
    BlockConfig,
    CrossConfig,
    EmbedderConfig,
    FractionalRopeConfig,
    HeadConfig,
    MLPConfig,
    NormConfig,
    RopeConfig,
    Run,
    SinCosConfig,
    TextConfig,
    TransformerConfig,
)
from fornax.diffusion.models.transformer.dit import DIT
from fornax.diffusion.models.transformer.flux import FLUX
from fornax.diffusion.models.transformer.flux2 import FLUX2
from fornax.diffusion.models.transformer.hunyuan_video import HUNYUAN_VIDEO
from fornax.diffusion.models.transformer.ltx import LTX_VIDEO
from fornax.diffusion.models.transformer.ovis_image import OVIS_IMAGE
from fornax.diffusion.models.transformer.own import OWN, DiTConfig
from fornax.diffusion.models.transformer.pixart import PIXART
from fornax.diffusion.models.transformer.qwen_image import QWEN_IMAGE
from fornax.diffusion.models.transformer.sana import SANA
from fornax.diffusion.models.transformer.sd3 import SD3
from fornax.diffusion.models.transformer.transformer import Around, Transformer
from fornax.diffusion.models.transformer.wan import WAN
from fornax.diffusion.models.transformer.z_image import Z_IMAGE

COMPONENTS = (
    DIT,
    FLUX,
    FLUX2,
    HUNYUAN_VIDEO,
    LTX_VIDEO,
    OVIS_IMAGE,
    OWN,
    PIXART,
    QWEN_IMAGE,
    SANA,
    SD3,
    WAN,
    Z_IMAGE,
)
"""Every class that this transformer is."""

__all__ = [
    "COMPONENTS",
    "Around",
    "BlockConfig",
    "CrossConfig",
    "DiTConfig",
    "EmbedderConfig",
    "FractionalRopeConfig",
    "HeadConfig",
    "MLPConfig",
    "NormConfig",
    "RopeConfig",
    "Run",
    "SinCosConfig",
    "TextConfig",
    "Transformer",
    "TransformerConfig",
]
