"""The architectures of GGUF files that are read: one table for code, errors and documentation.

Metadata and tensors are named as llama.cpp's converter names them (conversion/ and gguf-py's
constants.py and tensor_mapping.py of https://github.com/ggml-org/llama.cpp).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fornax.gguf import GGUFFile
from fornax.models.families.gguf.reading import Metadata

__all__ = ["ARCHITECTURES", "Architecture", "architecture_of"]


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`, with or without experts."""

    name: str
    target: str
    """The class in config.json's `architectures`."""
    read: Callable[[Metadata], dict[str, Any]]
    """Keys of config.json beside those that all have."""
    parts: Mapping[str, str]
    """What `blk.N.` begins to what `model.layers.N.` begins, without `.weight` and `.bias`;
    `{expert}` stands for the expert's number where one tensor holds all of a layer."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The key of config.json and its value."""
    experts: bool = False
    interleaved: tuple[str, ...] = ()
    """Parts whose rows are in pairs, for a rotation of neighbours, and not in halves of a head."""
    norm_offset: int = 0
    """What the file has added to the weights of norms."""
    factors: tuple[str, ...] = ("rope_freqs.weight",)
    """Tensors that are divisors of rotation frequencies."""


_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MLP = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_LAYER = {**_ATTENTION, **_PRE_NORMS, **_MLP}


def _experts(block: str, gate: str, up: str, down: str) -> dict[str, str]:
    names = {"gate": gate, "up": up, "down": down}
    return {
        **_ATTENTION,
        **_PRE_NORMS,
        "ffn_gate_inp": f"{block}.gate",
        **{
            f"ffn_{ours}_exps": f"{block}.experts.{{expert}}.{theirs}"
            for ours, theirs in names.items()
        },
    }


_QWEN_EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}


def _llama(metadata: Metadata) -> dict[str, Any]:
    metadata.whole_heads()
    return {
        "attention_bias": metadata.has("attn_q.bias"),
        "mlp_bias": metadata.has("ffn_up.bias"),
        "rope_scaling": metadata.rope_scaling(),
    }


def _mixtral(metadata: Metadata) -> dict[str, Any]:
    metadata.whole_heads()
    return {
        "num_local_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "sliding_window": None,
        "rope_scaling": metadata.rope_scaling(),
    }


def _qwen(metadata: Metadata) -> dict[str, Any]:
    """Of Qwen3 too."""
    metadata.whole_heads()
    return {"use_sliding_window": False, "rope_scaling": metadata.rope_scaling()}


def _sparse(metadata: Metadata, *, normalized: bool) -> dict[str, Any]:
    metadata.expect("expert_weights_norm", normalized)
    metadata.expect("expert_weights_scale", 0.0, 1.0)
    metadata.expect("expert_gating_func", 1)
    return {
        "num_experts": metadata.number("expert_count"),
        "num_experts_per_tok": metadata.number("expert_used_count"),
        "moe_intermediate_size": metadata.number("expert_feed_forward_length"),
        "norm_topk_prob": normalized,  # what llama.cpp computes whatever config.json said
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(metadata: Metadata) -> dict[str, Any]:
    shared = metadata.number("expert_shared_feed_forward_length")
    return {
        **_qwen(metadata),
        **_sparse(metadata, normalized=False),
        "shared_expert_intermediate_size": shared,
    }


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    return {**_qwen(metadata), **_sparse(metadata, normalized=True)}


def _gemma(metadata: Metadata, largest: int) -> dict[str, Any]:
    """`largest` is the number of layers of the 27B model, whose queries are scaled otherwise: the
    file does not say how."""
    metadata.whole_heads()
    head_dim = metadata.head_dim
    if metadata.number("block_count") == largest:
        head_dim = metadata.number("embedding_length") // metadata.number("attention.head_count")
    scale = metadata.real("attention.scale", None)
    return {
        "query_pre_attn_scalar": head_dim if scale is None else scale**-2,
        "sliding_window": metadata.number("attention.sliding_window"),
        "rope_scaling": metadata.rope_scaling(),
    }


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    return {
        **_gemma(metadata, 46),
        "attn_logit_softcapping": metadata.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.real("final_logit_softcapping", 30.0),
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    metadata.expect("attention.sliding_window_pattern", 6)
    return {
        **_gemma(metadata, 62),
        "final_logit_softcapping": metadata.real("final_logit_softcapping", None),
        "rope_local_base_freq": metadata.real("rope.freq_base_swa", 10_000.0),
        "sliding_window_pattern": 6,
    }


def _phi3(metadata: Metadata) -> dict[str, Any]:
    limit = metadata.number("context_length")
    original = metadata.number("rope.scaling.original_context_length", limit)
    rotated = metadata.number("rope.dimension_count", metadata.head_dim)
    keys: dict[str, Any] = {
        "sliding_window": metadata.number("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": rotated / metadata.head_dim,
        "rope_scaling": None,
    }
    short, long = (metadata.factors(f"rope_factors_{x}.weight") for x in ("short", "long"))
    attention = metadata.real("rope.scaling.attn_factor", None)
    if short is None or long is None:
        metadata.expect("rope.scaling.type", "none")
        return keys
    scale = limit / original
    expected = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    if attention is None or np.isclose(attention, expected, rtol=1e-5):
        attention = None  # what config.json leaves out
    more = {} if attention is None else {"attention_factor": attention}
    keys["rope_scaling"] = {
        "type": "longrope",
        "short_factor": short,
        "long_factor": long,
        **more,
    }
    metadata.expect("rope.scaling.type", "none", "longrope")
    return keys


_GEMMA_PARTS = {**_ATTENTION, **_SANDWICH_NORMS, **_MLP}
_HALVES = ("attn_q", "attn_k")
_GELU = ("hidden_activation", "gelu_pytorch_tanh")

ARCHITECTURES = (
    Architecture("llama", "LlamaForCausalLM", _llama, _LAYER, interleaved=_HALVES),
    Architecture(
        "llama",
        "MixtralForCausalLM",
        _mixtral,
        _experts("block_sparse_moe", "w1", "w3", "w2"),
        experts=True,
        interleaved=_HALVES,
    ),
    Architecture("qwen2", "Qwen2ForCausalLM", _qwen, _LAYER),
    Architecture(
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        _qwen2_moe,
        {**_QWEN_EXPERTS, **_SHARED_EXPERT},
        experts=True,
    ),
    Architecture("qwen3", "Qwen3ForCausalLM", _qwen, _LAYER),
    Architecture("qwen3moe", "Qwen3MoeForCausalLM", _qwen3_moe, _QWEN_EXPERTS, experts=True),
    Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        _gemma2,
        _GEMMA_PARTS,
        activation=_GELU,
        norm_offset=1,
    ),
    Architecture(
        "gemma3",
        "Gemma3ForCausalLM",
        _gemma3,
        _GEMMA_PARTS,
        activation=_GELU,
        norm_offset=1,
    ),
    Architecture(
        "phi3",
        "Phi3ForCausalLM",
        _phi3,
        {
            **_LAYER,
            "attn_qkv": "self_attn.qkv_proj",
            "ffn_up": "mlp.gate_up_proj",
        },
        factors=("rope_factors_short.weight", "rope_factors_long.weight"),
    ),
)


def architecture_of(file: GGUFFile) -> Architecture:
    """The row of the table that a file is of.

    Raises:
      CheckpointError: when there is none, listing them.
    """
    name = file.metadata.get("general.architecture")
    experts = bool(file.metadata.get(f"{name}.expert_count"))
    found = [row for row in ARCHITECTURES if row.name == name and row.experts == experts]
    if not found:
        known = ", ".join(dict.fromkeys(row.name for row in ARCHITECTURES))
        more = f" with {name}.expert_count" if experts and name in known.split(", ") else ""
        file.refuse(
            f"general.architecture={name!r}{more} is not read, only {known}; convert the model "
            "from its Hugging Face directory instead"
        )
    return found[0]
