"""Small configs of each family, and a way to run some groups of checks in this process."""

from collections.abc import Callable
from typing import Any

import pytest

from fornax.config import from_mapping
from fornax.preflight import Report
from fornax.preflight.run import check
from fornax.train import TrainConfig

LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope": {
        "theta": 500000.0,
        "scaling": {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}
QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_layers": 28,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "qk_norm": "head",
    "tie_embeddings": True,
    "max_position_embeddings": 40960,
}
GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_layers": 34,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 256,
    "qk_norm": "head",
    "tie_embeddings": True,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "attention_pattern": ["sliding"] * 5 + ["full"],
    "rope": {"theta": 1e6, "scaling": {"type": "linear", "factor": 8.0}},
    "local_rope": {"theta": 1e4},
    "norm_placement": "sandwich",
    "norm_unit_offset": True,
    "scale_embeddings": True,
    "activation": "gelu_tanh",
    "query_pre_attn_scalar": 256.0,
}
EXPERTS = {
    **QWEN3,
    "num_layers": 12,
    "mlp_pattern": ["mlp"] + 11 * ["experts"],
    "experts": {
        "num_experts": 64,
        "experts_per_token": 6,
        "intermediate_size": 512,
        "score": "sigmoid",
        "normalize_eps": 1e-20,
        "scale": 2.5,
        "selection_bias": True,
        "num_groups": 8,
        "groups_per_token": 4,
        "group_score": "top2",
        "shared_intermediate_size": 512,
        "balance_loss": 0.01,
        "router_z_loss": 0.001,
    },
}
LATENT = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_layers": 61,
    "num_heads": 128,
    "max_position_embeddings": 163840,
    "rope": {
        "interleaved": True,
        "scaling": {
            "type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "query_scaling": {"beta": 0.1, "length": 4096},
    "latent": {
        "key_value_rank": 512,
        "query_rank": 1536,
        "unrotated_dim": 128,
        "rotated_dim": 64,
        "value_dim": 128,
    },
}


GATED_DELTA = {
    **QWEN3,
    "num_layers": 8,
    "attention_pattern": ["linear", "linear", "linear", "full"],
    "gated_delta": {"num_key_heads": 16, "num_value_heads": 32, "key_dim": 128, "value_dim": 128},
    "attention_gate": True,
    "norm_unit_offset": True,
    "rope": {"theta": 1e7, "fraction": 0.25},
}
MAMBA2 = {
    **QWEN3,
    "num_layers": 6,
    "attention_pattern": ["linear", "linear", "full"],
    "mamba2": {"num_heads": 48, "head_dim": 64, "state_dim": 128},
    "mlp_pattern": ["mlp", "none", "mlp"],
    "rope_pattern": [False],
    "residual_multiplier": 0.22,
}
GEMMA4 = {
    **GEMMA3,
    "num_layers": 8,
    "attention_pattern": ["sliding", "full"],
    "rope": {"theta": 1e6, "fraction": 0.25},
    "norm_unit_offset": False,
    "query_pre_attn_scalar": 1.0,
    "global_heads": {"head_dim": 512, "num_kv_heads": 1, "keys_as_values": True},
    "shared_kv_layers": 4,
    "wide_shared_mlp": True,
    "layer_inputs": {"vocab_size": 262208, "width": 256},
    "layer_scale": True,
    "value_norm": True,
}


def configure(model: dict[str, Any], **changes: Any) -> TrainConfig:
    """A run on a pod slice that uses everything a preflight looks at."""
    settings: dict[str, Any] = {
        "model": model,
        "seq_len": 8192,
        "batch_size": 512,
        "accumulate": 2,
        "remat": "dots",
        "z_loss": 1e-4,
        "dtypes": {"params": "float32", "compute": "bfloat16"},
        "mesh": {"fsdp": -1, "tensor": 4},
        "data": {"virtual_shards": 64},
        "optim": {"schedule": {"type": "cosine", "warmup_steps": 100}},
    }
    return from_mapping(TrainConfig, {**settings, **changes})


RunChecks = Callable[..., Report]


@pytest.fixture
def run_checks() -> RunChecks:
    """Run groups of checks of a shallow Qwen3, with keys changed."""

    def run(*groups: str, model: dict[str, Any] | None = None, **changes: Any) -> Report:
        model = {**QWEN3, "num_layers": 2} if model is None else model
        return check(configure(model, **changes), quick=True, only=groups)  # pyrefly: ignore

    return run
