"""Whole pipelines of videos beside diffusers': tiny random models, saved, latents given."""

import dataclasses
from pathlib import Path
from typing import Any

import diffusers
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from PIL import Image
from safetensors.numpy import load_file
from tests.parity.diffusion_models import channels_first, check_output, randomized

from fornax.adapters import LoRA
from fornax.diffusion.config import DiffusionTuneConfig, SampleConfig
from fornax.diffusion.data import ImagesConfig
from fornax.diffusion.models import Condition
from fornax.diffusion.pipelines import ImageRequest, load_pipeline, plan
from fornax.diffusion.pipelines.clips import encode_video
from fornax.diffusion.tuning import tune
from fornax.mesh import MeshConfig
from fornax.optim import Constant, OptimConfig

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
STEPS, GUIDANCE = 4, 4.0
SIZE, FRAMES = (16, 32), 9
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Words as they are, those that are not known apart."""
    words = ["<pad>", "</s>", "<unk>", "a", "fox", "runs", "blue"]
    backend: Any = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def wan_transformer(seed: int = 0, channels: int = 4, **options: Any) -> Any:
    network = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=channels,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=24,
        num_layers=1,
        **options,
    )
    return randomized(network, seed)


def wan_parts() -> dict[str, Any]:
    """All parts of Wan but the transformers."""
    encoder = transformers.UMT5Config(
        vocab_size=8, d_model=12, d_kv=4, d_ff=16, num_layers=1, num_heads=3
    )
    vae = diffusers.AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.1, 0.2, 0.3, 0.4],
        latents_std=[1.5, 1.4, 1.3, 1.2],
        scale_factor_spatial=4,
    )
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    return {
        "tokenizer": tokenizer(),
        "text_encoder": randomized(transformers.UMT5EncoderModel(encoder)),
        "vae": randomized(vae),
        "scheduler": scheduler,
    }


def ours(folder: Path, noise: np.ndarray, **fields: Any) -> tuple[np.ndarray, np.ndarray]:
    """Latents and videos of a saved pipeline, channels first."""
    pipeline = load_pipeline(folder)
    if "conditions" in fields:
        conditions = fields.pop("conditions")
        pipeline = dataclasses.replace(
            pipeline, encode=lambda prompts, size, guidance: conditions[prompts[0]]
        )
    request = ImageRequest(
        frames=FRAMES,
        steps=STEPS,
        latents_BX=jnp.asarray(noise),
        **{"prompt": "a fox runs", "guidance": GUIDANCE, "size": SIZE, **fields},
    )
    latents = pipeline.run(plan(pipeline, request))
    videos = pipeline.decode(latents)
    return np.moveaxis(np.asarray(latents), -1, 1), np.moveaxis(np.asarray(videos), -1, 1)


def theirs(
    pipeline: Any, noise: torch.Tensor, size: tuple[int, int] = SIZE, **given: Any
) -> torch.Tensor:
    """The latents that diffusers ends with."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        height=size[0],
        width=size[1],
        num_frames=FRAMES,
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE,
        latents=noise,
        output_type="latent",
        **given,
    ).frames


def texts(text: np.ndarray) -> dict[str | None, Condition]:
    """States of the prompt, and of none."""
    return {
        name: Condition(text_BSD=jnp.asarray(text[i : i + 1]))
        for i, name in enumerate(["a fox runs", None])
    }


def wan() -> Any:
    return diffusers.WanPipeline(transformer=wan_transformer(), **wan_parts())


@torch.no_grad()
def test_wan_with_its_texts(tmp_path: Path) -> None:
    """The latents, and the video that they become."""
    pipeline = wan()
    pipeline.save_pretrained(tmp_path / "model")
    noise = normal(1, 3, 4, 8, 4)
    latents, videos = ours(tmp_path / "model", noise, negative="blue")
    want = theirs(pipeline, channels_first(noise), prompt="a fox runs", negative_prompt="blue")
    check_output(latents, want)
    config = pipeline.vae.config
    mean, deviation = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (config.latents_mean, config.latents_std)
    )
    check_output(videos, pipeline.vae.decode(want * deviation + mean).sample)


def wan_first(**parts: Any) -> Any:
    """Wan from a first frame; without CLIP unless it is given."""
    given = {
        "transformer": wan_transformer(channels=12),
        "image_encoder": None,
        "image_processor": None,
        **wan_parts(),
        **parts,
    }
    return diffusers.WanImageToVideoPipeline(**given)


@pytest.mark.exhaustive
@torch.no_grad()
def test_wan_from_a_first_frame(tmp_path: Path) -> None:
    """Wan 2.2: latents of the frame and of grey behind it are channels beside the noise; steps on
    both sides of the boundary, each by its network."""
    pipeline = wan_first(transformer_2=wan_transformer(seed=1, channels=12), boundary_ratio=0.95)
    pipeline.save_pretrained(tmp_path / "model")
    noise, text = normal(1, 3, 4, 8, 4), normal(2, 5, 12)
    image = RNG.uniform(-1, 1, (*SIZE, 3)).astype(np.float32)
    latents, _ = ours(tmp_path / "model", noise, conditions=texts(text), image=image)
    want = theirs(
        pipeline,
        channels_first(noise),
        image=channels_first((image[None] + 1) / 2),
        prompt_embeds=torch.from_numpy(text[:1]),
        negative_prompt_embeds=torch.from_numpy(text[1:]),
    )
    times = pipeline.scheduler.timesteps
    assert times.min() < 950 <= times.max()
    check_output(latents, want)


def wan_seen() -> Any:
    """Of which CLIP sees the frame too."""
    clip = transformers.CLIPVisionConfig(
        hidden_size=12,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    return wan_first(
        transformer=wan_transformer(channels=12, image_dim=12, added_kv_proj_dim=32),
        image_encoder=randomized(transformers.CLIPVisionModel(clip)),
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        ),
    )


@pytest.mark.exhaustive
@torch.no_grad()
def test_wan_from_a_first_frame_that_clip_sees(tmp_path: Path) -> None:
    """Wan 2.1: the middle of the frame, normalised, and CLIP's states before its last layer."""
    pipeline = wan_seen()
    pipeline.save_pretrained(tmp_path / "model")
    noise, text = normal(1, 3, 4, 8, 4), normal(2, 512, 12)
    pixels = RNG.integers(0, 256, (*SIZE, 3)).astype(np.uint8)
    image = pixels.astype(np.float32) / 127.5 - 1
    latents, _ = ours(tmp_path / "model", noise, conditions=texts(text), image=image)
    want = theirs(
        pipeline,
        channels_first(noise),
        image=Image.fromarray(pixels),
        prompt_embeds=torch.from_numpy(text[:1]),
        negative_prompt_embeds=torch.from_numpy(text[1:]),
    )
    check_output(latents, want)


def wan_5b() -> Any:
    """The frame's latents instead of the video's first."""
    vae = diffusers.AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        latents_mean=[0.1, 0.2, 0.3, 0.4],
        latents_std=[1.5, 1.4, 1.3, 1.2],
        scale_factor_spatial=8,
    )
    return wan_first(
        transformer=wan_transformer(),
        expand_timesteps=True,
        vae=randomized(vae),
    )


@pytest.mark.slow
@torch.no_grad()
def test_wan_5b_from_a_first_frame(tmp_path: Path) -> None:
    """Wan 2.2's 5B model: the frame's latents instead of the video's first, at time 0, from an
    autoencoder of patches with shortcuts."""
    pipeline = wan_5b()
    vae = pipeline.vae
    pipeline.save_pretrained(tmp_path / "model")
    size = (32, 64)
    noise, text = normal(1, 3, 4, 8, 4), normal(2, 5, 12)
    image = RNG.uniform(-1, 1, (*size, 3)).astype(np.float32)
    latents, videos = ours(
        tmp_path / "model", noise, conditions=texts(text), image=image, size=size
    )
    want = theirs(
        pipeline,
        channels_first(noise),
        size=size,
        image=channels_first((image[None] + 1) / 2),
        prompt_embeds=torch.from_numpy(text[:1]),
        negative_prompt_embeds=torch.from_numpy(text[1:]),
    )
    check_output(latents, want)
    mean, deviation = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    check_output(videos, vae.decode(want * deviation + mean).sample)


def ltx() -> Any:
    encoder = transformers.T5Config(
        vocab_size=8, d_model=12, d_kv=4, d_ff=16, num_layers=1, num_heads=3
    )
    transformer = diffusers.LTXVideoTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        cross_attention_dim=32,
        caption_channels=12,
        num_layers=1,
    )
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(4, 8),
        down_block_types=("LTXVideoDownBlock3D",) * 2,
        layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, False),
        downsample_type=("conv", "conv"),
        decoder_block_out_channels=(4, 8),
        decoder_layers_per_block=(1, 1, 1),
        decoder_spatio_temporal_scaling=(True, False),
        decoder_inject_noise=(False,) * 3,
        upsample_residual=(False,) * 2,
        upsample_factor=(1, 1),
        patch_size=4,
        scaling_factor=1.5,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        base_shift=0.95,
        max_shift=2.05,
        shift_terminal=0.1,
    )
    return diffusers.LTXPipeline(
        scheduler=scheduler,
        vae=randomized(vae),
        text_encoder=randomized(transformers.T5EncoderModel(encoder)),
        tokenizer=tokenizer(),
        transformer=randomized(transformer),
    )


@torch.no_grad()
def test_ltx_video(tmp_path: Path) -> None:
    """Text with padding that is not seen; the shift is of the number of latents, then stretched."""
    pipeline = ltx()
    pipeline.save_pretrained(tmp_path / "model")
    noise, text = normal(1, 5, 4, 8, 4), normal(2, 5, 12)
    mask = np.int32([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    conditions = {
        name: Condition(
            text_BSD=jnp.asarray(text[i : i + 1]), text_mask_BS=jnp.asarray(mask[i : i + 1])
        )
        for i, name in enumerate(["a fox runs", None])
    }
    size = (32, 64)
    latents, videos = ours(tmp_path / "model", noise, conditions=conditions, size=size, rate=24.0)
    want = theirs(
        pipeline,
        pipeline._pack_latents(channels_first(noise)),
        prompt_embeds=torch.from_numpy(text[:1]),
        prompt_attention_mask=torch.from_numpy(mask[:1]),
        negative_prompt_embeds=torch.from_numpy(text[1:]),
        negative_prompt_attention_mask=torch.from_numpy(mask[1:]),
        frame_rate=24,
        size=size,
    )
    want = pipeline._unpack_latents(want, 5, 4, 8)
    check_output(latents, want)
    check_output(videos, pipeline.vae.decode(want / 1.5).sample)


LLAMA = {
    "vocab_size": 16,
    "hidden_size": 12,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
}


def hunyuan_video_parts(**options: Any) -> dict[str, Any]:
    """All parts of HunyuanVideo but its language model and that one's tokenizer."""
    clip = transformers.CLIPTextConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=1,
    )
    transformer = diffusers.HunyuanVideoTransformer3DModel(
        **{
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "text_embed_dim": 12,
            "pooled_projection_dim": 8,
            "rope_axes_dim": (4, 6, 6),
            **options,
        }
    )
    vae = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 3,
        up_block_types=("HunyuanVideoUpBlock3D",) * 3,
        block_out_channels=(4, 4, 4),
        layers_per_block=1,
        norm_num_groups=2,
        spatial_compression_ratio=4,
    )
    return {
        "transformer": randomized(transformer),
        "vae": randomized(vae),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        "text_encoder_2": randomized(transformers.CLIPTextModel(clip)),
        "tokenizer_2": tokenizer(),
    }


def llava_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token for each word of the conversation but one, so that its image is the sixth and 103
    are before the prompt."""
    special = [
        "<pad>",
        "<bos>",
        "<image>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    words = [*special, "<unk>", "\n\n", "\n", "a", "fox", "runs", "system", "Desc", "ribe"]
    backend: Any = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    pieces = tokenizers.Regex(r"\n\n|\n|Desc|\w+|[^\w\s]")
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(pieces, "removed", invert=True)
    backend.add_special_tokens(special)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")


def hunyuan_first(kind: str = "token_replace", embedded: bool = True) -> Any:
    """HunyuanVideo from a first frame."""
    vision = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 48,
        "patch_size": 2,
    }
    llava = transformers.LlavaConfig(
        vision_config={**vision, "model_type": "clip_vision_model"},
        text_config={**LLAMA, "model_type": "llama"},
        image_token_index=2,
        pad_token_id=0,
    )
    beside = {"in_channels": 9} if kind == "latent_concat" else {}
    return diffusers.HunyuanVideoImageToVideoPipeline(
        text_encoder=randomized(transformers.LlavaForConditionalGeneration(llava)),
        tokenizer=llava_tokenizer(),
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 48}, crop_size={"height": 48, "width": 48}
        ),
        **hunyuan_video_parts(image_condition_type=kind, guidance_embeds=embedded, **beside),
    )


@pytest.mark.exhaustive
@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "embedded", "prompt"),
    [
        ("token_replace", True, "a fox runs"),
        ("latent_concat", False, "a fox runs " * 100),
    ],
)
def test_hunyuan_video_from_an_image(
    tmp_path: Path, kind: str, embedded: bool, prompt: str
) -> None:
    """LLaVA's states of the image, thinned, and of the prompt beside it; a long prompt cuts the
    header behind it off. One kind of network draws a latent frame that is not of the video."""
    pipeline = hunyuan_first(kind, embedded)
    pipeline.save_pretrained(tmp_path / "model")
    size = (48, 64)
    noise, pixels = normal(1, 3, 12, 16, 4), RNG.integers(0, 256, (*size, 3)).astype(np.uint8)
    fields = {"guidance": GUIDANCE if embedded else None, "prompt": prompt.strip()}
    latents, _ = ours(
        tmp_path / "model", noise, image=pixels / np.float32(127.5) - 1, size=size, **fields
    )
    want = theirs(
        pipeline,
        channels_first(noise),
        size=size,
        image=Image.fromarray(pixels),
        prompt=prompt.strip(),
    )
    cut = 1 if kind == "latent_concat" else 0
    check_output(latents[:, :, cut:], want)


def hunyuan() -> Any:
    return diffusers.HunyuanVideoPipeline(
        text_encoder=randomized(transformers.LlamaModel(transformers.LlamaConfig(**LLAMA))),
        tokenizer=tokenizer(),
        **hunyuan_video_parts(),
    )


@pytest.mark.exhaustive
@torch.no_grad()
def test_hunyuan_video_with_its_texts(tmp_path: Path) -> None:
    """Llama's states behind the first 95 tokens of its conversation, and CLIP's pooled state."""
    pipeline = hunyuan()
    pipeline.save_pretrained(tmp_path / "model")
    noise = normal(1, 3, 4, 8, 4)
    latents, videos = ours(tmp_path / "model", noise)
    want = theirs(pipeline, channels_first(noise), prompt="a fox runs")
    check_output(latents, want)
    factor = pipeline.vae.config.scaling_factor
    check_output(videos, pipeline.vae.decode(want / factor).sample)


def wan_scaled(vae: Any) -> tuple[Any, Any]:
    """Shift and factor of Wan's latents."""
    shift, scale = (
        torch.tensor(values).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return shift, 1 / scale


def wan_begun(theirs: Any, frame: Image.Image, count: int) -> dict[str, Any]:
    """What Wan's transformer is given of a first frame, channels first."""
    pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1)[None] / 127.5 - 1
    _, told, *replaced = theirs.prepare_latents(
        pixels, 1, 4, frame.height, frame.width, count, torch.float32, "cpu"
    )
    found = {"first" if replaced else "image": told}
    if theirs.image_encoder is not None:
        found["text2"] = theirs.encode_image(frame)
    return found


def hunyuan_begun(theirs: Any, frame: Image.Image, count: int) -> dict[str, Any]:
    """Likewise HunyuanVideo's, and the prompt that LLaVA reads beside it."""
    pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1)[None, :, None] / 127.5 - 1
    text, pooled, mask = theirs.encode_prompt(frame, "a fox runs", image_embed_interleave=4)
    first = theirs.vae.encode(pixels).latent_dist.mode() * theirs.vae.config.scaling_factor
    return {"first": first, "text": text * mask[..., None], "pooled": pooled, "text_mask": mask}


def factor_scaled(vae: Any) -> tuple[Any, Any]:
    return 0.0, vae.config.scaling_factor


def tuning_of(folder: Path) -> tuple[DiffusionTuneConfig, np.ndarray]:
    """A step of adapters on one video, which is written beside the folder, and the video."""
    loaded = load_pipeline(folder)
    assert loaded.frames is not None
    side, count = 4 * loaded.multiple, 1 + 2 * loaded.frames.factor
    video = RNG.integers(0, 256, (count, side, side, 3), np.uint8)
    (folder.parent / "a.png").write_bytes(encode_video(video, "png", 8))
    data = ImagesConfig(
        path=str(folder.parent / "a.png"),
        prompt="a fox runs",
        resolution=side,
        multiple=side,
        frames=(count,),
        rate=8,
        threads=1,
    )
    config = DiffusionTuneConfig(
        model=str(folder),
        data=data,
        lora=LoRA(rank=2),
        batch_size=1,
        steps=1,
        optim=OptimConfig(learning_rate=1e-2, schedule=Constant()),
        sample=SampleConfig(every=1, count=1, steps=1),
        mesh=MeshConfig(data=1),
    )
    return config, video


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("make", "scaled", "begun"),
    [
        (wan, wan_scaled, None),
        (ltx, factor_scaled, None),
        (hunyuan, factor_scaled, None),
        (wan_first, wan_scaled, wan_begun),
        (wan_seen, wan_scaled, wan_begun),
        (wan_5b, wan_scaled, wan_begun),
        (hunyuan_first, factor_scaled, hunyuan_begun),
    ],
)
@torch.no_grad()
def test_each_is_tuned_on_the_latents_of_its_autoencoder(
    make: Any, scaled: Any, begun: Any, tmp_path: Path
) -> None:
    """A step of adapters on one video; of its latents mean and deviation are diffusers', and what
    the network is given of its first frame."""
    theirs = make()
    theirs.save_pretrained(tmp_path / "model")
    config, video = tuning_of(tmp_path / "model")
    count = len(video)
    result = tune(config, tmp_path / "run", progress="none")
    assert result.metrics is not None
    assert np.isfinite(result.metrics["loss"])
    assert result.metrics["grad_norm"] > 0
    stored = [load_file(file) for file in (tmp_path / "run" / "encoded").rglob("*.safetensors")]
    (kept,) = (arrays for arrays in stored if "mean" in arrays)
    pixels = torch.from_numpy(video).permute(3, 0, 1, 2)[None] / 127.5 - 1
    found, (shift, scale) = theirs.vae.encode(pixels).latent_dist, scaled(theirs.vae)
    std = found.std.expand_as(found.mean)
    for name, want in (("mean", (found.mean - shift) * scale), ("deviation", std * scale)):
        check_output(np.moveaxis(kept[name], -1, 0)[None], want)
    assert (tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors").is_file()
    if begun is None:
        return
    texts = [each for each in stored if "mean" not in each]
    read = max(texts, key=lambda each: each.get("text_mask", np.zeros(1)).sum())
    for name, want in begun(theirs, Image.fromarray(video[0]), count).items():
        array = {**read, **kept}[name]
        if name in ("first", "image"):
            array = np.moveaxis(array, -1, 0)
        if name == "text":  # behind the mask are states of padding
            array = array * read["text_mask"][:, None]
        check_output(array[None], want)


@pytest.mark.exhaustive
@torch.no_grad()
def test_adapters_of_both_networks_are_read_by_diffusers(tmp_path: Path) -> None:
    """A run after another; diffusers draws with their two files what the last run does."""
    pipeline = diffusers.WanPipeline(
        transformer=wan_transformer(),
        transformer_2=wan_transformer(seed=1),
        boundary_ratio=0.95,
        **wan_parts(),
    )
    model = tmp_path / "model"
    pipeline.save_pretrained(model)
    noise = normal(1, 3, 4, 8, 4)
    plain, _ = ours(model, noise)
    for name, more in (("transformer", {}), ("transformer_2", {"load_into_transformer_2": True})):
        config, _ = tuning_of(model)
        run = tmp_path / name
        tune(dataclasses.replace(config, component=name, steps=8), run, progress="none")
        file = run / "lora" / "pytorch_lora_weights.safetensors"
        pipeline.load_lora_weights(file, adapter_name=name, **more)
        model = run
    found, _ = ours(model, noise)
    assert np.abs(found - plain).max() > 1e-2 * np.abs(plain).max()
    check_output(found, theirs(pipeline, channels_first(noise), prompt="a fox runs"))
