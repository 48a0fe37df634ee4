"""Pipelines whose prompts one T5 or language model reads, by text, beside diffusers' own.

Tiny random models, saved and read; diffusers starts from the same latents. What decodes is compared
too.
"""

import string

import diffusers
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.numpy import load_file
from tests.parity.diffusion_models import channels_first, randomized
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from fornax.adapters import LoRA
from fornax.diffusion.config import DiffusionTuneConfig, SampleConfig
from fornax.diffusion.data import ImagesConfig
from fornax.diffusion.models import load_component
from fornax.diffusion.pipelines import (
    ImageRequest,
    load_pipeline,
    plan,
    save_pipeline,
    with_denoiser,
)
from fornax.diffusion.sampling import row_noise
from fornax.diffusion.tuning import tune
from fornax.mesh import MeshConfig
from fornax.optim import Constant, OptimConfig

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
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def tokenizer(*, chat=None, begins=False):
    """Bytes as tokens, with the special ones of a conversation."""
    special = ["<pad>", "<bos>", "<|im_start|>", "<|im_end|>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(special)
    if begins:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 1)]
        )
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    made.chat_template = chat
    return made


LLM = {
    "vocab_size": 260,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 3,
    "pad_token_id": 0,
}


def qwen3(layers=3):
    config = transformers.Qwen3Config(**{**LLM, "num_hidden_layers": layers})
    return randomized(transformers.Qwen3ForCausalLM(config))


def drawn(folder, prompt, noise, **fields):
    """A saved pipeline, the images that it draws, and the latents that it starts from."""
    pipeline = load_pipeline(folder)
    request = ImageRequest(
        prompt=prompt, count=len(noise), steps=STEPS, latents_BX=jnp.asarray(noise), **fields
    )
    job = plan(pipeline, request)
    images = np.asarray(pipeline.decode(pipeline.run(job)))
    return pipeline, images, np.asarray(job.start_BX)


def check(found, want):
    """To one part in ten thousand of the scale."""
    want = np.asarray(want)
    assert found.shape == want.shape
    error = np.abs(np.asarray(found, np.float32) - want).max() / np.abs(want).max()
    assert error < 1e-4, f"differs by {error:.1e}"


def pictures(theirs, **options):
    """What diffusers draws, [B, H, W, C] in [-1, 1] as far as it clips."""
    theirs.set_progress_bar_config(disable=True)
    found = theirs(num_inference_steps=STEPS, output_type="np", **options).images
    return found * 2 - 1


def kl(vae):
    """An image [1, 3, H, W] to mean and deviation of the latents that a denoiser is given."""

    def encode(image):
        found, shift = vae.encode(image).latent_dist, vae.config.shift_factor or 0.0
        scale = vae.config.scaling_factor
        return (found.mean - shift) * scale, found.std * scale

    return encode


def pixart_sigma():
    theirs = diffusers.PixArtSigmaPipeline(**pixart())
    return theirs, kl(theirs.vae)


def pixart():
    pieces = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>", "▁")]
    pieces += [(letter, -3.0) for letter in string.ascii_lowercase]
    config = transformers.T5Config(
        vocab_size=len(pieces), d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=3
    )
    transformer = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        cross_attention_dim=16,
        caption_channels=24,
    )
    return {
        "tokenizer": transformers.T5Tokenizer(vocab=pieces, extra_ids=0),
        "text_encoder": randomized(transformers.T5EncoderModel(config)),
        "vae": randomized(diffusers.AutoencoderKL(**VAE)),
        "transformer": randomized(transformer),
        "scheduler": diffusers.DPMSolverMultistepScheduler(beta_schedule="linear"),
    }


@torch.no_grad()
def test_pixart(tmp_path):
    """Sigma with its longer prompts; then diffusers draws with what we write."""
    theirs = diffusers.PixArtSigmaPipeline(**pixart())
    theirs.save_pretrained(tmp_path / "model")
    noise = normal(1, 8, 12, 4)
    fields = {"size": (16, 24), "guidance": 4.0, "negative": "blue"}
    pipeline, images, _ = drawn(tmp_path / "model", " A red Fox ", noise, **fields)
    given = {
        "prompt": " A red Fox ",
        "negative_prompt": "blue",
        "height": 16,
        "width": 24,
        "latents": channels_first(noise),
        "guidance_scale": 4.0,
        "use_resolution_binning": False,
    }
    check(np.clip(images, -1, 1), pictures(theirs, **given))
    save_pipeline(pipeline, tmp_path / "again")
    again = diffusers.PixArtSigmaPipeline.from_pretrained(tmp_path / "again")
    check(np.clip(images, -1, 1), pictures(again, **given))


def of_sana(kind, scheduler, **options):
    """A pipeline of Sana's parts."""
    kinds = ("ResBlock", "EfficientViTBlock")
    vae = diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=4,
        encoder_block_types=kinds,
        decoder_block_types=kinds,
        encoder_block_out_channels=(8, 16),
        decoder_block_out_channels=(8, 16),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.4,
    )
    transformer = diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=8,
        **options,
    )
    config = transformers.Gemma2Config(
        **LLM, query_pre_attn_scalar=8, sliding_window=4096, attn_implementation="eager"
    )
    return kind(
        tokenizer=tokenizer(begins=True),
        text_encoder=randomized(transformers.Gemma2Model(config)),
        vae=randomized(vae),
        transformer=randomized(transformer),
        scheduler=scheduler,
    )


def sana():
    theirs = of_sana(
        diffusers.SanaPipeline,
        diffusers.DPMSolverMultistepScheduler(
            use_flow_sigmas=True, flow_shift=3.0, prediction_type="flow_prediction"
        ),
    )

    def encode(image):
        return theirs.vae.encode(image).latent * 0.4, None

    return theirs, encode


@pytest.mark.slow
@torch.no_grad()
def test_sana(tmp_path):
    """The prompt comes after an instruction, the negative one does not."""
    theirs, _ = sana()
    theirs.save_pretrained(tmp_path / "model")
    noise = normal(1, 32, 64, 4)
    fields = {"size": (64, 128), "guidance": 4.0, "negative": "blue"}
    _, images, start = drawn(tmp_path / "model", "A red fox", noise, **fields)
    want = pictures(
        theirs,
        prompt="A red fox",
        negative_prompt="blue",
        height=64,
        width=128,
        latents=channels_first(start),
        guidance_scale=4.0,
        use_resolution_binning=False,
    )
    check(np.clip(images, -1, 1), want)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("steps", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_sana_sprint(tmp_path, monkeypatch, steps):
    """Angles of two steps are its own; between steps both add the same fresh noise."""
    theirs = of_sana(
        diffusers.SanaSprintPipeline,
        diffusers.SCMScheduler(),
        guidance_embeds=True,
        timestep_scale=1000.0,
        qk_norm="rms_norm_across_heads",
    )
    theirs.save_pretrained(tmp_path)
    noise = normal(1, 32, 64, 4)
    pipeline = load_pipeline(tmp_path)
    request = ImageRequest(
        prompt="A red fox",
        steps=steps,
        size=(64, 128),
        guidance=4.0,
        latents_BX=jnp.asarray(noise),
    )
    job = plan(pipeline, request)
    latents = np.moveaxis(np.asarray(pipeline.run(job)), -1, 1)
    fresh = iter(
        channels_first(np.asarray(row_noise(job.keys, jnp.full(1, i), noise.shape, jnp.float32)))
        for i in range(steps)
    )
    monkeypatch.setattr(
        diffusers.schedulers.scheduling_scm, "randn_tensor", lambda *a, **k: next(fresh)
    )
    theirs.set_progress_bar_config(disable=True)
    want = theirs(
        prompt="A red fox",
        num_inference_steps=steps,
        intermediate_timesteps=1.3 if steps == 2 else None,
        height=64,
        width=128,
        latents=channels_first(noise),
        guidance_scale=4.0,
        use_resolution_binning=False,
        output_type="latent",
    ).images
    check(latents, want)


def flow(**options):
    return diffusers.FlowMatchEulerDiscreteScheduler(**options)


def qwen_image():
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    text = {key: value for key, value in LLM.items() if key != "head_dim"}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**text, "rope_scaling": rope},
        vision_config={**vision, "out_hidden_size": 16},
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
    )
    vae = randomized(vae)
    theirs = diffusers.QwenImagePipeline(
        scheduler=flow(use_dynamic_shifting=True, shift_terminal=0.02, max_shift=0.9),
        vae=vae,
        text_encoder=randomized(transformers.Qwen2_5_VLForConditionalGeneration(config)),
        tokenizer=tokenizer(),
        transformer=randomized(transformer),
    )

    mean, deviation = (
        torch.tensor(values).view(1, -1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )

    def encode(image):
        found = vae.encode(image[:, :, None]).latent_dist
        return (found.mean[:, :, 0] - mean) / deviation, found.std[:, :, 0] / deviation

    return theirs, encode


@pytest.mark.slow
@torch.no_grad()
def test_qwen_image(tmp_path):
    theirs, _ = qwen_image()
    theirs.save_pretrained(tmp_path / "model")
    noise = normal(1, 8, 12, 4)
    _, images, _ = drawn(tmp_path / "model", "A red fox", noise, size=(16, 24), guidance=4.0)
    want = pictures(
        theirs,
        prompt="A red fox",
        negative_prompt=" ",
        height=16,
        width=24,
        latents=theirs._pack_latents(channels_first(noise), 1, 4, 8, 12),
        true_cfg_scale=4.0,
    )
    check(images, want)


def z_image():
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[4, 6, 6],
        axes_lens=[1024, 512, 512],
    )
    theirs = diffusers.ZImagePipeline(
        scheduler=flow(shift=3.0),
        vae=randomized(diffusers.AutoencoderKL(**VAE, shift_factor=0.1, scaling_factor=0.4)),
        text_encoder=qwen3(),
        tokenizer=tokenizer(chat=CHAT),
        transformer=randomized(transformer),
    )
    return theirs, kl(theirs.vae)


@torch.no_grad()
def test_z_image(tmp_path):
    """Its scale of guidance counts from the prompt, ours from the empty one.

    Then it is written with another network in its transformer's place.
    """
    theirs, _ = z_image()
    theirs.save_pretrained(tmp_path / "model")
    noise = normal(1, 8, 12, 4)
    pipeline, images, _ = drawn(tmp_path / "model", "A red fox", noise, size=(16, 24), guidance=4.0)
    want = pictures(
        theirs,
        prompt="A red fox",
        height=16,
        width=24,
        latents=channels_first(noise),
        guidance_scale=3.0,
    )
    check(np.clip(images, -1, 1), want)
    other = randomized(theirs.transformer, seed=1)
    other.save_pretrained(tmp_path / "other")
    network = load_component(tmp_path / "other")
    save_pipeline(with_denoiser(pipeline, network), tmp_path / "again")
    again = diffusers.ZImagePipeline.from_pretrained(tmp_path / "again")
    for name, want in theirs.components.items():
        if isinstance(want, torch.nn.Module):
            found = again.components[name].state_dict()
            for key, tensor in want.state_dict().items():
                torch.testing.assert_close(found[key], tensor, rtol=0, atol=0)
    assert again.scheduler.config.shift == 3.0
    assert again.tokenizer("a fox").input_ids == theirs.tokenizer("a fox").input_ids


def ovis_image():
    transformer = diffusers.OvisImageTransformer2DModel(
        in_channels=16,
        out_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    theirs = diffusers.OvisImagePipeline(
        scheduler=flow(use_dynamic_shifting=True),
        vae=randomized(diffusers.AutoencoderKL(**VAE, shift_factor=0.1, scaling_factor=0.4)),
        text_encoder=randomized(transformers.Qwen3Model(transformers.Qwen3Config(**LLM))),
        tokenizer=tokenizer(chat=CHAT),
        transformer=randomized(transformer),
    )
    return theirs, kl(theirs.vae)


@torch.no_grad()
def test_ovis_image(tmp_path):
    """By text, of which padding is a part."""
    theirs, _ = ovis_image()
    theirs.save_pretrained(tmp_path / "model")
    noise = normal(1, 8, 12, 4)
    _, images, _ = drawn(tmp_path / "model", "A red fox", noise, size=(16, 24), guidance=4.0)
    want = pictures(
        theirs,
        prompt="A red fox",
        height=16,
        width=24,
        latents=theirs._pack_latents(channels_first(noise), 1, 4, 8, 12),
        guidance_scale=4.0,
    )
    check(np.clip(images, -1, 1), want)


def flux2_klein():
    vae = randomized(diffusers.AutoencoderKLFlux2(**VAE, latent_channels=4))
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.2, 2.0)
    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    theirs = diffusers.Flux2KleinPipeline(
        scheduler=flow(use_dynamic_shifting=True),
        vae=vae,
        text_encoder=qwen3(layers=28),
        tokenizer=tokenizer(chat=CHAT),
        transformer=randomized(transformer),
    )

    def encode(image):
        found = vae.encode(image).latent_dist
        scale = (vae.bn.running_var + vae.config.batch_norm_eps) ** 0.5
        mean, std = (theirs._patchify_latents(each) for each in (found.mean, found.std))
        shift, scale = vae.bn.running_mean.view(1, -1, 1, 1), scale.view(1, -1, 1, 1)
        return (mean - shift) / scale, std / scale

    return theirs, encode


@pytest.mark.slow
@torch.no_grad()
def test_flux2_klein(tmp_path):
    theirs, _ = flux2_klein()
    theirs.save_pretrained(tmp_path / "model")
    noise = normal(1, 4, 6, 16)
    _, images, _ = drawn(tmp_path / "model", "A red fox", noise, size=(16, 24), guidance=4.0)
    want = pictures(
        theirs,
        prompt="A red fox",
        height=16,
        width=24,
        latents=channels_first(noise),
        guidance_scale=4.0,
    )
    check(np.clip(images, -1, 1), want)


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [pixart_sigma, sana, qwen_image, z_image, ovis_image, flux2_klein])
@torch.no_grad()
def test_each_is_tuned_on_the_latents_of_its_autoencoder(make, tmp_path):
    """A step of adapters on one photo; of its latents mean and deviation are diffusers'."""
    theirs, encode = make()
    theirs.save_pretrained(tmp_path / "model")
    side = 4 * load_pipeline(tmp_path / "model").multiple
    pixels = RNG.integers(0, 256, (side, side, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    data = ImagesConfig(
        path=str(tmp_path / "a.png"), prompt="a fox", resolution=side, multiple=side, threads=1
    )
    config = DiffusionTuneConfig(
        model=str(tmp_path / "model"),
        data=data,
        lora=LoRA(rank=2),
        batch_size=1,
        steps=1,
        optim=OptimConfig(learning_rate=1e-2, schedule=Constant()),
        sample=SampleConfig(every=1, count=1, steps=1),
        mesh=MeshConfig(data=1),
    )
    result = tune(config, tmp_path / "run", progress="none")
    assert np.isfinite(result.metrics["loss"])
    assert result.metrics["grad_norm"] > 0
    stored = [load_file(file) for file in (tmp_path / "run" / "encoded").rglob("*.safetensors")]
    (kept,) = (arrays for arrays in stored if "mean" in arrays)
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1
    for name, want in zip(("mean", "deviation"), encode(image), strict=True):
        assert (name in kept) == (want is not None)
        if want is not None:
            check(kept[name], want[0].permute(1, 2, 0))
    assert (tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors").is_file()
