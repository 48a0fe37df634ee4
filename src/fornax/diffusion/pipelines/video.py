"""Pipelines of diffusers that draw videos, by their class.

Legend: B prompts, S tokens, D width of text states, F frames of latents.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import ConfigError
from fornax.diffusion.models.condition import Condition
from fornax.diffusion.models.transformer import FractionalRopeConfig
from fornax.diffusion.pipelines.experts import Experts
from fornax.diffusion.pipelines.parts import Parts, compiled, texts
from fornax.diffusion.pipelines.pipeline import Begun, EncodeVideo, Frames, Pipeline, Size
from fornax.diffusion.pipelines.vision_language import Pictures, clip_pixels, llava

__all__ = ["VIDEO_FAMILIES"]

Prompts = Sequence[str | None]


def _video_pipeline(
    parts: Parts,
    encode: Callable[..., Condition],
    *,
    denoiser: Any,
    count: int,
    rate: float,
    begin: Callable[[EncodeVideo, jax.Array, int], Begun] | None = None,
    lean: float = 0.0,
    cut: int = 0,
    **fields: Any,
) -> Pipeline:
    """A pipeline over the latents of a video's autoencoder.

    Args:
      parts: of the folder.
      encode: prompts to conditions.
      denoiser: of videos of latents.
      count: of frames, by default.
      rate: frames per second, by default.
      begin: as of `Frames`.
      lean: as of `Frames`.
      cut: likewise.
      fields: of `Pipeline`, that the family has.
    """
    vae, scheduler = parts.module("vae"), parts.scheduler
    channels, drawn = vae.config.latent_channels, denoiser.config.outputs
    if drawn != channels:
        raise ConfigError(
            f"{parts.folder}: the transformer draws {drawn} channels and the vae decodes "
            f"{channels}; take both from one model"
        )
    factor, frames, patch = vae.config.factor, vae.config.frame_factor, denoiser.config.patch

    def tokens(shape: Sequence[int]) -> int:
        return math.prod(n // p for n, p in zip(shape, patch, strict=False))

    def spacing(rate: float) -> tuple[float, float, float]:
        return frames / rate, factor, factor

    spaced = isinstance(denoiser.config.positions, FractionalRopeConfig)

    return Pipeline(
        name=str(parts.folder),
        denoiser=denoiser,
        prediction=scheduler.prediction,
        schedule=lambda steps, shape: scheduler.schedule(steps, tokens(shape)),
        sampler=scheduler.sampler,
        encode=encode,
        latent_shape=lambda size: (size[0] // factor, size[1] // factor, channels),
        decode=compiled(vae, lambda vae, x_BFHWC: vae.videos(x_BFHWC).astype(jnp.float32)),
        frames=Frames(
            count=count,
            factor=frames,
            rate=rate,
            sizes=spacing if spaced else None,
            encode=compiled(vae, lambda vae, x_BFHWC: vae.latents(x_BFHWC)),
            begin=begin,
            lean=lean,
            cut=cut,
        ),
        multiple=factor * patch[-1],
        **fields,
    )


def _wan(parts: Parts) -> Pipeline:
    """Wan 2.1 and 2.2 from text."""
    return _wan_of(parts)


def _wan_of(parts: Parts, **fields: Any) -> Pipeline:
    """Wan: UMT5's states, zeros behind the prompt's; one network or two."""
    words, encoder = parts.tokenizer("tokenizer"), parts.module("text_encoder")

    def states(encoder: Any, tokens_BS: Any, mask_BS: Any) -> Any:
        text_BSD = encoder(tokens_BS, mask_BS)
        return text_BSD * mask_BS[..., None].astype(text_BSD.dtype)

    run = compiled(encoder, states)

    def encode(prompts: Prompts, size: Size, guidance: float) -> Condition:
        return Condition(text_BSD=run(*words.encode(texts(prompts), 512)))

    denoiser = parts.module("transformer")
    if parts.has("transformer_2"):
        boundary = parts.index.get("boundary_ratio")
        if boundary is None:
            raise ConfigError(
                f"{parts.folder / 'model_index.json'} names a transformer_2 and no boundary_ratio, "
                "which says from which times on it draws; write it there, such as 0.875"
            )
        denoiser = Experts(denoiser, parts.module("transformer_2"), 1000 * float(boundary))
    dense = bool(parts.index.get("expand_timesteps"))  # Wan 2.2's 5B model
    return _video_pipeline(
        parts,
        encode,
        denoiser=denoiser,
        count=121 if dense else 81,
        rate=24 if dense else 16,
        size=(704, 1280) if dense else (480, 832),
        steps=50,
        scale=5.0,
        **fields,
    )


def _wan_from_an_image(parts: Parts) -> Pipeline:
    """Wan from a first frame: latents of it and of grey behind, and a mask, as channels; in 2.1
    CLIP's states of it too, those before the last layer. Wan 2.2's 5B model, with a time for each
    patch, has its latents instead of the video's first."""
    if parts.index.get("expand_timesteps"):
        if not parts.module("transformer").config.first_frame:
            raise ConfigError(
                f"{parts.folder / 'model_index.json'} says expand_timesteps, which is of a "
                "transformer that takes the sample's channels alone, in patches of one frame; set "
                "it to false for this transformer"
            )
        return _wan_of(parts, begin=_first_latents)

    see = _clip_states(parts) if parts.module("transformer").config.image_states else None
    factor = parts.module("vae").config.frame_factor

    def begin(encode: EncodeVideo, image_BHWC: jax.Array, count: int) -> Begun:
        video_BFHWC = jnp.pad(image_BHWC[:, None], ((0, 0), (0, count - 1), *((0, 0),) * 3))
        latents_BFHWC = encode(video_BFHWC)
        mask = jnp.zeros((*latents_BFHWC.shape[:-1], factor), jnp.float32)
        told = {"image_BX": jnp.concatenate([mask.at[:, 0].set(1.0), latents_BFHWC], -1)}
        if see is not None:
            told["text2_BSD"] = see(image_BHWC)
        return told, latents_BFHWC[:, :1]

    return _wan_of(parts, begin=begin)


def _first_latents(encode: EncodeVideo, image_BHWC: jax.Array, count: int) -> Begun:
    """The latents of a first frame, which replace the video's first."""
    latents_BFHWC = encode(image_BHWC[:, None])
    return {"first_BX": latents_BFHWC}, latents_BFHWC


def _clip_states(parts: Parts) -> Callable[[jax.Array], jax.Array]:
    """CLIP's states before the last layer, of an image [1, H, W, 3] in [-1, 1] (`clip_pixels`)."""
    encoder, settings = parts.module("image_encoder"), parts.settings("image_processor")
    run = compiled(encoder, lambda encoder, x_BHWC: encoder(x_BHWC, skip=1))

    def see(image_BHWC: jax.Array) -> jax.Array:
        pixels_HWC = np.asarray(jnp.round((image_BHWC[0] + 1) * 127.5), np.uint8)
        return run(clip_pixels(pixels_HWC, encoder.config.image_size, settings)[None])

    return see


def _ltx(parts: Parts) -> Pipeline:
    """LTX-Video from text: T5's states of 128 tokens with their mask; the rate is an input."""
    words = parts.tokenizer("tokenizer")
    run = compiled(parts.module("text_encoder"), lambda encoder, tokens: encoder(tokens))

    def encode(prompts: Prompts, size: Size, guidance: float) -> Condition:
        tokens_BS, mask_BS = words.encode(texts(prompts), 128)
        return Condition(text_BSD=run(tokens_BS), text_mask_BS=jnp.asarray(mask_BS))

    denoiser = parts.module("transformer")
    return _video_pipeline(
        parts, encode, denoiser=denoiser, count=161, rate=25, size=(512, 704), steps=50, scale=3.0
    )


_HUNYUAN_VIDEO_BEFORE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following "
    "aspects: 1. The main content and theme of the video.2. The color, shape, size, texture, "
    "quantity, text, and spatial relationships of the objects.3. Actions, events, behaviors "
    "temporal relationships, physical movement changes of the objects.4. background environment, "
    "light, style and atmosphere.5. camera angles, movements, and transitions used in the video:"
    "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
)
"""What prompts followed in training (github.com/Tencent/HunyuanVideo, hyvideo/constants.py)."""
_HUNYUAN_VIDEO_SKIPPED, _HUNYUAN_VIDEO_LENGTH = 95, 256
"""Tokens of that, which are left out, and of the prompt and what follows it."""


def _hunyuan_video(parts: Parts) -> Pipeline:
    """HunyuanVideo from text: Llama's states of a fixed conversation, two layers before its last,
    and CLIP's pooled state; guidance is an input, or there is none."""
    words, clip_words = parts.tokenizer("tokenizer"), parts.tokenizer("tokenizer_2")
    states, clip = parts.language_model("text_encoder", (-3,)), parts.module("text_encoder_2")
    pool = compiled(clip, lambda clip, tokens: clip(tokens)[1])
    denoiser = parts.module("transformer")
    embedded = denoiser.config.embedder.guidance_scale is not None
    skipped, length = _HUNYUAN_VIDEO_SKIPPED, _HUNYUAN_VIDEO_LENGTH

    def encode(prompts: Prompts, size: Size, guidance: float) -> Condition:
        asked = [_HUNYUAN_VIDEO_BEFORE + text + "<|eot_id|>" for text in texts(prompts)]
        tokens_BS, mask_BS = words.encode(asked, skipped + length)
        clip_tokens_BS, _ = clip_words.encode(texts(prompts), clip.config.max_positions)
        return Condition(
            text_BSD=states(tokens_BS, mask_BS)[:, skipped:],
            text_mask_BS=jnp.asarray(mask_BS[:, skipped:]),
            pooled_BD=pool(clip_tokens_BS),
            guidance_B=jnp.full((len(prompts),), guidance, jnp.float32) if embedded else None,
        )

    return _video_pipeline(
        parts,
        encode,
        denoiser=denoiser,
        count=129,
        rate=24,
        guidance="embedded" if embedded else "none",
        size=(720, 1280),
        steps=50,
        scale=6.0 if embedded else 1.0,
    )


_HUNYUAN_VIDEO_SEEN_BEFORE = (
    "<|start_header_id|>system<|end_header_id|>\n\n<image>\nDescribe the video by detailing the "
    "following aspects according to the reference image: 1. The main content and theme of the "
    "video.2. The color, shape, size, texture, quantity, text, and spatial relationships of the "
    "objects.3. Actions, events, behaviors temporal relationships, physical movement changes of "
    "the objects.4. background environment, light, style and atmosphere.5. camera angles, "
    "movements, and transitions used in the video:<|eot_id|>\n\n"
    "<|start_header_id|>user<|end_header_id|>\n\n"
)
_HUNYUAN_VIDEO_SEEN_AFTER = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
"""What prompts stand between in training from an image (as above)."""
_HUNYUAN_VIDEO_SEEN_SKIPPED, _HUNYUAN_VIDEO_HEADER = 103, 4
"""Tokens before the prompt, the image's counted as one, and of the answer's header, from the end of
the prompt, which are left out."""
_HUNYUAN_VIDEO_LEAN = 0.001


def _hunyuan_video_from_an_image(parts: Parts) -> Pipeline:
    """HunyuanVideo from a first frame: LLaVA reads the prompt beside it. Its latents are channels
    beside the sample's, with one more latent frame than the video, or replace the sample's
    first."""
    read, words = llava(parts), parts.tokenizer("tokenizer")
    clip_words, clip = parts.tokenizer("tokenizer_2"), parts.module("text_encoder_2")
    pool = compiled(clip, lambda clip, tokens: clip(tokens)[1])
    denoiser = parts.module("transformer")
    config = denoiser.config
    embedded, instead = config.embedder.guidance_scale is not None, config.first_frame
    if not instead and not config.image_channels:
        raise ConfigError(
            f"{parts.folder}: the transformer's image_condition_type is null, which is of videos "
            "from text alone; draw with its HunyuanVideoPipeline"
        )
    skipped, every = _HUNYUAN_VIDEO_SEEN_SKIPPED, 4 if instead else 2
    ends = words.token("<|end_header_id|>")

    def states(text: str, picture_HWC: np.ndarray) -> tuple[jax.Array, np.ndarray]:
        text = _HUNYUAN_VIDEO_SEEN_BEFORE + text.replace("<image>", "") + _HUNYUAN_VIDEO_SEEN_AFTER
        found = read(text, picture_HWC, skipped + _HUNYUAN_VIDEO_LENGTH)
        # Where the image's states are, and what is behind the header of the answer; a prompt that
        # is too long has cut that off.
        image = np.flatnonzero(found.tokens_S == found.image)
        headers = np.flatnonzero(found.tokens_S == ends)
        after = (headers[2] if len(headers) > 2 else len(found.tokens_S) - 1) + 1
        kept = np.r_[
            image[::every],
            skipped - 1 + len(image) : after - _HUNYUAN_VIDEO_HEADER,
            after : len(found.tokens_S),
        ]
        return found.states_SD[kept], found.mask_S[kept]

    def encode(prompts: Prompts, size: Size, guidance: float, pictures: Pictures) -> Condition:
        found = [states(text, pictures[0]) for text in texts(prompts)]
        clip_tokens_BS, _ = clip_words.encode(texts(prompts), clip.config.max_positions)
        return Condition(
            text_BSD=jnp.stack([text_SD for text_SD, _ in found]),
            text_mask_BS=jnp.asarray(np.stack([mask_S for _, mask_S in found])),
            pooled_BD=pool(clip_tokens_BS),
            guidance_B=jnp.full((len(prompts),), guidance, jnp.float32) if embedded else None,
        )

    factor = parts.module("vae").config.frame_factor

    def beside(encode: EncodeVideo, image_BHWC: jax.Array, count: int) -> Begun:
        first_BFHWC = encode(image_BHWC[:, None])
        shown = jnp.concatenate([first_BFHWC, jnp.ones_like(first_BFHWC[..., :1])], -1)
        frames = 1 + (count - 1) // factor
        rest = ((0, 0), (0, frames - 1), (0, 0), (0, 0), (0, 0))
        return {"image_BX": jnp.pad(shown, rest)}, first_BFHWC

    return _video_pipeline(
        parts,
        encode,
        denoiser=denoiser,
        count=129,
        rate=24,
        begin=_first_latents if instead else beside,
        lean=_HUNYUAN_VIDEO_LEAN,
        cut=0 if instead else factor,
        sees=True,
        guidance="embedded" if embedded else "none",
        size=(720, 1280),
        steps=50,
        scale=1.0,
    )


VIDEO_FAMILIES: Mapping[str, Callable[[Parts], Pipeline]] = {
    "HunyuanVideoImageToVideoPipeline": _hunyuan_video_from_an_image,
    "HunyuanVideoPipeline": _hunyuan_video,
    "LTXPipeline": _ltx,
    "WanImageToVideoPipeline": _wan_from_an_image,
    "WanPipeline": _wan,
}
"""What loads a folder, by `_class_name` of its model_index.json."""
