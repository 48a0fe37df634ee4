"""Small random models of several families, with a tokenizer, as Hugging Face directories."""

from pathlib import Path

import jax
from flax import nnx

from fornax.data import train_bpe
from fornax.models import Decoder, DecoderConfig, RopeConfig, create_decoder, save_pretrained

__all__ = ["CONFIGS", "TEXT", "make"]

TEXT = "the quick brown fox jumps over the lazy dog, and then it sleeps for 1234567890 days. "

_SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "scale_residual_init": False,
    "eos_token_ids": (0,),
    "bos_token_id": 1,
    "pad_token_id": 2,
}

CONFIGS = {
    "llama": DecoderConfig(**_SIZES, num_layers=3),
    "qwen3": DecoderConfig(**_SIZES, num_layers=2, head_dim=24, qk_norm="head"),
    "gemma2": DecoderConfig(
        **_SIZES,
        num_layers=4,
        head_dim=16,
        norm_placement="sandwich",
        norm_unit_offset=True,
        scale_embeddings=True,
        activation="gelu_tanh",
        attention_logit_softcap=30.0,
        final_logit_softcap=20.0,
        query_pre_attn_scalar=16.0,
        sliding_window=6,
        attention_pattern=("sliding", "full"),
        rope=RopeConfig(theta=10_000.0),
    ),
}


def make(name: str, folder: Path) -> Path:
    """Write the model called `name`; returns the directory."""
    tokenizer = train_bpe([TEXT * 20], 300)
    tokenizer.save(folder / "tokenizer")
    save_pretrained(
        _drawn(create_decoder(CONFIGS[name], seed=3)), folder / name, folder / "tokenizer"
    )
    return folder / name


def _drawn(model: Decoder) -> Decoder:
    """The model with norms and biases drawn too, and no two tokens' embeddings alike."""
    graphdef, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(4), len(leaves))
    drawn = [
        leaf + 0.1 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return nnx.merge(graphdef, jax.tree.unflatten(tree, drawn))
