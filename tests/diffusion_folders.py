"""Tiny folders of diffusers with random weights, as their pipelines save them."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fornax.diffusion.models import COMPONENTS, files

VAE = {
    "block_out_channels": [8, 16],
    "norm_num_groups": 4,
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "layers_per_block": 1,
    "sample_size": 16,
}
UNET = {
    "block_out_channels": [16],
    "norm_num_groups": 8,
    "down_block_types": ["CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D"],
    "cross_attention_dim": 32,
    "attention_head_dim": 4,
    "layers_per_block": 1,
    "sample_size": 8,
}
CLIP = {
    "vocab_size": 56,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "projection_dim": 16,
    "max_position_embeddings": 12,
    "bos_token_id": 54,
    "eos_token_id": 55,
}
CLIP_VISION = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
T5 = {"vocab_size": 60, "d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 3}
BETAS = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
}
SDXL = {
    **UNET,
    "cross_attention_dim": 64,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + 16,
    "use_linear_projection": True,
}
DIT = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "num_layers": 3,
    "sample_size": 8,
    "num_embeds_ada_norm": 10,
}
SD3 = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 72,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 32,
    "out_channels": 4,
    "pos_embed_max_size": 12,
}
FLUX = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 32,
    "guidance_embeds": True,
    "axes_dims_rope": [4, 6, 6],
}
WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 24,
    "freq_dim": 16,
    "ffn_dim": 24,
    "num_layers": 1,
}
WAN_VAE = {
    "base_dim": 4,
    "z_dim": 4,
    "dim_mult": [1, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True],
    "latents_mean": [0.1, 0.2, 0.3, 0.4],
    "latents_std": [1.5, 1.4, 1.3, 1.2],
    "scale_factor_spatial": 2,
    "scale_factor_temporal": 2,
}
UNIPC = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "sd": {
        "pipeline": "StableDiffusionPipeline",
        "unet": ("UNet2DConditionModel", UNET),
        "text_encoder": ("CLIPTextModel", CLIP),
        "scheduler": ("DDIMScheduler", BETAS),
    },
    "sdxl": {
        "pipeline": "StableDiffusionXLPipeline",
        "unet": ("UNet2DConditionModel", SDXL),
        "text_encoder": ("CLIPTextModel", CLIP),
        "text_encoder_2": ("CLIPTextModelWithProjection", CLIP),
        "scheduler": ("EulerDiscreteScheduler", {**BETAS, "prediction_type": "v_prediction"}),
    },
    "sd3": {
        "pipeline": "StableDiffusion3Pipeline",
        "transformer": ("SD3Transformer2DModel", SD3),
        "text_encoder": ("CLIPTextModelWithProjection", CLIP),
        "text_encoder_2": ("CLIPTextModelWithProjection", CLIP),
        "scheduler": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    },
    "flux": {
        "pipeline": "FluxPipeline",
        "transformer": ("FluxTransformer2DModel", FLUX),
        "text_encoder": ("CLIPTextModel", CLIP),
        "text_encoder_2": ("T5EncoderModel", T5),
        "scheduler": ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}),
    },
    "wan": {
        "pipeline": "WanPipeline",
        "transformer": ("WanTransformer3DModel", WAN),
        "text_encoder": ("UMT5EncoderModel", T5),
        "vae": ("AutoencoderKLWan", WAN_VAE),
        "scheduler": ("UniPCMultistepScheduler", UNIPC),
    },
}
FAMILIES["wan-first"] = {  # 2.1 from a first frame: its mask and latents beside, and CLIP's states
    **FAMILIES["wan"],
    "pipeline": "WanImageToVideoPipeline",
    "transformer": (
        "WanTransformer3DModel",
        {**WAN, "in_channels": 10, "image_dim": 8, "added_kv_proj_dim": 24},
    ),
    "image_encoder": ("CLIPVisionModel", CLIP_VISION),
}


def write_tokenizer(folder: Path) -> None:
    """CLIP's over single letters, which T5 is given too."""
    letters = "abcdefghijklmnopqrstuvwxyz "
    words = [*letters, *(f"{letter}</w>" for letter in letters)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")


def write_component(folder: Path, name: str, values: dict[str, Any], seed: int = 0) -> None:
    """A network of a class with random weights everywhere: fresh ones have zeros."""
    component, rng = COMPONENTS[name], np.random.default_rng(seed)
    config = component.read(files.Fields(values, name))
    made = nnx.eval_shape(
        lambda: component.make(
            config, rngs=nnx.Rngs(0), dtype=jnp.float32, compute_dtype=jnp.float32
        )
    )
    graph, state = nnx.split(made)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if len(leaf.shape) < 2 or "norm" in str(path):
            return np.float32(0.1 * rng.normal(size=leaf.shape) + ("scale" in str(path)))
        inputs = np.prod(leaf.shape[:-1])
        return np.float32(rng.normal(size=leaf.shape) * inputs**-0.5)

    drawn = jax.tree_util.tree_map_with_path(draw, state)
    files.save(component, nnx.merge(graph, jax.tree.map(jnp.asarray, drawn)), folder)


def write_folder(folder: Path, family: str, **vae: Any) -> Path:
    """A pipeline of `FAMILIES`; keywords are keys of its autoencoder's config."""
    folder.mkdir(parents=True)
    parts = dict(FAMILIES[family])
    index: dict[str, Any] = {"_class_name": parts.pop("pipeline")}
    scheduler, values = parts.pop("scheduler")
    (folder / "scheduler").mkdir()
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({"_class_name": scheduler, **values}))
    index["scheduler"] = ["diffusers", scheduler]
    parts.setdefault("vae", ("AutoencoderKL", {**VAE, **vae}))
    for number, (name, (kind, config)) in enumerate(parts.items()):
        write_component(folder / name, kind, config, number)
        index[name] = ["diffusers", kind]
        if name == "image_encoder":
            (folder / "image_processor").mkdir()
            (folder / "image_processor" / "preprocessor_config.json").write_text("{}")
            index["image_processor"] = ["transformers", "CLIPImageProcessor"]
        if name.startswith("text_encoder"):
            tokenizer = name.replace("text_encoder", "tokenizer")
            write_tokenizer(folder / tokenizer)
            index[tokenizer] = ["transformers", "CLIPTokenizer"]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
