"""Pipelines that draw after images, beside diffusers' own: tiny random models, saved and read."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from diffusers.pipelines.flux import pipeline_flux_kontext, pipeline_flux_kontext_inpaint
from diffusers.pipelines.flux2 import pipeline_flux2_klein_inpaint
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit,
    pipeline_qwenimage_edit_inpaint,
    pipeline_qwenimage_edit_plus,
)
from PIL import Image
from tests.parity.diffusion_models import channels_first, check_output, randomized
from tests.parity.test_diffusion_language_pipelines import flux2_klein
from tokenizers import Tokenizer, models, pre_tokenizers

from fornax.diffusion.models import Condition
from fornax.diffusion.pipelines import ImageRequest, Pipeline, load_pipeline, plan, shown
from fornax.diffusion.pipelines.references import bounded, of_area, preferred

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
STEPS = 3
RNG = np.random.default_rng(0)
VAE = {
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "sample_size": 16,
}
LLM = {
    "vocab_size": 262,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": 1,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
MARK = "<|image_pad|>"
SPECIAL = ["<pad>", "<bos>", "<|im_start|>", "<|im_end|>", MARK, "<|vision_start|>"]
CHAT = (
    "<bos>{% for message in messages %}[{{ message.role }}]"
    "{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>{% endfor %}"
)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def picture(height: int, width: int) -> np.ndarray:
    return RNG.integers(0, 256, (height, width, 3)).astype(np.uint8)


def tokenizer(**options: Any) -> transformers.PreTrainedTokenizerFast:
    """Bytes as tokens, with special ones."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend: Any = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(SPECIAL)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", **options
    )


def flow(**options: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**options)


def drawn(pipeline: Pipeline, noise: np.ndarray, **fields: Any) -> np.ndarray:
    """Latents, channels first."""
    request = ImageRequest(prompt="A red fox", steps=STEPS, latents_BX=jnp.asarray(noise), **fields)
    return np.moveaxis(np.asarray(pipeline.run(plan(pipeline, request))), -1, 1)


def theirs(pipeline: Any, pictures: list[np.ndarray], **options: Any) -> torch.Tensor:
    """The latents that diffusers ends with."""
    pipeline.set_progress_bar_config(disable=True)
    images = [Image.fromarray(one) for one in pictures]
    return pipeline(
        image=images if len(images) > 1 else images[0],
        num_inference_steps=STEPS,
        output_type="latent",
        **options,
    ).images


def at(pipeline: Pipeline, size: Callable[[tuple[int, int]], tuple[int, int]]) -> Pipeline:
    """A pipeline that reads images at other sizes than 1024 x 1024."""
    assert pipeline.references is not None
    references = dataclasses.replace(pipeline.references, size=size)
    return dataclasses.replace(pipeline, references=references)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("side", ["right", pytest.param("left", marks=pytest.mark.exhaustive)])
def test_flux2_dev(tmp_path: Path, side: str) -> None:
    """Mistral's states after three layers, padding on the tokenizer's side; two images, of which
    one is cut to a multiple."""
    vae = randomized(diffusers.AutoencoderKLFlux2(**VAE, latent_channels=4))
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.2, 2.0)
    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        axes_dims_rope=(4, 4, 4, 4),
    )
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = {**LLM, "model_type": "mistral", "num_hidden_layers": 31, "head_dim": 8}
    config = transformers.Mistral3Config(
        text_config=text, vision_config={**vision, "model_type": "pixtral"}
    )
    pipeline = diffusers.Flux2Pipeline(
        scheduler=flow(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=randomized(transformers.Mistral3ForConditionalGeneration(config)),
        tokenizer=tokenizer(chat_template=CHAT, padding_side=side),
        transformer=randomized(transformer),
    )
    pipeline.save_pretrained(tmp_path)
    noise, pictures = normal(1, 4, 6, 16), [picture(64, 64), picture(66, 79)]
    found = drawn(
        load_pipeline(tmp_path),
        noise,
        size=(16, 24),
        guidance=3.0,
        references=tuple(pictures),
    )
    want = theirs(
        pipeline,
        pictures,
        prompt="A red fox",
        height=16,
        width=24,
        latents=channels_first(noise),
        guidance_scale=3.0,
    )
    check_output(found, want.reshape(1, 4, 6, 16).permute(0, 3, 1, 2))


def kontext(kind: Any, folder: Path) -> Any:
    """A pipeline of a class, saved."""
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=8,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    clip = {"vocab_size": 262, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    t5 = {"vocab_size": 262, "d_model": 24, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    pipeline = kind(
        transformer=randomized(transformer),
        scheduler=flow(use_dynamic_shifting=True),
        vae=randomized(diffusers.AutoencoderKL(**VAE, shift_factor=0.1, scaling_factor=0.4)),
        text_encoder=transformers.CLIPTextModel(
            transformers.CLIPTextConfig(**clip, num_attention_heads=2)
        ),
        tokenizer=tokenizer(),
        text_encoder_2=transformers.T5EncoderModel(transformers.T5Config(**t5)),
        tokenizer_2=tokenizer(),
    )
    pipeline.save_pretrained(folder)
    return pipeline


@pytest.mark.exhaustive
@torch.no_grad()
def test_flux_kontext(tmp_path: Path) -> None:
    """Flux after an image; texts are given as states."""
    pipeline = kontext(diffusers.FluxKontextPipeline, tmp_path)
    noise, image, text, pooled = (
        normal(1, 8, 12, 4),
        picture(16, 20),
        normal(1, 6, 24),
        normal(1, 8),
    )
    condition = Condition(text_BSD=text, pooled_BD=pooled, guidance_B=jnp.full((1,), 3.0))  # pyrefly: ignore
    ours = at(load_pipeline(tmp_path), lambda size: size)
    ours = dataclasses.replace(ours, encode=lambda prompts, size, guidance: condition)
    found = drawn(ours, noise, size=(16, 24), guidance=3.0, references=(image,))
    want = theirs(
        pipeline,
        [image],
        prompt_embeds=torch.from_numpy(text),
        pooled_prompt_embeds=torch.from_numpy(pooled),
        height=16,
        width=24,
        max_area=16 * 24,
        latents=pipeline._pack_latents(channels_first(noise), 1, 4, 8, 12),
        guidance_scale=3.0,
        _auto_resize=False,
    )
    check_output(found, pipeline._unpack_latents(want, 16, 24, 2))


class Reads:
    """Qwen's processor without torchvision, which it asks for: images, and a text with a mark for
    each of their states."""

    def __init__(self, images: Any, words: Any):
        self.images, self.words = images, words

    def __call__(self, text: list[str], images: Any, **options: Any) -> Any:
        found = self.images(images, return_tensors="pt")
        counts = found["image_grid_thw"].prod(-1) // self.images.merge_size**2
        pieces = text[0].split(MARK)
        whole = pieces[0] + "".join(
            MARK * int(n) + p for n, p in zip(counts, pieces[1:], strict=True)
        )
        return transformers.BatchFeature({**self.words([whole], return_tensors="pt"), **found})


def told(encoder: Any, mark: int) -> None:
    """Tell the language model which tokens are an image's, which diffusers 0.42.1 does not:
    without, transformers 5 counts them like words."""
    forward = encoder.forward

    def call(*given: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        kinds = (input_ids == mark).int()
        return forward(*given, input_ids=input_ids, mm_token_type_ids=kinds, **options)

    encoder.forward = call


def qwen_image_edit(kind: Any, clean: bool, folder: Path) -> Any:
    """A pipeline of a class, saved; the images that its processor reads are not resized."""
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 16,
        "window_size": 64,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 16,
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config={**LLM, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        vision_config=vision,
        image_token_id=SPECIAL.index(MARK),
    )
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 0.7, 1.0, 2.0],
    )
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t=clean,
    )
    words = tokenizer()
    pipeline = kind(
        scheduler=flow(use_dynamic_shifting=True, shift_terminal=0.02, max_shift=0.9),
        vae=randomized(vae),
        text_encoder=randomized(transformers.Qwen2_5_VLForConditionalGeneration(config)),
        tokenizer=words,
        processor=None,
        transformer=randomized(transformer),
    )
    images = transformers.Qwen2VLImageProcessor(patch_size=16)
    pipeline.save_pretrained(folder)
    images.save_pretrained(folder / "processor")
    index = json.loads((folder / "model_index.json").read_text())
    index["processor"] = ["transformers", "Qwen2VLProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index))
    pipeline.processor = Reads(images, words)
    told(pipeline.text_encoder, SPECIAL.index(MARK))
    return pipeline


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "clean", "sizes"),
    [
        pytest.param("QwenImageEditPlus", True, [(32, 64), (40, 40)], marks=pytest.mark.slow),
        pytest.param("QwenImageEdit", False, [(32, 64)], marks=pytest.mark.exhaustive),
    ],
)
def test_qwen_image_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, clean: bool, sizes: Any
) -> None:
    """Qwen2.5-VL sees the images at one size, the transformer at another; there they are small."""
    area = 2048
    pipeline = qwen_image_edit(getattr(diffusers, f"{kind}Pipeline"), clean, tmp_path)
    if kind == "QwenImageEdit":
        made = pipeline_qwenimage_edit.calculate_dimensions
        monkeypatch.setattr(
            pipeline_qwenimage_edit,
            "calculate_dimensions",
            lambda target, ratio: made(area, ratio),
        )
        ours = _seen_at(tmp_path, monkeypatch, area)
    else:
        monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", area)
        ours = load_pipeline(tmp_path)
    noise, pictures = normal(1, 8, 12, 4), [picture(*size) for size in sizes]
    found = drawn(
        at(ours, functools.partial(of_area, area=area)),
        noise,
        size=(16, 24),
        guidance=4.0,
        references=tuple(pictures),
    )
    want = theirs(
        pipeline,
        pictures,
        prompt="A red fox",
        negative_prompt=" ",
        height=16,
        width=24,
        latents=pipeline._pack_latents(channels_first(noise), 1, 4, 8, 12),
        true_cfg_scale=4.0,
    )
    check_output(found, pipeline._unpack_latents(want, 16, 24, 2)[:, :, 0])


def given(monkeypatch: pytest.MonkeyPatch, module: Any, noise: np.ndarray) -> None:
    """Have a module of diffusers take this noise, and the means of its latents."""

    def draw(shape: Any, **_: Any) -> torch.Tensor:
        return channels_first(noise).reshape(shape)

    monkeypatch.setattr(module, "randn_tensor", draw)
    monkeypatch.setattr(module, "retrieve_latents", lambda encoded, **_: encoded.latent_dist.mode())


def masked(height: int, width: int) -> np.ndarray:
    """float32 [H, W]: ones in the middle."""
    mask_HW = np.zeros((height, width), np.float32)
    mask_HW[height // 4 : height // 2, width // 4 : -4] = 1
    return mask_HW


def filled(pipeline: Pipeline, noise: np.ndarray, image: np.ndarray, **fields: Any) -> np.ndarray:
    """Latents of a request as `fornax diffusion sample --image --mask` makes it."""
    size = image.shape[:2]
    strength = fields.pop("strength", None)
    pictures = shown(pipeline, [Image.fromarray(image)], size, strength=strength, masked=True)
    fields |= {"size": size, "mask": masked(*size), "strength": strength}
    return drawn(pipeline, noise, **fields, **pictures)


def as_image(mask_HW: np.ndarray) -> Image.Image:
    return Image.fromarray((255 * mask_HW).astype(np.uint8))


@pytest.mark.exhaustive
@torch.no_grad()
@pytest.mark.parametrize("strength", [1.0, 0.7])
def test_flux_kontext_inpaints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strength: float
) -> None:
    """It draws after the image that it fills."""
    pipeline = kontext(diffusers.FluxKontextInpaintPipeline, tmp_path)
    noise, image, text, pooled = (
        normal(1, 8, 12, 4),
        picture(16, 24),
        normal(1, 6, 24),
        normal(1, 8),
    )
    given(monkeypatch, pipeline_flux_kontext_inpaint, noise)
    condition = Condition(text_BSD=text, pooled_BD=pooled, guidance_B=jnp.full((1,), 3.0))  # pyrefly: ignore
    ours = at(load_pipeline(tmp_path), lambda size: size)
    ours = dataclasses.replace(ours, encode=lambda prompts, size, guidance: condition)
    found = filled(ours, noise, image, guidance=3.0, strength=strength)
    want = theirs(
        pipeline,
        [image],
        mask_image=as_image(masked(16, 24)),
        strength=strength,
        prompt_embeds=torch.from_numpy(text),
        pooled_prompt_embeds=torch.from_numpy(pooled),
        height=16,
        width=24,
        max_area=16 * 24,
        guidance_scale=3.0,
        _auto_resize=False,
    )
    check_output(found, pipeline._unpack_latents(want, 16, 24, 2))


@pytest.mark.exhaustive
@torch.no_grad()
def test_qwen_image_edit_inpaints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    area, module = 2048, pipeline_qwenimage_edit_inpaint
    pipeline = qwen_image_edit(diffusers.QwenImageEditInpaintPipeline, False, tmp_path)
    made = module.calculate_dimensions
    monkeypatch.setattr(module, "calculate_dimensions", lambda target, ratio: made(area, ratio))
    noise, image = normal(1, 16, 32, 4), picture(32, 64)
    given(monkeypatch, module, noise)
    ours = at(_seen_at(tmp_path, monkeypatch, area), functools.partial(of_area, area=area))
    found = filled(ours, noise, image, guidance=4.0)
    want = theirs(
        pipeline,
        [image],
        mask_image=as_image(masked(32, 64)),
        strength=1.0,
        prompt="A red fox",
        negative_prompt=" ",
        true_cfg_scale=4.0,
    )
    check_output(found, pipeline._unpack_latents(want, 32, 64, 2)[:, :, 0])


@pytest.mark.exhaustive
@torch.no_grad()
def test_flux2_klein_inpaints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    klein, _ = flux2_klein()
    pipeline = diffusers.Flux2KleinInpaintPipeline(**klein.components)
    pipeline.save_pretrained(tmp_path)
    noise, image = normal(1, 16, 16, 16), picture(64, 64)
    given(monkeypatch, pipeline_flux2_klein_inpaint, noise)
    ours = load_pipeline(tmp_path)
    latents = np.moveaxis(filled(ours, noise, image, guidance=4.0), 1, -1)
    found = np.moveaxis(np.asarray(ours.decode(jnp.asarray(latents))), -1, 1)
    want = theirs(
        pipeline,
        [image],
        mask_image=as_image(masked(64, 64)),
        strength=1.0,
        prompt="A red fox",
        height=64,
        width=64,
        guidance_scale=4.0,
    )
    check_output(found, pipeline.vae.decode(want).sample)


def _seen_at(folder: Path, monkeypatch: pytest.MonkeyPatch, area: int) -> Pipeline:
    """A pipeline whose language model sees images of an area."""
    from fornax.diffusion.pipelines import editing

    monkeypatch.setattr(
        editing,
        "picture_of",
        lambda image, _: np.asarray(
            Image.fromarray(image).resize(
                of_area(image.shape[:2], area)[::-1], Image.Resampling.LANCZOS
            )
        ),
    )
    return load_pipeline(folder)


@pytest.mark.parametrize("size", [(512, 512), (700, 1300), (1500, 600), (3000, 2000)])
def test_sizes_at_which_images_are_read(size: tuple[int, int]) -> None:
    """As diffusers has them, height and width in the other order."""
    height, width = size
    ratio = width / height
    assert of_area(size) == pipeline_qwenimage_edit_plus.calculate_dimensions(1024**2, ratio)[::-1]
    known = pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS
    _, wide, high = min((abs(ratio - w / h), w, h) for w, h in known)
    assert preferred(size) == (high, wide)
    image = Image.new("RGB", (width, height))
    assert bounded(size) == Flux2ImageProcessor._resize_if_exceeds_area(image).size[::-1]
