"""GGUF files of transformers models, written by the package gguf with its own table of names."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

__all__ = ["write_gguf"]

_MODELS = {
    "gemma3_text": "gemma3",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
_KINDS = gguf.GGMLQuantizationType


def write_gguf(
    model: Any, path: Path, kind: str = "F32", more: Mapping[str, Any] | None = None
) -> Path:
    """Write a model as llama.cpp's converter does.

    Args:
      model: the transformers model.
      path: of the file.
      kind: the type of matrices; vectors and routers are F32.
      more: further keys under the architecture's name, as the methods of `gguf.GGUFWriter` whose
        names they are behind `add_`.
    """
    config = model.config
    name = _MODELS.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, name)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    for key, value in (more or {}).items():
        if value is not None:
            getattr(writer, f"add_{key}")(value)
    tokens = [*(f"t{number}" for number in range(config.vocab_size - 3)), "a", "b", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (config.vocab_size - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for tensor, array in _tensors(model, name):
        quantized = _KINDS[kind] if array.ndim > 1 and "gate_inp" not in tensor else _KINDS.F32
        if "rope_" in tensor:
            quantized = _KINDS.F32
        writer.add_tensor(tensor, gguf.quants.quantize(array, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: Any, name: str) -> Iterator[tuple[str, np.ndarray]]:
    config = model.config
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for key, value in model.state_dict().items():
        if tied and key == "lm_head.weight":
            continue
        array = value.float().numpy()
        if name in ("gemma2", "gemma3") and key.endswith("norm.weight"):
            array = array + np.float32(1)
        if key.endswith("experts.gate_up_proj"):  # transformers' own tensors of all experts
            layer = key.split(".")[2]
            for part, half in zip(("gate", "up"), np.split(array, 2, axis=1), strict=True):
                yield f"blk.{layer}.ffn_{part}_exps.weight", half
            continue
        if key.endswith("experts.down_proj"):
            yield f"blk.{key.split('.')[2]}.ffn_down_exps.weight", array
            continue
        stem, _, ending = key.rpartition(".")
        for part, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
        ):
            if name == "llama" and stem.endswith(part):
                array = torch.from_numpy(array)
                split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
                array = split.transpose(1, 2).reshape(array.shape).numpy()
        found = names.get_name(stem)
        assert found is not None, key
        if key.endswith("shared_expert_gate.weight"):
            array = array[0]
        yield f"{found}.{ending}", np.ascontiguousarray(array)
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        plain = 1 / rope["rope_theta"] ** (np.arange(0, config.head_dim, 2) / config.head_dim)
        found = model.model.rotary_emb.inv_freq.double().numpy()
        yield "rope_freqs.weight", (plain / found).astype(np.float32)
    for part in ("short", "long"):
        if name == "phi3" and f"{part}_factor" in rope:
            yield f"rope_factors_{part}.weight", np.array(rope[f"{part}_factor"], np.float32)
