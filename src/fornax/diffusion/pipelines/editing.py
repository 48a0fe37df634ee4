"""Pipelines that draw after images as well as from text, by their class of diffusers.

Legend: B prompts, S tokens, D width of text states.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import jax.numpy as jnp

from fornax.diffusion.models.condition import Condition
from fornax.diffusion.pipelines.families import FAMILIES, Prompts, latent_pipeline
from fornax.diffusion.pipelines.parts import Parts, texts
from fornax.diffusion.pipelines.pipeline import Pipeline, References, Size
from fornax.diffusion.pipelines.references import AREA, bounded, of_area, picture_of, preferred
from fornax.diffusion.pipelines.vision_language import Pictures, qwen_vl

__all__ = ["EDITING_FAMILIES"]


def _kontext(parts: Parts) -> Pipeline:
    """FLUX.1 Kontext: Flux, after an image."""
    references = References(size=preferred, most=1)
    return dataclasses.replace(FAMILIES["FluxPipeline"](parts), references=references)


_QWEN_EDIT_SYSTEM = (
    "Describe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. "
    "Generate a new image that meets the user's requirements while maintaining consistency with "
    "the original input where appropriate."
)
_QWEN_EDIT_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_EDIT_BEFORE, _QWEN_EDIT_LENGTH = 64, 512
"""Tokens before the images and the prompt, which are left out, and of all else but the images."""


def _qwen_image_edit(
    most: int | None, area: int, name: Callable[[int], str], parts: Parts
) -> Pipeline:
    """Qwen-Image-Edit: Qwen2.5-VL reads the prompt beside the images; guidance as Qwen-Image's.

    Args:
      most: images.
      area: of the images, as they are read, in pixels.
      name: of an image, by its number from 1, before it.
      parts: of the folder.
    """
    read, patch = qwen_vl(parts), parts.module("transformer").config.patch[0]
    skipped = _QWEN_EDIT_BEFORE

    def encode(prompts: Prompts, size: Size, guidance: float, pictures: Pictures) -> Condition:
        shown = [picture_of(picture_HWC, area) for picture_HWC in pictures]
        images = "".join(name(i) + _QWEN_EDIT_IMAGE for i, _ in enumerate(shown, start=1))
        found = [
            read(
                f"<|im_start|>system\n{_QWEN_EDIT_SYSTEM}<|im_end|>\n<|im_start|>user\n{images}"
                f"{text.replace('<|image_pad|>', '')}<|im_end|>\n<|im_start|>assistant\n",
                shown,
                skipped + _QWEN_EDIT_LENGTH,
            )
            for text in texts(prompts)
        ]
        return Condition(
            text_BSD=jnp.stack([one.states_SD[skipped:] for one in found]),
            text_mask_BS=jnp.stack([jnp.asarray(one.mask_S[skipped:]) for one in found]),
        )

    def encode_negative(
        prompts: Prompts, size: Size, guidance: float, pictures: Pictures
    ) -> Condition:
        prompts = [" " if prompt is None else prompt for prompt in prompts]
        return encode(prompts, size, guidance, pictures)

    return latent_pipeline(
        parts,
        "transformer",
        encode,
        encode_negative=encode_negative,
        sees=True,
        references=References(size=of_area, most=most, needed=True),
        patch=patch,
        side=128,
        norm_patch=patch,
        steps=50,
        scale=4.0,
    )


_FLUX2_SYSTEM = (
    "You are an AI that reasons about image descriptions. You give structured responses focusing "
    "on object relationships, object\nattribution and actions without speculation."
)
"""What prompts followed in training (github.com/black-forest-labs/flux2, system_messages.py)."""
_FLUX2_LENGTH = 512


def _flux2(parts: Parts) -> Pipeline:
    """FLUX.2 dev: Mistral Small's states after three layers, of a conversation; guidance is an
    input."""
    tokenizer, chat = parts.tokenizer("tokenizer"), parts.chat("tokenizer")
    states = parts.language_model("text_encoder", (10, 20, 30))
    left = parts.pads_left("tokenizer")
    embedded = parts.module("transformer").config.embedder.guidance_scale is not None

    def encode(prompts: Prompts, size: Size, guidance: float) -> Condition:
        # "[IMG]" would stand for a picture.
        asked = [
            chat(
                [_said("system", _FLUX2_SYSTEM), _said("user", text.replace("[IMG]", ""))],
                ask=False,
            )
            for text in texts(prompts)
        ]
        return Condition(
            text_BSD=states(*tokenizer.encode(asked, _FLUX2_LENGTH, left=left)),
            guidance_B=jnp.full((len(prompts),), guidance, jnp.float32) if embedded else None,
        )

    return latent_pipeline(
        parts,
        "transformer",
        encode,
        scheduler=parts.scheduler_with(_empirical_shift),
        side=64,
        guidance="embedded" if embedded else "none",
        references=References(size=bounded),
        steps=50,
        scale=4.0 if embedded else 1.0,
    )


def _said(role: str, text: str) -> Mapping[str, object]:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def _flux2_klein(parts: Parts) -> Pipeline:
    """FLUX.2 klein: Qwen3's states after three layers, padding included; distilled, or guided."""
    tokenizer, chat = parts.tokenizer("tokenizer"), parts.chat("tokenizer")
    states = parts.language_model("text_encoder", (9, 18, 27))
    left = parts.pads_left("tokenizer")

    def encode(prompts: Prompts, size: Size, guidance: float) -> Condition:
        asked = [
            chat([{"role": "user", "content": text}], enable_thinking=False)
            for text in texts(prompts)
        ]
        return Condition(text_BSD=states(*tokenizer.encode(asked, _FLUX2_LENGTH, left=left)))

    distilled = bool(parts.index.get("is_distilled", False))
    return latent_pipeline(
        parts,
        "transformer",
        encode,
        scheduler=parts.scheduler_with(_empirical_shift),
        side=64,
        guidance="none" if distilled else "free",
        references=References(size=bounded),
        steps=4 if distilled else 50,
        scale=1.0 if distilled else 4.0,
    )


def _empirical_shift(steps: int, tokens: int) -> float:
    """FLUX.2's shift of a flow: its logarithm lies between lines through tokens for 10 and for 200
    steps (github.com/black-forest-labs/flux2)."""
    many = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return math.exp(many)
    few = 8.73809524e-05 * tokens + 1.89833333
    return math.exp(many + (many - few) / 190 * (steps - 200))


_edit_one = functools.partial(_qwen_image_edit, 1, AREA, lambda number: "")
EDITING_FAMILIES: Mapping[str, Callable[[Parts], Pipeline]] = {
    "FluxKontextPipeline": _kontext,
    "FluxKontextInpaintPipeline": _kontext,
    "QwenImageEditPipeline": _edit_one,
    "QwenImageEditInpaintPipeline": _edit_one,
    "QwenImageEditPlusPipeline": functools.partial(
        _qwen_image_edit, None, 384 * 384, "Picture {}: ".format
    ),
    "Flux2Pipeline": _flux2,
    "Flux2KleinPipeline": _flux2_klein,
    "Flux2KleinInpaintPipeline": _flux2_klein,
}
"""What loads a folder, as `families.FAMILIES`."""
