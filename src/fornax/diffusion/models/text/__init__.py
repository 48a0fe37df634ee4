"""Text encoders: CLIP, T5, UMT5, and language models whose states are taken; those of images."""

from fornax.diffusion.models.text.clip import CLIPTextConfig, CLIPTextEncoder, CLIPVisionConfig
from fornax.diffusion.models.text.clip_vision import CLIPVisionEncoder
from fornax.diffusion.models.text.files import (
    CLIP_TEXT,
    CLIP_TEXT_PROJECTED,
    CLIP_VISION,
    LLAVA_VISION,
    QWEN_VISION,
    T5,
    UMT5,
    llava_name,
    qwen_name,
)
from fornax.diffusion.models.text.prompts import PromptTokenizer, load_prompt_tokenizer
from fornax.diffusion.models.text.qwen_vision import fitted
from fornax.diffusion.models.text.t5 import T5Config, T5Encoder

COMPONENTS = (CLIP_TEXT, CLIP_TEXT_PROJECTED, CLIP_VISION, T5, UMT5)
"""Every class of transformers that is read and written here."""

__all__ = [
    "COMPONENTS",
    "LLAVA_VISION",
    "QWEN_VISION",
    "CLIPTextConfig",
    "CLIPTextEncoder",
    "CLIPVisionConfig",
    "CLIPVisionEncoder",
    "PromptTokenizer",
    "T5Config",
    "T5Encoder",
    "fitted",
    "llava_name",
    "load_prompt_tokenizer",
    "qwen_name",
]
