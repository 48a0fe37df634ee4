"""Whole pipelines beside diffusers': tiny random models, saved and read, latents given.

Where diffusers starts from `latents` times its own first sigma, it is given latents that make the
start ours; flows are given the sigmas, since 0.42.1 shifts its own twice.
"""

import dataclasses
import json

import diffusers
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from tests.parity.diffusion_models import channels_first, randomized

from fornax.diffusion.models import Condition
from fornax.diffusion.pipelines import ImageRequest, load_pipeline, plan, with_controls

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
STEPS = 4
RNG = np.random.default_rng(0)
VAE = {
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "sample_size": 16,
}
UNET = {
    "block_out_channels": (16, 32),
    "norm_num_groups": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 4,
    "layers_per_block": 1,
    "sample_size": 8,
}


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def tokenizer(folder):
    """CLIP's tokenizer over single letters."""
    letters = "abcdefghijklmnopqrstuvwxyz "
    words = [*letters, *(f"{letter}</w>" for letter in letters)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return transformers.CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=12
    )


def clip(kind=transformers.CLIPTextModel, **options):
    config = transformers.CLIPTextConfig(
        vocab_size=56,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        projection_dim=16,
        max_position_embeddings=12,
        bos_token_id=54,
        eos_token_id=55,
        **options,
    )
    return randomized(kind(config))


def t5():
    config = transformers.T5Config(
        vocab_size=60, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=3
    )
    return randomized(transformers.T5EncoderModel(config))


def check(found, want):
    """To one part in ten thousand of the scale."""
    error = np.abs(np.asarray(found, np.float32) - want).max() / np.abs(want).max()
    assert error < 1e-4, f"differs by {error:.1e}"


def first(images):
    """[B, C, H, W] of torch as [B, H, W, C]."""
    return np.moveaxis(images.detach().numpy(), 1, -1)


def ours(folder, prompts, condition, noise, **fields):
    """Latents and images of a saved pipeline: of one prompt, for all of `noise`."""
    pipeline = load_pipeline(folder)
    if condition is not None:  # the prompt is a key of it
        rows = lambda prompts: [condition[prompt] for prompt in prompts]  # noqa: E731
        pipeline = dataclasses.replace(
            pipeline,
            encode=lambda prompts, size, guidance: dataclasses.replace(
                rows(prompts)[0],
                guidance_B=jnp.full((1,), guidance) if pipeline.guidance == "embedded" else None,
            ),
        )
    request = ImageRequest(
        prompt=prompts, count=len(noise), steps=STEPS, latents_BX=jnp.asarray(noise), **fields
    )
    job = plan(pipeline, request)
    latents = pipeline.run(job)
    return latents, pipeline.decode(latents), job


def stable_diffusion(tmp_path, scheduler, kind=diffusers.StableDiffusionPipeline):
    return kind(
        vae=randomized(diffusers.AutoencoderKL(**VAE)),
        text_encoder=clip(),
        tokenizer=tokenizer(tmp_path / "words"),
        unet=randomized(diffusers.UNet2DConditionModel(**UNET)),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


SCALED = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda: diffusers.DDIMScheduler(**SCALED, clip_sample=False, set_alpha_to_one=False),
        pytest.param(
            lambda: diffusers.DPMSolverMultistepScheduler(
                **SCALED, timestep_spacing="trailing", prediction_type="v_prediction"
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ddim", "dpm++ v"],
)
@torch.no_grad()
def test_stable_diffusion_with_its_texts(scheduler, tmp_path):
    theirs = stable_diffusion(tmp_path, scheduler())
    theirs.save_pretrained(tmp_path / "model")
    noise = normal(2, 8, 12, 4)
    latents, images, job = ours(
        tmp_path / "model", "a red fox", None, noise, size=(16, 24), guidance=4.0, negative="blue"
    )
    start = np.asarray(job.start_BX) / theirs.scheduler.init_noise_sigma
    given = {
        "prompt": "a red fox",
        "negative_prompt": "blue",
        "num_images_per_prompt": 2,
        "height": 16,
        "width": 24,
        "num_inference_steps": STEPS,
        "guidance_scale": 4.0,
    }
    theirs.set_progress_bar_config(disable=True)
    want = theirs(**given, latents=channels_first(start), output_type="latent").images
    check(latents, first(want))
    decoded = theirs.vae.decode(want / theirs.vae.config.scaling_factor).sample
    check(images, first(decoded))


@torch.no_grad()
def test_stable_diffusion_from_an_image(tmp_path):
    scheduler = diffusers.EulerDiscreteScheduler(**SCALED, timestep_spacing="trailing")
    theirs = stable_diffusion(tmp_path, scheduler, diffusers.StableDiffusionImg2ImgPipeline)
    theirs.save_pretrained(tmp_path / "model")
    noise, image = normal(1, 8, 8, 4), RNG.uniform(-1, 1, (16, 16, 3)).astype(np.float32)
    fields = {"size": (16, 16), "guidance": 4.0, "image": image, "strength": 0.5}
    latents, _, _ = ours(tmp_path / "model", "a fox", None, noise, **fields)
    # Its own noise comes from a generator, and its latents are drawn: both are given here.
    mean = theirs.vae.encode(channels_first(image[None])).latent_dist.mean
    scheduler.set_timesteps(STEPS)
    sigma = scheduler.sigmas[STEPS // 2]
    start = mean * theirs.vae.config.scaling_factor + sigma * channels_first(noise)
    theirs.prepare_latents = lambda *args, **options: start
    theirs.set_progress_bar_config(disable=True)
    want = theirs(
        prompt="a fox",
        image=channels_first((image[None] + 1) / 2),
        strength=0.5,
        num_inference_steps=STEPS,
        guidance_scale=4.0,
        output_type="latent",
    ).images
    check(latents, first(want))


@torch.no_grad()
def test_sdxl_with_its_texts(tmp_path):
    unet = {
        **UNET,
        "cross_attention_dim": 64,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 16,
        "use_linear_projection": True,
    }
    words = tokenizer(tmp_path / "words")
    theirs = diffusers.StableDiffusionXLPipeline(
        vae=randomized(diffusers.AutoencoderKL(**VAE)),
        text_encoder=clip(),
        text_encoder_2=clip(transformers.CLIPTextModelWithProjection, hidden_act="gelu"),
        tokenizer=words,
        tokenizer_2=words,
        unet=randomized(diffusers.UNet2DConditionModel(**unet)),
        scheduler=diffusers.EulerDiscreteScheduler(**SCALED, timestep_spacing="trailing"),
        add_watermarker=False,
    )
    theirs.save_pretrained(tmp_path / "model")
    noise = normal(1, 8, 12, 4)
    latents, _, _ = ours(tmp_path / "model", "a fox", None, noise, size=(16, 24), guidance=4.0)
    theirs.set_progress_bar_config(disable=True)
    want = theirs(
        prompt="a fox",
        height=16,
        width=24,
        latents=channels_first(noise),
        num_inference_steps=STEPS,
        guidance_scale=4.0,
        output_type="latent",
    ).images
    check(latents, first(want))


@torch.no_grad()
def test_dit(tmp_path):
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=1000,  # which its pipeline takes as no class
    )
    theirs = diffusers.DiTPipeline(
        randomized(transformer),
        randomized(diffusers.AutoencoderKL(**VAE)),
        diffusers.DDIMScheduler(clip_sample=False),
        id2label={3: "fox, red fox"},
    )
    theirs.register_to_config(id2label={3: "fox, red fox"})
    theirs.save_pretrained(tmp_path / "model")
    noise = normal(1, 8, 8, 4)
    _, images, job = ours(tmp_path / "model", "3", None, noise, guidance=4.0)
    theirs.set_progress_bar_config(disable=True)
    start = channels_first(np.asarray(job.start_BX))
    made = diffusers.pipelines.dit.pipeline_dit.randn_tensor
    diffusers.pipelines.dit.pipeline_dit.randn_tensor = lambda *args, **options: start
    try:
        want = theirs([3], guidance_scale=4.0, num_inference_steps=STEPS, output_type="np").images
    finally:
        diffusers.pipelines.dit.pipeline_dit.randn_tensor = made
    check((np.clip(images, -1, 1) + 1) / 2, want)


def sigmas():
    """Of a flow, before its shift."""
    return np.linspace(1, 1 / STEPS, STEPS)


@torch.no_grad()
def test_stable_diffusion_3(tmp_path):
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=12,
    )
    theirs = diffusers.StableDiffusion3Pipeline(
        transformer=randomized(transformer),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=randomized(diffusers.AutoencoderKL(**VAE, shift_factor=0.1, scaling_factor=1.5)),
        text_encoder=clip(transformers.CLIPTextModelWithProjection),
        tokenizer=tokenizer(tmp_path / "words"),
        text_encoder_2=clip(transformers.CLIPTextModelWithProjection),
        tokenizer_2=tokenizer(tmp_path / "words"),
        text_encoder_3=None,
        tokenizer_3=None,
    )
    theirs.save_pretrained(tmp_path / "model")
    text, pooled = normal(2, 6, 24), normal(2, 16)
    conditions = {
        name: Condition(text_BSD=jnp.asarray(text[i : i + 1]), pooled_BD=pooled[i : i + 1])
        for i, name in enumerate(["fox", None])
    }
    noise = normal(1, 8, 8, 4)
    latents, _, _ = ours(tmp_path / "model", "fox", conditions, noise, size=(16, 16), guidance=4.0)
    theirs.set_progress_bar_config(disable=True)
    given = [torch.from_numpy(each) for each in (text[:1], pooled[:1], text[1:], pooled[1:])]
    want = theirs(
        prompt_embeds=given[0],
        pooled_prompt_embeds=given[1],
        negative_prompt_embeds=given[2],
        negative_pooled_prompt_embeds=given[3],
        height=16,
        width=16,
        sigmas=sigmas(),
        latents=channels_first(noise),
        guidance_scale=4.0,
        output_type="latent",
    ).images
    check(latents, first(want))


@torch.no_grad()
def test_flux(tmp_path):
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=32,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    theirs = diffusers.FluxPipeline(
        transformer=randomized(transformer),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=randomized(diffusers.AutoencoderKL(**VAE, shift_factor=0.1, scaling_factor=0.4)),
        text_encoder=clip(),
        tokenizer=tokenizer(tmp_path / "words"),
        text_encoder_2=t5(),
        tokenizer_2=tokenizer(tmp_path / "words"),
    )
    theirs.save_pretrained(tmp_path / "model")
    text, pooled = normal(1, 6, 24), normal(1, 32)
    conditions = {"fox": Condition(text_BSD=jnp.asarray(text), pooled_BD=jnp.asarray(pooled))}
    noise = normal(1, 8, 12, 4)
    latents, _, _ = ours(tmp_path / "model", "fox", conditions, noise, size=(16, 24), guidance=3.5)
    packed = theirs._pack_latents(channels_first(noise), 1, 4, 8, 12)
    theirs.set_progress_bar_config(disable=True)
    want = theirs(
        prompt_embeds=torch.from_numpy(text),
        pooled_prompt_embeds=torch.from_numpy(pooled),
        height=16,
        width=24,
        num_inference_steps=STEPS,
        latents=packed,
        guidance_scale=3.5,
        output_type="latent",
    ).images
    check(latents, first(theirs._unpack_latents(want, 16, 24, theirs.vae_scale_factor)))


@pytest.mark.slow
@torch.no_grad()
def test_inpainting_with_a_network_that_is_told_the_mask(tmp_path):
    scheduler = diffusers.EulerDiscreteScheduler(**SCALED, timestep_spacing="trailing")
    theirs = diffusers.StableDiffusionInpaintPipeline(
        vae=randomized(diffusers.AutoencoderKL(**VAE)),
        text_encoder=clip(),
        tokenizer=tokenizer(tmp_path / "words"),
        unet=randomized(diffusers.UNet2DConditionModel(**UNET, in_channels=9)),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    theirs.save_pretrained(tmp_path / "model")
    noise, image = normal(1, 8, 8, 4), RNG.uniform(-1, 1, (16, 16, 3)).astype(np.float32)
    mask = np.zeros((16, 16), np.float32)
    mask[4:12] = 1
    fields = {"size": (16, 16), "guidance": 4.0, "image": image, "mask": mask}
    latents, _, _ = ours(tmp_path / "model", "a fox", None, noise, **fields)
    # Its latents of the picture are drawn: the mean is taken here.
    masked = image * (mask < 0.5)[:, :, None]
    mean = theirs.vae.encode(channels_first(masked[None])).latent_dist.mean
    theirs._encode_vae_image = lambda image, generator: mean * theirs.vae.config.scaling_factor
    theirs.set_progress_bar_config(disable=True)
    want = theirs(
        prompt="a fox",
        image=channels_first((image[None] + 1) / 2),
        mask_image=torch.from_numpy(mask)[None, None],
        height=16,
        width=16,
        latents=channels_first(noise),
        num_inference_steps=STEPS,
        guidance_scale=4.0,
        output_type="latent",
    ).images
    check(latents, first(want))


def unets_with_controls(tmp_path, xl, count):
    """A saved pipeline of Stable Diffusion or SDXL with ControlNets."""
    more = {
        "cross_attention_dim": 64,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 16,
        "use_linear_projection": True,
    }
    unet = randomized(diffusers.UNet2DConditionModel(**{**UNET, **(more if xl else {})}))
    made = [
        diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 16))
        for _ in range(count)
    ]
    controls = [randomized(one, seed=number) for number, one in enumerate(made, start=1)]
    words = tokenizer(tmp_path / "words")
    given = {
        "vae": randomized(diffusers.AutoencoderKL(**VAE)),
        "text_encoder": clip(),
        "tokenizer": words,
        "unet": unet,
        "controlnet": controls if count > 1 else controls[0],
        "scheduler": diffusers.EulerDiscreteScheduler(**SCALED, timestep_spacing="trailing"),
    }
    if xl:
        theirs = diffusers.StableDiffusionXLControlNetPipeline(
            **given,
            text_encoder_2=clip(transformers.CLIPTextModelWithProjection, hidden_act="gelu"),
            tokenizer_2=words,
            add_watermarker=False,
        )
    else:
        theirs = diffusers.StableDiffusionControlNetPipeline(
            **given, safety_checker=None, feature_extractor=None, requires_safety_checker=False
        )
    theirs.save_pretrained(tmp_path / "model")
    return theirs


@pytest.mark.parametrize(
    ("xl", "count"),
    [
        pytest.param(False, 2, marks=pytest.mark.slow),
        pytest.param(False, 1, marks=pytest.mark.exhaustive),
        pytest.param(True, 1, marks=pytest.mark.exhaustive),
    ],
)
@torch.no_grad()
def test_controlnets(tmp_path, xl, count):
    """Those of the folder, at scales of their own."""
    theirs = unets_with_controls(tmp_path, xl, count)
    noise, images = normal(1, 8, 8, 4), RNG.uniform(0, 1, (count, 16, 16, 3)).astype(np.float32)
    scales = [0.5, 1.5][:count]
    pipeline = with_controls(load_pipeline(tmp_path / "model"), (), scales)
    request = ImageRequest(
        prompt="a fox",
        steps=STEPS,
        latents_BX=jnp.asarray(noise),
        size=(16, 16),
        guidance=4.0,
        controls=tuple(images),
    )
    latents = pipeline.run(plan(pipeline, request))
    theirs.set_progress_bar_config(disable=True)
    given = [channels_first(image[None]) for image in images]
    want = theirs(
        prompt="a fox",
        image=given if count > 1 else given[0],
        controlnet_conditioning_scale=scales if count > 1 else scales[0],
        height=16,
        width=16,
        latents=channels_first(noise),
        num_inference_steps=STEPS,
        guidance_scale=4.0,
        output_type="latent",
    ).images
    check(latents, first(want))


@pytest.mark.exhaustive
@torch.no_grad()
def test_controlnet_from_an_image(tmp_path):
    made = unets_with_controls(tmp_path, False, 1)
    theirs = diffusers.StableDiffusionControlNetImg2ImgPipeline(
        **made.components, requires_safety_checker=False
    )
    theirs.save_pretrained(tmp_path / "image")
    noise, image = normal(1, 8, 8, 4), RNG.uniform(-1, 1, (16, 16, 3)).astype(np.float32)
    edges = RNG.uniform(0, 1, (16, 16, 3)).astype(np.float32)
    fields = {"size": (16, 16), "guidance": 4.0, "image": image, "strength": 0.5}
    latents, _, _ = ours(tmp_path / "image", "a fox", None, noise, controls=(edges,), **fields)
    # Its own noise comes from a generator, and its latents are drawn: both are given here.
    mean = theirs.vae.encode(channels_first(image[None])).latent_dist.mean
    theirs.scheduler.set_timesteps(STEPS)
    sigma = theirs.scheduler.sigmas[STEPS // 2]
    start = mean * theirs.vae.config.scaling_factor + sigma * channels_first(noise)
    theirs.prepare_latents = lambda *args, **options: start
    theirs.set_progress_bar_config(disable=True)
    want = theirs(
        prompt="a fox",
        image=channels_first((image[None] + 1) / 2),
        control_image=channels_first(edges[None]),
        controlnet_conditioning_scale=1.0,
        strength=0.5,
        num_inference_steps=STEPS,
        guidance_scale=4.0,
        output_type="latent",
    ).images
    check(latents, first(want))
