"""Text encoders: CLIP, T5, UMT5, and language models whose states are taken; CLIP's of images."""

from fornax.diffusion.models.text.clip import CLIPTextConfig, CLIPTextEncoder, CLIPVisionConfig
from fornax.diffusion.models.text.clip_vision import CLIPVisionEncoder
from fornax.diffusion.models.text.files import (
    CLIP_TEXT,
    CLIP_TEXT_PROJECTED,
    CLIP_VISION,
    T5,
    UMT5,
)
from fornax.diffusion.models.text.prompts import PromptTokenizer, load_prompt_tokenizer
from fornax.diffusion.models.text.t5 import T5Config, T5Encoder

COMPONENTS = (CLIP_TEXT, CLIP_TEXT_PROJECTED, CLIP_VISION, T5, UMT5)
"""Every class of transformers that is read and written here."""

__all__ = [
    "COMPONENTS",
    "CLIPTextConfig",
    "CLIPTextEncoder",
    "CLIPVisionConfig",
    "CLIPVisionEncoder",
    "PromptTokenizer",
    "T5Config",
    "T5Encoder",
    "load_prompt_tokenizer",
]
