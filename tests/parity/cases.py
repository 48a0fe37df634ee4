"""Small configurations of every family and of every option that its released configs use."""

from typing import Any

import transformers as hf

__all__ = ["CASES", "GENERATION_CASES", "UNPACKED", "build"]

_BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_CLASSES: dict[str, Any] = {
    "llama": hf.LlamaConfig,
    "llama4": hf.Llama4TextConfig,
    "mistral": hf.MistralConfig,
    "qwen2": hf.Qwen2Config,
    "qwen3": hf.Qwen3Config,
    "gemma2": hf.Gemma2Config,
    "gemma3": hf.Gemma3TextConfig,
    "gemma4": hf.Gemma4TextConfig,
    "olmo2": hf.Olmo2Config,
    "olmo3": hf.Olmo3Config,
    "glm4": hf.Glm4Config,
    "ministral3": hf.Ministral3Config,
    "phi3": hf.Phi3Config,
    "smollm3": hf.SmolLM3Config,
    "mixtral": hf.MixtralConfig,
    "qwen2_moe": hf.Qwen2MoeConfig,
    "qwen3_moe": hf.Qwen3MoeConfig,
    "olmoe": hf.OlmoeConfig,
    "gpt_oss": hf.GptOssConfig,
    "deepseek_v2": hf.DeepseekV2Config,
    "deepseek_v3": hf.DeepseekV3Config,
    "glm4_moe": hf.Glm4MoeConfig,
    "glm4_moe_lite": hf.Glm4MoeLiteConfig,
    "minimax_m2": hf.MiniMaxM2Config,
    "mistral4": hf.Mistral4Config,
    "qwen3_next": hf.Qwen3NextConfig,
    "qwen3_5": hf.Qwen3_5TextConfig,
    "qwen3_5_moe": hf.Qwen3_5MoeTextConfig,
    "granite": hf.GraniteConfig,
    "granitemoe": hf.GraniteMoeConfig,
    "granitemoeshared": hf.GraniteMoeSharedConfig,
    "granitemoehybrid": hf.GraniteMoeHybridConfig,
    "mamba2": hf.Mamba2Config,
}


def _rope(kind: str, **keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **keys}}


def _rope_by_kind() -> dict[str, Any]:
    """YaRN on the full layers alone."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    base = {"rope_theta": 500.0}
    return {
        "rope_parameters": {
            "full_attention": {**base, **yarn, "attention_factor": 1.2},
            "sliding_attention": {**base, "rope_type": "default"},
        }
    }


_LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LONG = {
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.5],
}
_GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 5,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
_GEMMA3 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 12,
    "sliding_window": 5,
    "num_hidden_layers": 8,
}

_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_QWEN2_MOE = {**_EXPERTS, "shared_expert_intermediate_size": 40}

_MINISTRAL3 = {
    "factor": 4.0,
    "original_max_position_embeddings": 9,
    "max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
_GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 6}
_ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
    "n_group": 4,
    "topk_group": 2,
}
_LATENT = {
    **_ROUTED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}
_DEEPSEEK_YARN = {
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "mscale": 1.0,
}
_LLAMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 56,
    "num_local_experts": 4,
    "attention_chunk_size": 8,
    "floor_scale": 5,
}
_MINIMAX_M2 = {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16}

_HYBRID = {
    "num_hidden_layers": 5,
    "rms_norm_eps": 1e-2,  # random layers of a smaller one amplify a rounding a hundredfold
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
}
_QWEN3_NEXT = {**_QWEN2_MOE, **_HYBRID}
_HYBRID_OPTIONS = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
    "attention_bias": True,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-2,
}

_MULTIPLIERS = {
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.7,
}
_GRANITE_MOE = {**_MULTIPLIERS, "num_local_experts": 8, "num_experts_per_tok": 3}
_GRANITE_HYBRID = {
    **_MULTIPLIERS,
    "num_hidden_layers": 5,
    "rms_norm_eps": 1e-2,
    "layer_types": [*["linear_attention"] * 2, "full_attention", *["linear_attention"] * 2],
    "shared_intermediate_size": 40,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "mamba_n_heads": 8,
    "mamba_d_state": 12,
}
_MAMBA2 = {
    "num_hidden_layers": 4,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 12,
    "n_groups": 2,
    "layer_norm_epsilon": 1e-2,
}

_NOT_READ = {
    "mamba2": (
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    )
}
"""Keys of `_BASE` that a family's config does not have."""

# name: (family, keys of the config, the sequence length to compare at)
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama2": ("llama", {"num_key_value_heads": 4}, 24),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, 24),
    "llama-wide-heads": ("llama", {"head_dim": 20, "num_key_value_heads": 1}, 24),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, 24),
    "llama-eps": ("llama", {"rms_norm_eps": 1e-2}, 24),
    "llama-linear": ("llama", _rope("linear", factor=4.0), 24),
    "llama-dynamic-short": ("llama", _rope("dynamic", factor=2.0), 24),
    "llama-dynamic-long": ("llama", _rope("dynamic", factor=2.0), 90),
    "llama-yarn": (
        "llama",
        _rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0),
        40,
    ),
    "llama-yarn-options": (
        "llama",
        _rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            mscale=1.0,
            mscale_all_dim=0.7,
            truncate=False,
            beta_fast=8.0,
            beta_slow=0.5,
        ),
        40,
    ),
    "llama-yarn-attention-factor": (
        "llama",
        _rope("yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.3),
        40,
    ),
    "llama-llama3": ("llama", _rope("llama3", **_LLAMA3), 40),
    "llama-longrope": (
        "llama",
        _rope("longrope", factor=4.0, original_max_position_embeddings=16, **_LONG),
        40,
    ),
    "mistral-window": ("mistral", {"sliding_window": 6}, 24),
    "mistral-full": ("mistral", {"sliding_window": None, "head_dim": 24}, 24),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, 24),
    "qwen2-window": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
            "num_hidden_layers": 5,
        },
        24,
    ),
    "qwen2-yarn": (
        "qwen2",
        _rope("yarn", factor=4.0, original_max_position_embeddings=16),
        40,
    ),
    "qwen3": ("qwen3", {"head_dim": 16}, 24),
    "qwen3-tied-bias": (
        "qwen3",
        {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True},
        24,
    ),
    "qwen3-window": (
        "qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        24,
    ),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24, "num_hidden_layers": 4},
        24,
    ),
    "gemma2-tight-caps": (
        "gemma2",
        {
            "head_dim": 8,
            "sliding_window": 7,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
        },
        24,
    ),
    "gemma2-no-caps": (
        "gemma2",
        {
            "head_dim": 8,
            "sliding_window": 7,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
        },
        24,
    ),
    "gemma3": ("gemma3", _GEMMA3, 24),
    "gemma3-linear": (
        "gemma3",
        {
            **_GEMMA3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "final_logit_softcapping": 3.0,
        },
        24,
    ),
    "gemma3-untied": ("gemma3", {**_GEMMA3, "tie_word_embeddings": False}, 24),
    "olmo2": ("olmo2", {}, 24),
    "olmo2-mha-bias": ("olmo2", {"num_key_value_heads": 4, "attention_bias": True}, 24),
    "olmo3": ("olmo3", {"num_hidden_layers": 6, "sliding_window": 6, **_rope_by_kind()}, 40),
    "olmo3-options": (
        "olmo3",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 90.0}},
        },
        24,
    ),
    "phi3": ("phi3", {}, 24),
    "phi3-window": ("phi3", {"sliding_window": 6}, 24),
    "phi3-partial": ("phi3", _rope("default", partial_rotary_factor=0.75) | {"head_dim": 16}, 24),
    "phi3-longrope-short": (
        "phi3",
        _rope("longrope", **_LONG) | {"original_max_position_embeddings": 16},
        14,
    ),
    "phi3-longrope-long": (
        "phi3",
        _rope("longrope", **_LONG) | {"original_max_position_embeddings": 16},
        40,
    ),
    "phi4-mini": (
        "phi3",
        _rope(
            "longrope",
            partial_rotary_factor=0.75,
            short_factor=[1.0, 1.1, 1.2],
            long_factor=[1.0, 2.0, 3.0],
        )
        | {"original_max_position_embeddings": 16, "tie_word_embeddings": True},
        40,
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}, 24),
    "smollm3-options": (
        "smollm3",
        {
            "no_rope_layers": [1, 0, 0, 1],
            "num_hidden_layers": 4,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
        24,
    ),
    "smollm3-window": (
        "smollm3",
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 6},
        24,
    ),
    "smollm3-yarn": (
        "smollm3",
        _rope("yarn", factor=2.0, original_max_position_embeddings=32),
        40,
    ),
    "gemma4": ("gemma4", _GEMMA4, 40),
    "gemma4-inputs": (
        "gemma4",
        {
            **_GEMMA4,
            "num_hidden_layers": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            "attention_k_eq_v": False,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 101,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "attention_bias": True,
            "final_logit_softcapping": 5.0,
        },
        40,
    ),
    "gemma4-moe": (
        "gemma4",
        {
            **_GEMMA4,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
        },
        40,
    ),
    "gemma4-options": (
        "gemma4",
        {
            **_GEMMA4,
            "layer_types": ["full_attention"] * 3,
            "hidden_activation": "silu",
            "tie_word_embeddings": False,
            "num_kv_shared_layers": 1,
            "hidden_size_per_layer_input": 4,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 4,
            "moe_intermediate_size": 24,
            "use_bidirectional_attention": "vision",
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 500.0,
                    "partial_rotary_factor": 0.5,
                    "factor": 4.0,
                }
            },
        },
        24,
    ),
    "gemma4-one-width": (
        "gemma4",
        {**_GEMMA4, **_rope_by_kind(), "global_head_dim": 8, "attention_k_eq_v": False},
        40,
    ),
    "glm4": ("glm4", {"head_dim": 16}, 24),
    "glm4-options": (
        "glm4",
        {
            **_rope(
                "yarn", factor=4.0, original_max_position_embeddings=16, partial_rotary_factor=0.75
            ),
            "head_dim": 16,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
        40,
    ),
    "ministral3": ("ministral3", {**_rope("yarn", **_MINISTRAL3), "head_dim": 16}, 40),
    "ministral3-window": (
        "ministral3",
        {
            **_rope("default", llama_4_scaling_beta=0.5, original_max_position_embeddings=8),
            "sliding_window": 6,
            "tie_word_embeddings": True,
        },
        40,
    ),
    "mixtral": ("mixtral", {"num_local_experts": 8}, 24),
    "mixtral-window": ("mixtral", {"num_local_experts": 4, "sliding_window": 6}, 24),
    "mixtral-one-expert": (
        "mixtral",
        {"num_local_experts": 1, "num_experts_per_tok": 1, "tie_word_embeddings": True},
        24,
    ),
    "mixtral-all-experts": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 4}, 24),
    "qwen2-moe": ("qwen2_moe", _QWEN2_MOE, 24),
    "qwen2-moe-dense-layers": (
        "qwen2_moe",
        {
            **_QWEN2_MOE,
            "num_hidden_layers": 7,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 4,
        },
        24,
    ),
    "qwen3-moe": ("qwen3_moe", {**_EXPERTS, "norm_topk_prob": True, "head_dim": 16}, 24),
    "qwen3-moe-options": (
        "qwen3_moe",
        {
            **_EXPERTS,
            "head_dim": 16,
            "attention_bias": True,
            "mlp_only_layers": [0],
            "use_sliding_window": True,
            "sliding_window": 6,
        },
        24,
    ),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4}, 24),
    "olmoe-options": (
        "olmoe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "clip_qkv": 0.5,
            "attention_bias": True,
        },
        24,
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            **_GPT_OSS,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False),
            "num_hidden_layers": 4,
            "swiglu_limit": 0.9,
            "swiglu_alpha": 1.3,
        },
        40,
    ),
    "gpt-oss-options": (
        "gpt_oss",
        {
            **_GPT_OSS,
            **_rope("default"),
            "attention_bias": False,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
        24,
    ),
    "gpt-oss-default-rope": (
        "gpt_oss",
        {**_GPT_OSS, "num_hidden_layers": 2, "max_position_embeddings": 131_072},
        24,
    ),
    "deepseek-v2": (
        "deepseek_v2",
        _LATENT
        | _rope("yarn", **_DEEPSEEK_YARN, mscale_all_dim=0.7)
        | {"topk_method": "group_limited_greedy", "first_k_dense_replace": 1},
        40,
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {**_LATENT, "q_lora_rank": None, "n_shared_experts": 1, "tie_word_embeddings": True},
        24,
    ),
    "deepseek-v2-biases": (
        "deepseek_v2",
        {**_LATENT, "attention_bias": True, "mlp_bias": True, "first_k_dense_replace": 1},
        24,
    ),
    "deepseek-v3": (
        "deepseek_v3",
        _LATENT
        | _rope("yarn", **_DEEPSEEK_YARN, mscale_all_dim=1.0)
        | {"first_k_dense_replace": 1, "n_shared_experts": 2, "rms_norm_eps": 1e-2},
        40,
    ),
    "deepseek-v3-options": (
        "deepseek_v3",
        {
            **_LATENT,
            "q_lora_rank": None,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        24,
    ),
    "kimi-k2": (
        "deepseek_v3",
        _LATENT
        | _rope("yarn", **_DEEPSEEK_YARN, mscale_all_dim=1.0)
        | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 2},
        40,
    ),
    "glm4-moe": (
        "glm4_moe",
        {**_ROUTED, "head_dim": 16, "use_qk_norm": True, "attention_bias": True},
        24,
    ),
    "glm4-moe-options": (
        "glm4_moe",
        {
            **_ROUTED,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "partial_rotary_factor": 0.25,
            "n_shared_experts": 3,
        },
        24,
    ),
    "glm4-moe-lite": ("glm4_moe_lite", {**_LATENT, **_rope("yarn", **_DEEPSEEK_YARN)}, 40),
    "glm4-moe-lite-options": (
        "glm4_moe_lite",
        {
            **_LATENT,
            "mlp_layer_types": ["dense", "sparse", "dense"],
            "q_lora_rank": None,
            "rope_interleave": False,
            "attention_bias": True,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
        },
        24,
    ),
    "llama4": (
        "llama4",
        {
            **_LLAMA4,
            **_rope("llama3", **_LLAMA3),
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [],
        },
        40,
    ),
    "llama4-options": (
        "llama4",
        {
            **_LLAMA4,
            "num_experts_per_tok": 2,
            "moe_layers": [0, 3],
            "no_rope_layers": [1, 0, 0, 1, 1],
            "layer_types": ["chunked_attention"] * 2 + ["full_attention"] * 2,
            "use_qk_norm": False,
            "attention_bias": True,
            "attn_scale": 0.4,
            "attention_chunk_size": 12,
            "tie_word_embeddings": True,
        },
        24,
    ),
    "llama4-dense": (
        "llama4",
        {**_LLAMA4, "moe_layers": [], "attn_temperature_tuning": False},
        24,
    ),
    "minimax-m2": ("minimax_m2", {**_MINIMAX_M2, "rotary_dim": 8}, 24),
    "minimax-m2-options": (
        "minimax_m2",
        {
            **_MINIMAX_M2,
            **_rope(
                "yarn", factor=4.0, original_max_position_embeddings=16, partial_rotary_factor=0.75
            ),
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "tie_word_embeddings": True,
        },
        40,
    ),
    "mistral4": ("mistral4", {**_LATENT, **_rope("yarn", **_MINISTRAL3)}, 40),
    "mistral4-options": (
        "mistral4",
        {
            **_LATENT,
            **_rope(
                "linear",
                factor=2.0,
                llama_4_scaling_beta=0.5,
                original_max_position_embeddings=8,
            ),
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        24,
    ),
    "qwen3-next": ("qwen3_next", _QWEN3_NEXT, 150),
    "qwen3-next-options": (
        "qwen3_next",
        {
            **_QWEN3_NEXT,
            **_HYBRID_OPTIONS,
            **_rope(
                "yarn", factor=4.0, original_max_position_embeddings=16, partial_rotary_factor=0.5
            ),
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
        },
        40,
    ),
    "qwen3-next-full-attention": (
        "qwen3_next",
        {
            **_QWEN3_NEXT,
            **_rope("default", partial_rotary_factor=1.0),
            "layer_types": ["full_attention"] * 5,
        },
        24,
    ),
    "qwen3-5": ("qwen3_5", _HYBRID, 150),
    "qwen3-5-options": (
        "qwen3_5",
        {
            **_HYBRID,
            **_HYBRID_OPTIONS,
            **_rope("default", partial_rotary_factor=0.75, mrope_section=[2, 2, 2]),
        },
        40,
    ),
    "qwen3-5-moe": ("qwen3_5_moe", _QWEN3_NEXT, 150),
    "qwen3-5-moe-options": ("qwen3_5_moe", {**_QWEN3_NEXT, **_HYBRID_OPTIONS}, 70),
    "granite": (
        "granite",
        {
            **_MULTIPLIERS,
            **_rope("linear", factor=2.0),
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        24,
    ),
    "granite-moe": ("granitemoe", _GRANITE_MOE, 24),
    "granite-moe-shared": (
        "granitemoeshared",
        {**_GRANITE_MOE, "shared_intermediate_size": 40, "attention_bias": True},
        24,
    ),
    "granite-hybrid": ("granitemoehybrid", _GRANITE_HYBRID, 150),
    "granite-hybrid-options": (
        "granitemoehybrid",
        {
            **_GRANITE_HYBRID,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "tie_word_embeddings": True,
            "mamba_n_heads": 6,
            "mamba_d_head": 16,
            "mamba_expand": 3,
            "mamba_n_groups": 3,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "time_step_limit": (0.4, 0.9),
        },
        40,
    ),
    "granite-hybrid-full-attention": (
        "granitemoehybrid",
        {**_GRANITE_HYBRID, "layer_types": ["full_attention"] * 5},
        24,
    ),
    "mamba2": ("mamba2", _MAMBA2, 150),
    "mamba2-options": (
        "mamba2",
        {
            **_MAMBA2,
            "num_heads": 4,
            "head_dim": 24,
            "expand": 3,
            "n_groups": 1,
            "conv_kernel": 2,
            "use_bias": True,
            "use_conv_bias": False,
            "time_step_limit": (0.4, 0.9),
            "tie_word_embeddings": True,
            "residual_in_fp32": False,
        },
        70,
    ),
}

GENERATION_CASES = (
    "llama-llama3",
    "mistral-window",
    "qwen2-window",
    "gemma2",
    "gemma3",
    "gemma4-inputs",
    "phi4-mini",
    "smollm3",
    "qwen3-moe-options",
    "gpt-oss",
    "deepseek-v3",
    "qwen3-next",
    "qwen3-5-options",
    "llama4",
    "mamba2",
)
"""One case for each way of attending."""

UNPACKED = (
    "gpt_oss",
    "llama4",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "granitemoehybrid",
    "mamba2",
)
"""Families whose oracle takes packed documents for one: it makes its masks without positions, or
carries the state of linear layers on. Each document is given to it by itself."""

UNPADDED = ("llama4", "granite-hybrid-options", "mamba2-options")
"""Families and cases whose oracle does not leave padding out: it counts positions by columns, or
lets convolutions see the biases of projections there. Padded rows are given to it without."""


def build(name: str) -> tuple[Any, int]:
    """The transformers config of a case, and the sequence length to compare at."""
    family, keys, length = CASES[name]
    base = {key: value for key, value in _BASE.items() if key not in _NOT_READ.get(family, ())}
    return _CLASSES[family](**{**base, **keys}), length
