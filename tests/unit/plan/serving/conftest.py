"""Small models to serve, as config.json and in memory."""

import json
from pathlib import Path
from typing import Any

import pytest

from fornax.models import (
    DecoderConfig,
    ExpertsConfig,
    GatedDeltaConfig,
    LatentConfig,
    RopeConfig,
    config_to_hf,
)
from fornax.models.config import GlobalHeads, LayerInputConfig
from fornax.models.mamba_config import Mamba2Config

_SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
}

MODELS = {
    "llama": DecoderConfig(**_SIZES),
    "tied": DecoderConfig(**{**_SIZES, "num_kv_heads": 2}, tie_embeddings=True),
    "windowed": DecoderConfig(
        **_SIZES, sliding_window=24, attention_pattern=("sliding", "sliding", "full", "sliding")
    ),
    "experts": DecoderConfig(
        **_SIZES,
        experts=ExpertsConfig(
            num_experts=8,
            experts_per_token=2,
            intermediate_size=48,
            shared_intermediate_size=96,
        ),
        mlp_pattern=("mlp", "experts"),
    ),
    "latent": DecoderConfig(
        **{**_SIZES, "num_kv_heads": None, "head_dim": None},
        rope=RopeConfig(interleaved=True),
        latent=LatentConfig(
            key_value_rank=40, query_rank=24, unrotated_dim=16, rotated_dim=8, value_dim=16
        ),
        experts=ExpertsConfig(
            num_experts=8,
            experts_per_token=2,
            intermediate_size=48,
            score="sigmoid",
            normalize_eps=1e-20,
            selection_bias=True,
            shared_intermediate_size=48,
        ),
        mlp_pattern=("mlp", "experts", "experts", "experts"),
    ),
    "linear": DecoderConfig(
        **_SIZES,
        attention_pattern=("linear", "full"),
        gated_delta=GatedDeltaConfig(
            num_key_heads=4, num_value_heads=8, key_dim=16, value_dim=24, conv_width=3
        ),
        attention_gate=True,
    ),
    "mamba": DecoderConfig(
        **_SIZES,
        attention_pattern=("linear", "full"),
        mamba2=Mamba2Config(num_heads=8, head_dim=12, state_dim=16, num_groups=2),
        mlp_pattern=("none", "mlp"),
        rope_pattern=(False,),
    ),
    "pageless": DecoderConfig(
        **_SIZES,
        attention_pattern=("linear",),
        mamba2=Mamba2Config(num_heads=8, head_dim=12, state_dim=16),
        mlp_pattern=("none",),
    ),
    "shared": DecoderConfig(
        **_SIZES,
        sliding_window=24,
        attention_pattern=("sliding", "full"),
        global_heads=GlobalHeads(head_dim=32, num_kv_heads=2, keys_as_values=True),
        shared_kv_layers=2,
        wide_shared_mlp=True,
        layer_inputs=LayerInputConfig(vocab_size=400, width=8),
        layer_scale=True,
        value_norm=True,
    ),
}


def write_config(folder: Path, config: DecoderConfig, **more: Any) -> Path:
    """A directory with nothing but config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config_to_hf(config), **more}))
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A small Llama without weights."""
    return write_config(tmp_path / "llama", MODELS["llama"], torch_dtype="bfloat16")
