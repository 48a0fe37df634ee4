"""Pipelines whose prompts one T5 or one language model reads, by their class of diffusers.

Legend: B prompts, S tokens, D width of text states.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax.numpy as jnp

from fornax.diffusion.models.condition import Condition
from fornax.diffusion.pipelines.families import Prompts, latent_pipeline
from fornax.diffusion.pipelines.parts import Parts, compiled, texts
from fornax.diffusion.pipelines.pipeline import Pipeline, Size

__all__ = ["LANGUAGE_FAMILIES"]

Encode = Callable[[Prompts, Size, float], Condition]


def _pixart(length: int, parts: Parts) -> Pipeline:
    """PixArt: T5's states of lower-case prompts with their mask; sizes where they are embedded."""
    tokenizer = parts.tokenizer("tokenizer")
    run = compiled(parts.module("text_encoder"), lambda encoder, *given: encoder(*given))
    denoiser = parts.module("transformer")
    sized = denoiser.config.embedder.sizes

    def encode(prompts: Prompts, size: Size, guidance: float) -> Condition:
        tokens_BS, mask_BS = tokenizer.encode(_plain(prompts), length)
        sizes = jnp.float32([[*size, size[0] / size[1]]])
        return Condition(
            text_BSD=run(tokens_BS, mask_BS),
            text_mask_BS=jnp.asarray(mask_BS),
            sizes_BN=jnp.tile(sizes, (len(prompts), 1)) if sized else None,
        )

    return latent_pipeline(
        parts,
        "transformer",
        encode,
        patch=denoiser.config.patch[0],
        steps=20,
        scale=4.5,
    )


def _plain(prompts: Prompts) -> list[str]:
    """Texts in lower case, as those were that PixArt and Sana learned from."""
    return [text.lower().strip() for text in texts(prompts)]


_SANA_LENGTH = 300
_SANA_INSTRUCTION = "\n".join(
    [
        "Given a user prompt, generate an 'Enhanced prompt' that provides detailed visual "
        "descriptions suitable for image generation. Evaluate the level of detail in the user "
        "prompt:",
        "- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, "
        "textures, and spatial relationships to create vivid and concrete scenes.",
        "- If the prompt is already detailed, refine and enhance the existing details slightly "
        "without overcomplicating.",
        "Here are examples of how to transform or refine prompts:",
        "- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat curled up in a round "
        "shape, sleeping peacefully on a warm sunny windowsill, surrounded by pots of blooming red "
        "flowers.",
        "- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, "
        "featuring glowing street lamps, a diverse crowd of people in colorful clothing, and a "
        "double-decker bus passing by towering glass skyscrapers.",
        "Please generate only the enhanced description for the prompt below and avoid including "
        "any additional commentary or evaluations:",
        "User Prompt: ",
    ]
)
"""What Sana's captions followed in training (NVlabs/Sana, configs/sana_app_config)."""


def _sana(parts: Parts) -> Pipeline:
    """Sana: guided by two evaluations."""
    encode, encode_negative = _sana_prompts(parts)
    denoiser = parts.module("transformer")
    return latent_pipeline(
        parts,
        "transformer",
        encode,
        encode_negative=encode_negative,
        patch=denoiser.config.patch[0],
        steps=20,
        scale=4.5,
    )


def _sana_sprint(parts: Parts) -> Pipeline:
    """Sana Sprint: a consistency model of one to four steps, told its guidance; times to 1."""
    read, _ = _sana_prompts(parts)
    denoiser = parts.module("transformer")

    def encode(prompts: Prompts, size: Size, guidance: float) -> Condition:
        told = jnp.full((len(prompts),), guidance, jnp.float32)
        return dataclasses.replace(read(prompts, size, guidance), guidance_B=told)

    return latent_pipeline(
        parts,
        "transformer",
        encode,
        guidance="embedded",
        patch=denoiser.config.patch[0],
        # Of levels, whatever timestep_scale the transformer's file has.
        time_scale=1 / (1000 * denoiser.config.embedder.time_scale),
        steps=2,
        scale=4.5,
    )


def _sana_prompts(parts: Parts) -> tuple[Encode, Encode]:
    """Gemma 2's states: of the prompt behind an instruction, the first and the last 299; of a
    negative prompt."""
    tokenizer = parts.tokenizer("tokenizer")
    states = parts.language_model("text_encoder", (-1,))
    instruction = tokenizer.encode([_SANA_INSTRUCTION])[0].shape[1]
    rest = _SANA_LENGTH - 1

    def condition(prompts: list[str], length: int) -> Condition:
        tokens_BS, mask_BS = tokenizer.encode(prompts, length)
        text_BSD, mask_BS = states(tokens_BS, mask_BS), jnp.asarray(mask_BS)
        return Condition(
            text_BSD=jnp.concatenate([text_BSD[:, :1], text_BSD[:, -rest:]], 1),
            text_mask_BS=jnp.concatenate([mask_BS[:, :1], mask_BS[:, -rest:]], 1),
        )

    def encode(prompts: Prompts, size: Size, guidance: float) -> Condition:
        asked = [_SANA_INSTRUCTION + text for text in _plain(prompts)]
        return condition(asked, instruction + _SANA_LENGTH - 2)

    def encode_negative(prompts: Prompts, size: Size, guidance: float) -> Condition:
        return condition(_plain(prompts), _SANA_LENGTH)

    return encode, encode_negative


_QWEN_IMAGE_SYSTEM = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:"
)
_QWEN_IMAGE_BEFORE, _QWEN_IMAGE_LENGTH = 34, 512
"""Tokens before the prompt, which are left out, and of the prompt and what follows it."""


def _qwen_image(parts: Parts) -> Pipeline:
    """Qwen-Image: Qwen2.5-VL's states of a conversation; guidance keeps the lengths of patches."""
    tokenizer = parts.tokenizer("tokenizer")
    states = parts.language_model("text_encoder", (-1,))
    patch = parts.module("transformer").config.patch[0]
    before = f"<|im_start|>system\n{_QWEN_IMAGE_SYSTEM}<|im_end|>\n<|im_start|>user\n"
    after = "<|im_end|>\n<|im_start|>assistant\n"
    skipped, length = _QWEN_IMAGE_BEFORE, _QWEN_IMAGE_LENGTH

    def encode(prompts: Prompts, size: Size, guidance: float) -> Condition:
        asked = [before + text + after for text in texts(prompts)]
        tokens_BS, mask_BS = tokenizer.encode(asked, skipped + length)
        return Condition(
            text_BSD=states(tokens_BS, mask_BS)[:, skipped:],
            text_mask_BS=jnp.asarray(mask_BS[:, skipped:]),
        )

    def encode_negative(prompts: Prompts, size: Size, guidance: float) -> Condition:
        return encode([" " if prompt is None else prompt for prompt in prompts], size, guidance)

    return latent_pipeline(
        parts,
        "transformer",
        encode,
        encode_negative=encode_negative,
        patch=patch,
        side=128,
        norm_patch=patch,
        steps=50,
        scale=4.0,
    )


def _z_image(parts: Parts) -> Pipeline:
    """Z-Image: Qwen3's states before the last layer, of the prompt as a user's message."""
    tokenizer, chat = parts.tokenizer("tokenizer"), parts.chat("tokenizer")
    states = parts.language_model("text_encoder", (-2,))
    patch = parts.module("transformer").config.patch[0]

    def encode(prompts: Prompts, size: Size, guidance: float) -> Condition:
        asked = [chat([_user(text)], enable_thinking=True) for text in texts(prompts)]
        tokens_BS, mask_BS = tokenizer.encode(asked, 512)
        return Condition(text_BSD=states(tokens_BS, mask_BS), text_mask_BS=jnp.asarray(mask_BS))

    return latent_pipeline(parts, "transformer", encode, patch=patch, side=128, steps=50, scale=6.0)


_OVIS_IMAGE_INSTRUCTION = (
    "Describe the image by detailing the color, quantity, text, shape, size, texture, spatial "
    "relationships of the objects and background: "
)
_OVIS_IMAGE_BEFORE, _OVIS_IMAGE_LENGTH = 28, 256
"""Tokens before the prompt, which are left out, and of the prompt and what follows it."""


def _ovis_image(parts: Parts) -> Pipeline:
    """Ovis-Image: Qwen3's last states, of an instruction and the prompt as a user's message; those
    of padding are zeros, and are attended to."""
    tokenizer, chat = parts.tokenizer("tokenizer"), parts.chat("tokenizer")
    states, left = parts.language_model("text_encoder", (-1,)), parts.pads_left("tokenizer")
    patch = parts.module("transformer").config.patch[0]
    skipped, length = _OVIS_IMAGE_BEFORE, _OVIS_IMAGE_LENGTH

    def encode(prompts: Prompts, size: Size, guidance: float) -> Condition:
        asked = [
            chat([_user(_OVIS_IMAGE_INSTRUCTION + text)], enable_thinking=False)
            for text in texts(prompts)
        ]
        tokens_BS, mask_BS = tokenizer.encode(asked, skipped + length, left=left)
        text_BSD = states(tokens_BS, mask_BS)
        text_BSD = jnp.where(jnp.asarray(mask_BS)[..., None] != 0, text_BSD, 0)
        return Condition(text_BSD=text_BSD[:, skipped:])

    return latent_pipeline(parts, "transformer", encode, patch=patch, side=128, steps=50, scale=5.0)


def _user(text: str) -> Mapping[str, str]:
    return {"role": "user", "content": text}


LANGUAGE_FAMILIES: Mapping[str, Callable[[Parts], Pipeline]] = {
    "PixArtAlphaPipeline": functools.partial(_pixart, 120),
    "PixArtSigmaPipeline": functools.partial(_pixart, 300),
    "SanaPipeline": _sana,
    "SanaSprintPipeline": _sana_sprint,
    "SanaSprintImg2ImgPipeline": _sana_sprint,
    "QwenImagePipeline": _qwen_image,
    "QwenImageImg2ImgPipeline": _qwen_image,
    "QwenImageInpaintPipeline": _qwen_image,
    "OvisImagePipeline": _ovis_image,
    "ZImagePipeline": _z_image,
    "ZImageImg2ImgPipeline": _z_image,
}
"""What loads a folder, as `families.FAMILIES`."""
