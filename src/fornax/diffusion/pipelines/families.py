"""Pipelines of diffusers by their class: which parts they have, and how prompts are encoded.

Legend: B prompts, S tokens, D width of text states.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from fornax.config.errors import ConfigError
from fornax.diffusion.models.condition import Condition, check_widths
from fornax.diffusion.pipelines.control import Controlled, check_control
from fornax.diffusion.pipelines.one_frame import of_images
from fornax.diffusion.pipelines.parts import Parts, compiled, texts
from fornax.diffusion.pipelines.pipeline import Pipeline, Size
from fornax.diffusion.pipelines.scheduler import Scheduler

__all__ = ["FAMILIES", "Prompts", "latent_pipeline"]

Prompts = Sequence[str | None]


def latent_pipeline(
    parts: Parts,
    name: str,
    encode: Callable[..., Condition],
    *,
    scheduler: Scheduler | None = None,
    **changes: Any,
) -> Pipeline:
    """A pipeline over the latents of a VAE.

    Args:
      parts: of the folder.
      name: of the denoiser's part.
      encode: prompts to conditions.
      scheduler: None for the folder's.
      changes: fields of `Pipeline` that differ; and `patch` of the denoiser, `side` of its latents
        where its file has no sample_size, `fixed` for one that draws only that.
    """
    vae, denoiser = of_images(parts.module("vae")), parts.module(name)
    scheduler = parts.scheduler if scheduler is None else scheduler
    side, fixed = changes.pop("side", 64), changes.pop("fixed", False)
    trained = denoiser.config.sample_size or side
    channels = vae.config.latent_channels * int(np.prod(vae.config.patch))
    drawn = denoiser.config.out_channels
    drawn = denoiser.config.channels if drawn is None else drawn
    # DiT's output has a variance behind the noise, of which nothing is read.
    if drawn not in (channels, 2 * channels):
        raise ConfigError(
            f"{parts.folder}: the {name} draws {drawn} channels and the vae decodes {channels}; "
            "take both from one model"
        )
    factor = vae.config.factor * vae.config.patch[0]
    patch = changes.pop("patch", 1)
    controls = [parts.module(name) for name in parts.controls]
    for name, control in zip(parts.controls, controls, strict=True):
        check_control(control, denoiser, factor, parts.folder / name)
    if controls:
        denoiser = Controlled(denoiser, controls, [1.0] * len(controls))
    rows, columns = (trained, trained) if isinstance(trained, int) else trained
    size = (rows * factor, columns * factor)
    return dataclasses.replace(
        Pipeline(
            name=str(parts.folder),
            denoiser=denoiser,
            prediction=scheduler.prediction,
            schedule=lambda steps, shape: scheduler.schedule(
                steps, shape[0] * shape[1] // patch**2
            ),
            sampler=scheduler.sampler,
            encode=encode,
            latent_shape=lambda size: (size[0] // factor, size[1] // factor, channels),
            decode=compiled(vae, lambda vae, x_BHWC: vae.images(x_BHWC).astype(jnp.float32)),
            to_latents=compiled(vae, lambda vae, images_BHWC: vae.latents(images_BHWC)),
            size=size,
            sizes=(size,) if fixed else (),
            multiple=factor * patch,
            clip=scheduler.clip,
            fills=name == "unet" and denoiser.config.in_channels == 2 * channels + 1,
            follows=len(controls),
        ),
        **changes,
    )


def _check_text(parts: Parts, width: int) -> None:
    """Refuse text encoders of another model than the U-Net's."""
    config = parts.module("unet").config
    reads = config.text_input_dim or config.text_dims[0]
    if reads != width:
        raise ConfigError(
            f"{parts.folder}: the text encoders give states of width {width} and the unet reads "
            f"{reads}; take both from one model"
        )


def _stable_diffusion(parts: Parts) -> Pipeline:
    """Stable Diffusion 1 and 2: one CLIP, its last states after the norm."""
    tokenizer = parts.tokenizer("tokenizer")
    encoder = parts.module("text_encoder")
    _check_text(parts, encoder.config.hidden_size)
    length = encoder.config.max_positions
    run = compiled(encoder, lambda encoder, tokens: encoder(tokens)[0])

    def encode(prompts: Prompts, size: Size, guidance: float) -> Condition:
        tokens_BS, _ = tokenizer.encode(texts(prompts), length)
        return Condition(text_BSD=run(tokens_BS))

    return latent_pipeline(parts, "unet", encode, steps=30, scale=7.5)


def _stable_diffusion_xl(parts: Parts) -> Pipeline:
    """SDXL: two CLIPs, the states before the last layer behind each other, sizes in pixels."""
    names = [n for n in ("text_encoder", "text_encoder_2") if parts.has(n)]
    encoders = [parts.module(name) for name in names]
    tokenizers = [parts.tokenizer(n.replace("text_encoder", "tokenizer")) for n in names]
    _check_text(parts, sum(encoder.config.hidden_size for encoder in encoders))
    runs = [compiled(e, lambda e, tokens: e(tokens, skip=1, norm=False)) for e in encoders]
    zeros = bool(parts.index.get("force_zeros_for_empty_prompt", True))

    def encode(prompts: Prompts, size: Size, guidance: float) -> Condition:
        found = [
            run(tokenizer.encode(texts(prompts), encoder.config.max_positions)[0])
            for tokenizer, encoder, run in zip(tokenizers, encoders, runs, strict=True)
        ]
        text_BSD = jnp.concatenate([states for states, _ in found], -1)
        pooled = found[-1][1]
        if zeros:
            given = jnp.asarray([prompt is not None for prompt in prompts])
            text_BSD = text_BSD * given[:, None, None].astype(text_BSD.dtype)
            pooled = pooled * given[:, None].astype(pooled.dtype)
        sizes_BN = jnp.tile(jnp.float32([*size, 0, 0, *size]), (len(prompts), 1))
        return Condition(text_BSD=text_BSD, pooled_BD=pooled, sizes_BN=sizes_BN)

    return latent_pipeline(parts, "unet", encode, side=128, steps=30, scale=5.0)


def _dit(parts: Parts) -> Pipeline:
    """DiT: a class of ImageNet, by number or by its name in the index."""
    labels = {
        word.strip().lower(): int(number)
        for number, names in (parts.index.get("id2label") or {}).items()
        for word in str(names).split(",")
    }
    denoiser = parts.module("transformer")
    count = denoiser.config.embedder.classes

    def encode(prompts: Prompts, size: Size, guidance: float) -> Condition:
        return Condition(classes_B=jnp.asarray([_class(p, labels, count) for p in prompts]))

    return latent_pipeline(
        parts,
        "transformer",
        encode,
        patch=denoiser.config.patch[0],
        fixed=True,
        steps=50,
        scale=4.0,
    )


def _class(prompt: str | None, labels: Mapping[str, int], count: int) -> int:
    """The class that a prompt names; `count` is none."""
    if prompt is None:
        return count
    found = labels.get(prompt.strip().lower(), prompt.strip())
    if isinstance(found, str):
        if not found.isdecimal() or not 0 <= int(found) < count:
            raise ConfigError(
                f"prompt {prompt!r} names no class of this model; give a number from 0 to "
                f"{count - 1}" + (", or a name of id2label in model_index.json" if labels else "")
            )
        found = int(found)
    return found


def _clip_pair(parts: Parts) -> Callable[[Prompts], tuple[Any, Any]]:
    """Two CLIPs with projections: states before the last layer, and pooled states, joined."""
    names = ("text_encoder", "text_encoder_2")
    encoders = [parts.module(name) for name in names]
    tokenizers = [parts.tokenizer(n.replace("text_encoder", "tokenizer")) for n in names]
    runs = [compiled(e, lambda e, tokens: e(tokens, skip=1, norm=False)) for e in encoders]

    def encode(prompts: Prompts) -> tuple[Any, Any]:
        found = [
            run(tokenizer.encode(texts(prompts), encoder.config.max_positions)[0])
            for tokenizer, encoder, run in zip(tokenizers, encoders, runs, strict=True)
        ]
        states, pooled = zip(*found, strict=True)
        return jnp.concatenate(states, -1), jnp.concatenate(pooled, -1)

    return encode


def _stable_diffusion_3(parts: Parts) -> Pipeline:
    """SD3: two CLIPs side by side, padded to T5's width, T5's states behind; T5 may be missing."""
    clips = _clip_pair(parts)
    t5 = _t5(parts, "text_encoder_3", "tokenizer_3", 256) if parts.has("text_encoder_3") else None
    denoiser = parts.module("transformer")
    width = denoiser.config.text.width

    def encode(prompts: Prompts, size: Size, guidance: float) -> Condition:
        text_BSD, pooled_BD = clips(prompts)
        if text_BSD.shape[-1] > width:
            raise ConfigError(
                f"{parts.folder}: the transformer reads states of width {width}, and those of the "
                f"two CLIPs have {text_BSD.shape[-1]}; take the text encoders of its own model"
            )
        text_BSD = jnp.pad(text_BSD, ((0, 0), (0, 0), (0, width - text_BSD.shape[-1])))
        if t5 is None:
            more_BSD = jnp.zeros((len(prompts), 256, width), text_BSD.dtype)
        else:
            more_BSD = t5(prompts).astype(text_BSD.dtype)
            check_widths(Condition(text_BSD=more_BSD), {"text_BSD": width}, "the transformer")
        return Condition(text_BSD=jnp.concatenate([text_BSD, more_BSD], 1), pooled_BD=pooled_BD)

    patch = denoiser.config.patch[0]
    return latent_pipeline(parts, "transformer", encode, patch=patch, side=128, steps=28, scale=7.0)


def _flux(parts: Parts) -> Pipeline:
    """Flux: CLIP's pooled state, T5's states; guidance is an input, or there is none (schnell)."""
    clip = parts.module("text_encoder")
    tokenizer = parts.tokenizer("tokenizer")
    pool = compiled(clip, lambda clip, tokens: clip(tokens)[1])
    denoiser = parts.module("transformer")
    embedded = denoiser.config.embedder.guidance_scale is not None
    t5 = _t5(parts, "text_encoder_2", "tokenizer_2", 512 if embedded else 256)

    def encode(prompts: Prompts, size: Size, guidance: float) -> Condition:
        tokens_BS, _ = tokenizer.encode(texts(prompts), clip.config.max_positions)
        return Condition(
            text_BSD=t5(prompts),
            pooled_BD=pool(tokens_BS),
            guidance_B=jnp.full((len(prompts),), guidance, jnp.float32) if embedded else None,
        )

    return latent_pipeline(
        parts,
        "transformer",
        encode,
        patch=denoiser.config.patch[0],
        side=128,
        guidance="embedded" if embedded else "none",
        steps=28 if embedded else 4,
        scale=3.5 if embedded else 1.0,
    )


def _t5(parts: Parts, name: str, tokenizer: str, length: int) -> Callable[[Prompts], Any]:
    """T5's states of prompts of a length, padding included."""
    words = parts.tokenizer(tokenizer)
    run = compiled(parts.module(name), lambda encoder, tokens: encoder(tokens))
    return lambda prompts: run(words.encode(texts(prompts), length)[0])


FAMILIES: Mapping[str, Callable[[Parts], Pipeline]] = {
    "StableDiffusionPipeline": _stable_diffusion,
    "StableDiffusionImg2ImgPipeline": _stable_diffusion,
    "StableDiffusionInpaintPipeline": _stable_diffusion,
    "StableDiffusionControlNetPipeline": _stable_diffusion,
    "StableDiffusionControlNetImg2ImgPipeline": _stable_diffusion,
    "StableDiffusionControlNetInpaintPipeline": _stable_diffusion,
    "StableDiffusionXLPipeline": _stable_diffusion_xl,
    "StableDiffusionXLImg2ImgPipeline": _stable_diffusion_xl,
    "StableDiffusionXLInpaintPipeline": _stable_diffusion_xl,
    "StableDiffusionXLControlNetPipeline": _stable_diffusion_xl,
    "StableDiffusionXLControlNetImg2ImgPipeline": _stable_diffusion_xl,
    "StableDiffusionXLControlNetInpaintPipeline": _stable_diffusion_xl,
    "DiTPipeline": _dit,
    "StableDiffusion3Pipeline": _stable_diffusion_3,
    "StableDiffusion3Img2ImgPipeline": _stable_diffusion_3,
    "FluxPipeline": _flux,
    "FluxImg2ImgPipeline": _flux,
}
"""What loads a folder, by `_class_name` of its model_index.json. What its parts are decides what it
can do: start from prompts, from images, inpaint; a U-Net of nine channels fills masks alone."""
