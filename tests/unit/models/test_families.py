"""config.json of released models: read as published, written back without loss, refused by name."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fornax.config.errors import ConfigError
from fornax.models import (
    DecoderConfig,
    ExpertsConfig,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    QueryScaling,
    RopeConfig,
    YarnScaling,
    config_from_hf,
    config_to_hf,
    num_parameters,
)

# The keys as the models' repositories have them; long lists are made here.
RELEASED: dict[str, dict[str, Any]] = {
    "Llama-2-7b": {
        "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
        "transformers_version": "4.31.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "Qwen2.5-7B-1M-style": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 3584,
        "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 131072,
        "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn",
        },
        "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
        "use_mrope": False, "use_sliding_window": False, "vocab_size": 152064,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid",
        "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216,
        "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
        "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
        "sliding_window": 4096, "torch_dtype": "float32", "transformers_version": "4.42.4",
        "use_cache": True, "vocab_size": 256000,
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid",
        "eos_token_id": 1, "final_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
        "intermediate_size": 6912, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
        "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": True,
        "vocab_size": 262144,
    },
    "gemma-4-E2B-text": {
        "architectures": ["Gemma4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attention_k_eq_v": False, "bos_token_id": 2, "dtype": "bfloat16",
        "enable_moe_block": False, "eos_token_id": 1, "final_logit_softcapping": 30.0,
        "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1536, "hidden_size_per_layer_input": 256, "initializer_range": 0.02,
        "intermediate_size": 6144,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
        "max_position_embeddings": 131072, "model_type": "gemma4_text",
        "moe_intermediate_size": None, "num_attention_heads": 8, "num_experts": None,
        "num_global_key_value_heads": None, "num_hidden_layers": 35, "num_key_value_heads": 1,
        "num_kv_shared_layers": 20, "pad_token_id": 0, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 512, "tie_word_embeddings": True, "top_k_experts": None,
        "use_bidirectional_attention": None, "use_cache": True, "use_double_wide_mlp": True,
        "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
    },
    "gemma-4-26B-A4B-text": {
        "architectures": ["Gemma4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attention_k_eq_v": True, "bos_token_id": 2, "dtype": "bfloat16",
        "enable_moe_block": True, "eos_token_id": 1, "final_logit_softcapping": 30.0,
        "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2816, "hidden_size_per_layer_input": 0, "initializer_range": 0.02,
        "intermediate_size": 2112, "max_position_embeddings": 262144,
        "model_type": "gemma4_text", "moe_intermediate_size": 704, "num_attention_heads": 16,
        "num_experts": 128, "num_global_key_value_heads": 2, "num_hidden_layers": 30,
        "num_key_value_heads": 8, "num_kv_shared_layers": 0, "pad_token_id": 0,
        "rms_norm_eps": 1e-06, "sliding_window": 1024, "tie_word_embeddings": True,
        "top_k_experts": 8, "use_bidirectional_attention": "vision", "use_cache": True,
        "use_double_wide_mlp": False, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
    },
    "OLMo-2-1124-7B": {
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "model_type": "olmo2", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
        "torch_dtype": "float32", "transformers_version": "4.47.0.dev0", "use_cache": True,
        "vocab_size": 100352,
    },
    "Olmo-3-7B": {
        "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 11008,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
        "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
            "factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
        "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False,
        "torch_dtype": "float32", "transformers_version": "4.57.0.dev0", "use_cache": True,
        "vocab_size": 100278,
    },
    "Phi-3-mini-128k": {
        "_name_or_path": "Phi-3-mini-128k-instruct", "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "bos_token_id": 1,
        "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
        "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
        "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": [1.0 + i for i in range(48)], "short_factor": [1.0] * 48,
            "type": "longrope",
        },
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.40.2", "use_cache": True,
        "vocab_size": 32064,
    },
    "Phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 199999, "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1,
        "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
        "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "phi3",
        "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "pad_token_id": 199999,
        "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": [1.0 + i for i in range(48)], "short_factor": [1.0] * 48,
            "type": "longrope",
        },
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.45.0", "use_cache": True,
        "vocab_size": 200064,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
        "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
        "swiglu_limit": 7.0, "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0",
        "use_cache": True, "vocab_size": 201088,
    },
    "GLM-4-9B-0414": {
        "architectures": ["Glm4ForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 13696,
        "max_position_embeddings": 32768, "model_type": "glm4", "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.52.0",
        "use_cache": True, "vocab_size": 151552,
    },
    "Ministral-3-text": {
        "architectures": ["Ministral3ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
        "initializer_range": 0.02, "intermediate_size": 9216, "max_position_embeddings": 262144,
        "model_type": "ministral3", "num_attention_heads": 32, "num_hidden_layers": 26,
        "num_key_value_heads": 8, "pad_token_id": 11, "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
            "max_position_embeddings": 262144, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
            "rope_type": "yarn", "type": "yarn",
        },
        "sliding_window": None, "tie_word_embeddings": True, "use_cache": True,
        "vocab_size": 131072,
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": 128012,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False,
        "model_type": "smollm3", "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36,
        "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0,
        "sliding_window": None, "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 128256,
    },
    "Moonlight-16B-A3B": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "auto_map": {"AutoConfig": "x.DeepseekV3Config"},
        "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163585,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 11264, "kv_lora_rank": 512,
        "max_position_embeddings": 8192, "model_type": "deepseek_v3",
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": True,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
        "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 163840,
    },
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "bos_token_id": 100000,
        "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
        "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
            "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1,
        "topk_method": "greedy", "torch_dtype": "bfloat16", "use_cache": True,
        "v_head_dim": 128, "vocab_size": 102400,
    },
    "GLM-4.5-Air": {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True,
        "attention_dropout": 0.0, "eos_token_id": [151329, 151336, 151338],
        "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 10944,
        "max_position_embeddings": 131072, "model_type": "glm4_moe",
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
        "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1, "pad_token_id": 151329, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
        "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1,
        "torch_dtype": "bfloat16", "use_cache": True, "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "Llama-4-Scout-text": {
        "architectures": ["Llama4ForCausalLM"], "attention_bias": False,
        "attention_chunk_size": 8192, "attention_dropout": 0.0, "bos_token_id": 200000,
        "eos_token_id": [200001, 200007, 200008], "for_llm_compressor": False, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
        "interleave_moe_layer_step": 1, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760,
        "model_type": "llama4_text", "no_rope_layers": [], "num_attention_heads": 40,
        "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
        "num_local_experts": 16, "output_router_logits": False, "pad_token_id": 200018,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.1, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
        "torch_dtype": "bfloat16", "use_cache": True, "use_qk_norm": True, "vocab_size": 202048,
    },
    "MiniMax-M2": {  # of its bfloat16 copies: the release itself is in float8
        "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62,
        "auto_map": {"AutoConfig": "x.MiniMaxM2Config"}, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 3072, "intermediate_size": 1536, "max_position_embeddings": 196608,
        "model_type": "minimax_m2", "mtp_transformer_layers": 1, "num_attention_heads": 48,
        "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
        "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
        "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64,
        "scoring_func": "sigmoid", "shared_intermediate_size": 0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.46.1", "use_cache": True,
        "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
    },
    "Mistral-Small-4-text": {
        "architectures": ["Mistral4ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "first_k_dense_replace": 0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 12288, "kv_lora_rank": 256,
        "max_position_embeddings": 1048576, "model_type": "mistral4",
        "moe_intermediate_size": 2048, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts_per_tok": 4, "num_hidden_layers": 36, "num_key_value_heads": 32,
        "pad_token_id": 11, "q_lora_rank": 1024, "qk_head_dim": 128, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_interleave": True,
        "rope_parameters": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 128.0, "llama_4_scaling_beta": 0.1,
            "max_position_embeddings": 1048576, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 8192, "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0, "rope_type": "yarn", "type": "yarn",
        },
        "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1,
        "use_cache": True, "v_head_dim": 128, "vocab_size": 131072,
    },
    "Qwen3-Next-80B-A3B": {
        "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1,
        "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
        "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16,
        "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
        "num_key_value_heads": 2, "output_router_logits": False, "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    # The next two are the text models of files that hold a vision tower as well.
    "Qwen3.5-9B": {
        "architectures": ["Qwen3_5ForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
        "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 12288,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144, "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16, "num_hidden_layers": 32, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default",
        },
        "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320,
    },
    "Qwen3.5-35B-A3B": {
        "architectures": ["Qwen3_5MoeForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
        "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144, "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512, "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False, "num_attention_heads": 16, "num_experts": 256,
        "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "output_router_logits": False, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320,
    },
    # Without keys whose values here could not be compared with the file.
    "granite-4.0-h-350m": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False,
        "attention_multiplier": 0.015625, "embedding_multiplier": 12, "eos_token_id": 100257,
        "hidden_act": "silu", "hidden_size": 768, "intermediate_size": 2048,
        "layer_types": [
            "attention" if layer in (10, 13, 17, 27) else "mamba" for layer in range(32)
        ],
        "logits_scaling": 3, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 32,
        "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_n_heads": 48,
        "mamba_proj_bias": False, "max_position_embeddings": 32768,
        "model_type": "granitemoehybrid", "num_attention_heads": 12, "num_experts_per_tok": 0,
        "num_hidden_layers": 32, "num_key_value_heads": 4, "num_local_experts": 0,
        "position_embedding_type": "nope", "residual_multiplier": 0.246, "rms_norm_eps": 1e-05,
        "rope_theta": 10000, "shared_intermediate_size": 2048, "tie_word_embeddings": True,
        "vocab_size": 100352,
    },
    "granite-4.0-h-tiny": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "hidden_act": "silu",
        "hidden_size": 1536, "intermediate_size": 512,
        "layer_types": [
            "attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)
        ],
        "mamba_chunk_size": 256, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48,
        "max_position_embeddings": 131072, "model_type": "granitemoehybrid",
        "num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 40,
        "num_key_value_heads": 4, "num_local_experts": 64, "shared_intermediate_size": 1024,
        "tie_word_embeddings": True, "vocab_size": 100352,
    },
    # The text model of a file that holds a vision tower as well.
    "granite-4.0-3b": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "attention_multiplier": 0.015625, "bos_token_id": 100257,
        "embedding_multiplier": 12, "eos_token_id": 100257, "hidden_act": "silu",
        "hidden_size": 2560, "initializer_range": 0.1, "intermediate_size": 8192,
        "layer_types": ["attention"] * 40, "logits_scaling": 10, "mamba_chunk_size": 256,
        "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 40, "mamba_d_state": 256,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False,
        "max_position_embeddings": 131072, "model_type": "granitemoehybrid",
        "normalization_function": "rmsnorm", "num_attention_heads": 40, "num_experts_per_tok": 0,
        "num_hidden_layers": 40, "num_key_value_heads": 8, "num_local_experts": 0,
        "output_router_logits": False, "pad_token_id": 100256, "position_embedding_type": "rope",
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 10000000, "router_aux_loss_coef": 0.01, "shared_intermediate_size": 8192,
        "tie_word_embeddings": True, "use_cache": False, "vocab_size": 100353,
    },
    # The defaults of transformers' class.
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 256,
        "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.1, "layer_norm_epsilon": 1e-05,
        "model_type": "mamba2", "n_groups": 8, "num_heads": 128, "num_hidden_layers": 64,
        "pad_token_id": 1, "rescale_prenorm_residual": False, "residual_in_fp32": True,
        "state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001,
        "time_step_limit": [0.0, math.inf], "time_step_max": 0.1,
        "time_step_min": 0.001, "time_step_rank": 256, "use_bias": False, "use_cache": True,
        "use_conv_bias": True, "vocab_size": 32768,
    },
}  # fmt: skip

LLAMA = RELEASED["Llama-2-7b"]


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs_survive_a_round_trip(name: str) -> None:
    config = config_from_hf(RELEASED[name])
    written = config_to_hf(config)
    assert config_from_hf(written) == dataclasses.replace(
        config,
        num_kv_heads=config.kv_heads,
        head_dim=None if config.latent else config.head_width,
    )
    for key in ("architectures", "model_type", "vocab_size", "hidden_size", "num_hidden_layers"):
        assert written[key] == RELEASED[name][key]


def test_llama() -> None:
    config = config_from_hf(RELEASED["Llama-3.2-1B"])
    assert (config.kv_heads, config.head_width, config.tie_embeddings) == (8, 64, True)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.rope.scaling == Llama3Scaling(
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


def test_mistral_slides_in_every_layer() -> None:
    kinds = config_from_hf(RELEASED["Mistral-7B-v0.1"]).layer_kinds()
    assert {kind.window for kind in kinds} == {4096}


def test_qwen_has_biases_on_queries_keys_and_values_only() -> None:
    config = config_from_hf(RELEASED["Qwen2.5-7B-1M-style"])
    assert (config.qkv_bias, config.attention_output_bias) == (True, False)
    assert config.sliding_window is None
    assert isinstance(config.rope.scaling, YarnScaling)


def test_qwen_windows_begin_at_a_layer() -> None:
    slides = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 25}
    config = config_from_hf({**RELEASED["Qwen3-0.6B"], **slides})
    assert [kind.window for kind in config.layer_kinds()] == [None] * 25 + [100] * 3


def test_gemma2_alternates_and_ties_by_default() -> None:
    config = config_from_hf(RELEASED["gemma-2-2b"])
    assert [kind.window for kind in config.layer_kinds()] == [4096, None] * 13
    assert (config.attention_logit_softcap, config.final_logit_softcap) == (50.0, 30.0)
    assert config.tie_embeddings
    assert config.attention_scale == 256**-0.5


def test_gemma3_rotates_differently_where_it_slides() -> None:
    config = config_from_hf(RELEASED["gemma-3-1b"])
    kinds = config.layer_kinds()
    assert [kind.window for kind in kinds] == ([512] * 5 + [None]) * 4 + [512] * 2
    assert [kind.rope for kind in kinds[:6]] == ["local"] * 5 + ["global"]
    assert (config.rope.theta, config.local_rope) == (1e6, RopeConfig(theta=10_000))
    scaled = config_from_hf(
        {**RELEASED["gemma-3-1b"], "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    )
    assert scaled.rope.scaling == LinearScaling(factor=8.0)
    assert scaled.local_rope == RopeConfig(theta=10_000)


def test_olmo3_scales_the_rope_of_full_layers_alone() -> None:
    config = config_from_hf(RELEASED["Olmo-3-7B"])
    kinds = config.layer_kinds()
    assert [(kind.window, kind.rope) for kind in kinds[2:4]] == [(4096, "local"), (None, "global")]
    assert isinstance(config.rope.scaling, YarnScaling)
    assert config.local_rope == RopeConfig(theta=500_000)
    del (values := dict(RELEASED["Olmo-3-7B"]))["layer_types"]
    assert config_from_hf(values) == config


def test_gpt_oss_is_what_its_config_says() -> None:
    values = RELEASED["gpt-oss-20b"]
    config = config_from_hf(values)
    assert [kind.window for kind in config.layer_kinds()] == [128, None] * 12
    assert config.attention_sinks
    assert config.experts is not None
    assert (config.experts.clip, config.experts.num_experts) == (7.0, 32)
    bare = {key: value for key, value in values.items() if not key.startswith("rope")}
    assert config_from_hf(bare) == config  # its YaRN is the architecture's default
    packed = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    assert config_from_hf({**values, "quantization_config": packed}) == config
    with pytest.raises(ConfigError, match="experts_per_token=8"):
        config_from_hf({**values, "experts_per_token": 8})


def test_phi_reads_its_own_original_length() -> None:
    config = config_from_hf(RELEASED["Phi-4-mini"])
    assert config.rope.fraction == 0.75
    assert isinstance(config.rope.scaling, LongRopeScaling)
    assert config.rope.scaling.original_max_position_embeddings == 4096
    old_name = dict(RELEASED["Phi-3-mini-128k"]["rope_scaling"], type="su")
    assert config_from_hf(
        {**RELEASED["Phi-3-mini-128k"], "rope_scaling": old_name}
    ) == config_from_hf(RELEASED["Phi-3-mini-128k"])


def test_smollm3_leaves_every_fourth_layer_unrotated() -> None:
    config = config_from_hf(RELEASED["SmolLM3-3B"])
    assert config.rope_pattern == (True, True, True, False)
    del (values := dict(RELEASED["SmolLM3-3B"]))["no_rope_layers"]
    assert config_from_hf(values) == config


def test_deepseek_reads_as_its_papers_say() -> None:
    lite = config_from_hf(RELEASED["DeepSeek-V2-Lite"])
    temperature = 0.1 * 0.707 * math.log(40) + 1
    assert lite.attention_scale == pytest.approx(192**-0.5 * temperature**2)
    assert lite.rotated_width(lite.rope) == 64
    assert num_parameters(lite) == 15_706_484_224
    moonlight = config_from_hf(RELEASED["Moonlight-16B-A3B"])
    assert moonlight.attention_scale == 192**-0.5
    assert [kind.mlp for kind in moonlight.layer_kinds()][:2] == ["mlp", "experts"]
    assert moonlight.experts is not None
    assert moonlight.experts.selection_bias
    assert moonlight.experts.shared_intermediate_size == 2816
    air = config_from_hf(RELEASED["GLM-4.5-Air"])
    assert (air.rope.fraction, air.rope.interleaved, air.latent) == (0.5, False, None)
    half = dict(RELEASED["GLM-4.5-Air"])
    del half["partial_rotary_factor"]
    assert config_from_hf(half) == air
    with pytest.raises(ConfigError, match="head_dim is not qk_rope_head_dim=64"):
        config_from_hf({**RELEASED["Moonlight-16B-A3B"], "head_dim": 128})
    with pytest.raises(ConfigError, match=r"num_kv_heads=4 is of grouped-query attention"):
        config_from_hf({**RELEASED["Moonlight-16B-A3B"], "num_key_value_heads": 4})
    with pytest.raises(ConfigError, match="norm_topk_prob=True is not supported"):
        config_from_hf({**RELEASED["DeepSeek-V2-Lite"], "norm_topk_prob": True})


def test_minimax_m2_and_mistral4_read_as_released() -> None:
    values = RELEASED["MiniMax-M2"]
    config = config_from_hf(values)
    assert (config.rope.fraction, config.qk_norm) == (0.5, "full")
    assert config.experts is not None
    assert (config.experts.score, config.experts.normalize_eps) == ("sigmoid", 0.0)
    assert round(num_parameters(config) / 1e9) == 229
    for key, value in (("use_qk_norm", False), ("shared_intermediate_size", 1536)):
        with pytest.raises(ConfigError, match=f"{key}={value} is not supported"):
            config_from_hf({**values, key: value})
    values = RELEASED["Mistral-Small-4-text"]
    config = config_from_hf(values)
    assert config.attention_scale == pytest.approx(128**-0.5 * (0.1 * math.log(128) + 1) ** 2)
    assert config.query_scaling == QueryScaling(beta=0.1, length=8192)
    assert config.rotated_width(config.rope) == 64
    assert round(num_parameters(config) / 1e9) == 119
    bare = {key: value for key, value in values.items() if key != "rope_parameters"}
    assert config_from_hf(bare) == config  # its YaRN is the architecture's default
    for keys, message in (
        ({"llama_4_scaling_beta": 0.1, "rope_type": "default"}, "rope_type='default' is not supp"),
        ({**values["rope_parameters"], "partial_rotary_factor": 1.0}, "is not the 0.5 of a head"),
    ):
        rope = {"rope_theta": 1e4, "original_max_position_embeddings": 8192, **keys}
        with pytest.raises(ConfigError, match=message):
            config_from_hf({**values, "rope_parameters": rope})


def test_llama4_reads_as_released() -> None:
    values = RELEASED["Llama-4-Scout-text"]
    config = config_from_hf(values)
    kinds = config.layer_kinds()
    assert [(kind.window, kind.chunked, kind.rope) for kind in kinds[2:4]] == [
        (8192, True, "global"),
        (None, False, "none"),
    ]
    assert config.query_scaling == QueryScaling(beta=0.1, length=8192, shift=1, layers="unrotated")
    assert round(num_parameters(config) / 1e9) == 108
    assert round(num_parameters(config, active=True) / 1e9) == 17
    maverick = config_from_hf(
        {**values, "interleave_moe_layer_step": 2, "num_local_experts": 128, "use_qk_norm": False}
    )
    assert [kind.mlp for kind in maverick.layer_kinds()[:3]] == ["mlp", "experts", "mlp"]
    assert round(num_parameters(maverick) / 1e9) == 401
    with pytest.raises(ConfigError, match="layer type 'sliding_attention' is not supported"):
        config_from_hf({**values, "layer_types": ["sliding_attention"] * 48})
    with pytest.raises(ConfigError, match=r"router_jitter_noise=0\.1 is not supported"):
        config_from_hf({**values, "router_jitter_noise": 0.1})


def test_mistral3_holds_one_of_three_decoders() -> None:
    around = {"architectures": ["Mistral3ForConditionalGeneration"], "vision_config": {}}
    for name in ("Mistral-7B-v0.1", "Ministral-3-text", "Mistral-Small-4-text"):
        inner = {key: value for key, value in RELEASED[name].items() if key != "architectures"}
        whole = {**around, "text_config": inner}
        assert config_from_hf(whole) == config_from_hf(RELEASED[name])
    with pytest.raises(ConfigError, match=r"text_config\.model_type='llama' is not supported in"):
        config_from_hf({**around, "text_config": RELEASED["Llama-2-7b"]})


def test_granite_hybrids_read_as_released() -> None:
    config = config_from_hf(RELEASED["granite-4.0-h-350m"])
    kinds = config.layer_kinds()
    assert [kind.attention for kind in kinds[9:12]] == ["mamba2", "attention", "mamba2"]
    assert {(kind.mlp, kind.rope) for kind in kinds} == {("mlp", "none")}
    assert (config.attention_scale, config.residual_multiplier) == (1 / 64, 0.246)
    assert (config.embedding_scale, config.logits_scaling) == (12.0, 3.0)
    assert round(num_parameters(config) / 1e6) == 340
    tiny = config_from_hf(RELEASED["granite-4.0-h-tiny"])
    assert tiny.experts is not None
    assert tiny.experts.shared_intermediate_size == 1024
    assert round(num_parameters(tiny) / 1e9, 1) == 6.9
    full = config_from_hf(RELEASED["granite-4.0-3b"])
    assert (full.mamba2, full.attends, full.rope_pattern) == (None, True, (True,))
    bare = {**RELEASED["granite-4.0-h-tiny"]}
    for key, value in (("mamba_d_head", "auto"), ("time_step_limit", [0.0, math.inf])):
        assert config_from_hf({**bare, key: value}) == tiny
    for key, value, message in (
        ("position_embedding_type", "alibi", "'alibi' is not supported"),
        ("layer_types", ["sliding_attention"] * 40, "layer type 'sliding_attention' is not"),
        ("residual_multiplier", 0, "residual_multiplier=0 must be a number above 0"),
        ("time_step_limit", [0.0, "much"], "must be two numbers"),
        ("normalization_function", "layernorm", "normalization_function='layernorm' is not"),
    ):
        with pytest.raises(ConfigError, match=message):
            config_from_hf({**bare, key: value})


def test_mamba2_has_neither_attention_nor_mlps() -> None:
    config = config_from_hf(RELEASED["mamba2"])
    assert {(kind.attention, kind.mlp) for kind in config.layer_kinds()} == {("mamba2", "none")}
    assert not config.attends
    assert round(num_parameters(config) / 1e9, 1) == 7.3
    assert config_from_hf({"architectures": ["Mamba2ForCausalLM"]}) == dataclasses.replace(
        config, bos_token_id=None, eos_token_ids=(), pad_token_id=None
    )
    with pytest.raises(ConfigError, match="head_dim=32 is not expand=2 times hidden_size=4096"):
        config_from_hf({**RELEASED["mamba2"], "head_dim": 32})


def test_qwen_hybrids_read_as_released() -> None:
    config = config_from_hf(RELEASED["Qwen3-Next-80B-A3B"])
    kinds = config.layer_kinds()
    assert [kind.attention for kind in kinds] == (["gated_delta"] * 3 + ["attention"]) * 12
    assert [kind.rope for kind in kinds[2:4]] == ["none", "global"]
    assert (config.rope.fraction, config.rope.theta) == (0.25, 1e7)
    assert config.attention_gate
    assert config.norm_unit_offset
    assert round(num_parameters(config) / 1e9, 1) == 79.7  # without its head for a further token
    assert round(num_parameters(config, active=True) / 1e9, 1) == 3.9  # of it 0.6 are the tables
    nine = config_from_hf(RELEASED["Qwen3.5-9B"])
    around = {"text_config": RELEASED["Qwen3.5-9B"], "vision_config": {}, "image_token_id": 248056}
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], **around}
    assert config_from_hf(whole) == nine
    bare = {key: v for key, v in RELEASED["Qwen3.5-9B"].items() if key != "layer_types"}
    assert config_from_hf(bare) == nine
    with pytest.raises(ConfigError, match="attn_output_gate=False is not supported"):
        config_from_hf({**RELEASED["Qwen3.5-9B"], "attn_output_gate": False})
    with pytest.raises(ConfigError, match="layer type 'sliding_attention' is not supported"):
        config_from_hf({**RELEASED["Qwen3.5-9B"], "layer_types": ["sliding_attention"] * 32})
    with pytest.raises(ConfigError, match=r"mlp_only_layers=\[1\] is not supported"):
        config_from_hf({**RELEASED["Qwen3.5-35B-A3B"], "mlp_only_layers": [1]})


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Qwen3-0.6B", "Phi-4-mini"])
def test_the_newer_style_of_rope_keys_means_the_same(name: str) -> None:
    values = dict(RELEASED[name])
    scaling = values.pop("rope_scaling") or {"rope_type": "default"}
    rope = {"rope_theta": values.pop("rope_theta"), **scaling}
    if "partial_rotary_factor" in values:
        rope["partial_rotary_factor"] = values.pop("partial_rotary_factor")
    assert config_from_hf({**values, "rope_parameters": rope}) == config_from_hf(RELEASED[name])


def test_an_unsupported_architecture_lists_the_supported() -> None:
    with pytest.raises(ConfigError, match=r"MambaForCausalLM.*LlamaForCausalLM, Mistral.*Gemma3"):
        config_from_hf({"architectures": ["MambaForCausalLM"]})
    with pytest.raises(ConfigError, match="architectures=None is not supported"):
        config_from_hf({})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention_sinks": 4}, r"config\.json sets attention_sinks=4"),
        ({"quantization_config": {"bits": 4}}, "quant_method=None, which is not supported"),
        ({"sliding_window": 128}, "sliding_window=128"),  # Llama has none
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported; use one of silu"),
        ({"attention_dropout": 0.1}, r"attention_dropout=0\.1 is not supported; only 0"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5 is not supported"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_type='mrope' is not supported; use one of"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "x": 1}}, r"rope_scaling sets x=1"),
        ({"rope_scaling": {"type": "linear"}}, "has no 'factor'"),
        ({"rope_scaling": 8}, "rope_scaling=8 must be a mapping"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True"),
        ({"num_key_value_heads": 5}, "num_heads=32 is not a multiple of num_kv_heads=5"),
        ({"eos_token_id": 40000}, "eos_token_ids has 40000, outside the vocabulary of 32000"),
    ],
    ids=str,
)
def test_what_would_change_the_result_is_refused_by_name(
    keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_hf({**LLAMA, **keys})


def test_a_missing_size_is_named() -> None:
    del (values := dict(LLAMA))["hidden_size"]
    with pytest.raises(ConfigError, match="has no 'hidden_size'"):
        config_from_hf(values)


def test_other_refusals() -> None:
    with pytest.raises(ConfigError, match="layer type 'chunked_attention' is not supported"):
        config_from_hf({**RELEASED["Qwen3-0.6B"], "layer_types": ["chunked_attention"] * 28})
    with pytest.raises(ConfigError, match=r"layer_types=.*one entry for each of the 28 layers"):
        config_from_hf({**RELEASED["Qwen3-0.6B"], "layer_types": ["full_attention"]})
    with pytest.raises(ConfigError, match="use_bidirectional_attention=True"):
        config_from_hf({**RELEASED["gemma-3-1b"], "use_bidirectional_attention": True})
    with pytest.raises(ConfigError, match="attn_logit_softcapping=5"):
        config_from_hf({**RELEASED["gemma-3-1b"], "attn_logit_softcapping": 5.0})


_SMALL = DecoderConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=6, num_heads=4, num_kv_heads=2
)


@pytest.mark.parametrize(
    ("fields", "family"),
    [
        ({}, "llama"),
        ({"qkv_bias": True}, "qwen2"),
        ({"qk_norm": "head"}, "qwen3"),
        ({"qk_norm": "full", "norm_placement": "post"}, "olmo2"),
        (
            {
                "qk_norm": "full",
                "norm_placement": "post",
                "sliding_window": 8,
                "attention_pattern": ("sliding", "full"),
            },
            "olmo3",
        ),
        ({"rope": RopeConfig(fraction=0.5)}, "phi3"),
        ({"rope_pattern": (True, False)}, "smollm3"),
        ({"sliding_window": 8, "attention_pattern": ("sliding",)}, "mistral"),
        ({"query_scaling": QueryScaling(beta=0.1, length=16)}, "ministral3"),
        ({"norm_placement": "sandwich", "rope": RopeConfig(interleaved=True)}, "glm4"),
        ({"sliding_window": 8, "attention_pattern": ("sliding",), "family": "phi3"}, "phi3"),
    ],
    ids=str,
)
def test_the_family_is_found_by_what_the_model_is(fields: dict[str, Any], family: str) -> None:
    assert config_to_hf(dataclasses.replace(_SMALL, **fields))["model_type"] == family


def test_a_family_that_cannot_express_the_model_names_the_fields() -> None:
    odd = dataclasses.replace(_SMALL, qkv_bias=True, rope_pattern=(True, False))
    with pytest.raises(ConfigError, match=r"nearest, .* cannot express"):
        config_to_hf(odd)
    with pytest.raises(ConfigError, match=r"nearest, llama, cannot express rope_pattern.*`family`"):
        config_to_hf(dataclasses.replace(_SMALL, rope_pattern=(True, False), family="llama"))
    with pytest.raises(ConfigError, match="family='lama' is not known; use one of llama"):
        config_to_hf(dataclasses.replace(_SMALL, family="lama"))


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "qkv_bias": st.booleans(),
            "attention_output_bias": st.booleans(),
            "mlp_bias": st.booleans(),
            "qk_norm": st.sampled_from(["none", "head", "full"]),
            "norm_placement": st.sampled_from(["pre", "post", "sandwich"]),
            "norm_unit_offset": st.booleans(),
            "scale_embeddings": st.booleans(),
            "tie_embeddings": st.booleans(),
            "activation": st.sampled_from(["silu", "gelu_tanh"]),
            "final_logit_softcap": st.sampled_from([None, 5.0]),
            "attention_logit_softcap": st.sampled_from([None, 5.0]),
            "query_pre_attn_scalar": st.sampled_from([None, 4.0, 9.0]),
            "rope_pattern": st.sampled_from([(True,), (True, False), (False,)]),
            "query_scaling": st.sampled_from([None, QueryScaling(beta=0.1, length=16)]),
            "rope": st.sampled_from(
                [
                    RopeConfig(interleaved=True, fraction=0.5),
                    RopeConfig(),
                    RopeConfig(fraction=0.5),
                    RopeConfig(theta=1e6, scaling=LinearScaling(factor=2.0)),
                ]
            ),
        },
    ),
    st.sampled_from([(), ("sliding",), ("sliding", "full"), ("full", "sliding")]),
    st.sampled_from([None, RopeConfig(theta=77.0)]),
)
def test_whatever_is_written_reads_back_as_the_same_model(
    fields: dict[str, Any], pattern: tuple[str, ...], local: RopeConfig | None
) -> None:
    """Either no family can express the model, or none of its fields is lost."""
    if pattern:
        fields |= {"attention_pattern": pattern, "sliding_window": 8, "local_rope": local}
    config = dataclasses.replace(_SMALL, **fields)
    try:
        written = config_to_hf(config)
    except ConfigError:
        return  # no family can express it, and says so: see above
    back = config_from_hf(written)
    for name, value in fields.items():
        if name not in ("attention_pattern", "rope_pattern", "local_rope", "query_pre_attn_scalar"):
            assert getattr(back, name) == value, name
    assert back.attention_scale == config.attention_scale
    assert _attending(back) == _attending(config)


def _attending(config: DecoderConfig) -> list[tuple[int | None, RopeConfig | None]]:
    """Each layer's window and rotation."""
    ropes = {"global": config.rope, "local": config.local_rope, "none": None}
    return [(kind.window, ropes[kind.rope]) for kind in config.layer_kinds()]


def test_how_a_mixture_is_trained_is_not_in_its_file():
    """No family has a key for a capacity with our meaning; what is saved computes the same."""
    experts = ExpertsConfig(
        num_experts=4,
        experts_per_token=2,
        intermediate_size=16,
        capacity_factor=1.25,
        exchange="all_gather",
    )
    config = DecoderConfig(hidden_size=16, num_heads=2, num_layers=1, experts=experts)
    plain = dataclasses.replace(experts, capacity_factor=None, exchange="auto")
    written = config_to_hf(config)
    assert written == config_to_hf(dataclasses.replace(config, experts=plain))
    assert config_from_hf(written).experts == plain
