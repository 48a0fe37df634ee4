"""Gemma 3 and 4, Llama 4, Mistral 3, Qwen3.5 with vision towers: the decoder alone is loaded."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file
from tests.parity.conftest import oracle_logits

from fornax.models import Decoder, load_pretrained, save_pretrained

pytestmark = pytest.mark.parity
TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 5,
    "query_pre_attn_scalar": 8,
    "initializer_range": 0.3,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
_GEMMA3_ONLY = ("query_pre_attn_scalar", "rope_scaling")
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Any, Path]:
    config = transformers.Gemma3Config(
        text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4, image_token_index=96
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "whole")
    return model, tmp_path / "whole"


def _compare(oracle: Any, folder: Path) -> None:
    tokens = np.random.default_rng(0).integers(3, 90, (2, 24), dtype=np.int32)
    theirs = oracle_logits(oracle, tokens)
    assert theirs.std() > 0.3
    assert np.abs(np.asarray(load_pretrained(folder)(tokens)) - theirs).max() < 1e-4


def test_logits_agree(folder: tuple[Any, Path]) -> None:
    _compare(*folder)


def test_the_sparse_config_of_the_first_releases(folder: tuple[Any, Path]) -> None:
    """They give the text model's sizes, window and scaling, and leave the rest to defaults."""
    oracle, path = folder
    values = json.loads((path / "config.json").read_text())
    values["text_config"] = {**TEXT, "model_type": "gemma3_text"}
    values["eos_token_id"] = [1, 96]
    (path / "config.json").write_text(json.dumps(values))
    _compare(oracle, path)
    assert load_pretrained(path).config.eos_token_ids == (1, 96)


def test_the_names_inside_the_library(folder: tuple[Any, Path]) -> None:
    oracle, path = folder
    tensors = load_file(path / "model.safetensors")
    renamed = {
        f"model.{name}".replace("model.language_model.model.", "model.language_model."): tensor
        for name, tensor in tensors.items()
    }
    assert "model.language_model.norm.weight" in renamed
    save_file(renamed, path / "model.safetensors")
    _compare(oracle, path)


def test_it_is_saved_as_the_text_model(folder: tuple[Any, Path], tmp_path: Path) -> None:
    oracle, path = folder
    save_pretrained(load_pretrained(path), tmp_path / "text")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    assert type(again) is transformers.Gemma3ForCausalLM
    tokens = np.arange(3, 27, dtype=np.int32)[None]
    np.testing.assert_allclose(
        oracle_logits(again, tokens), oracle_logits(oracle, tokens), atol=1e-5
    )


QWEN_TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "initializer_range": 0.3,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}


def test_qwen_with_a_vision_tower_is_its_text_model(tmp_path: Path) -> None:
    config = transformers.Qwen3_5Config(text_config=QWEN_TEXT, vision_config=QWEN_VISION)
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "whole")
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in stored)
    save_pretrained(load_pretrained(tmp_path / "whole"), tmp_path / "text")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    assert type(again) is transformers.Qwen3_5ForCausalLM
    tokens = np.arange(3, 27, dtype=np.int32)[None]
    np.testing.assert_allclose(
        oracle_logits(again, tokens), oracle_logits(model, tokens), atol=1e-5
    )


_DECODER = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
}
_MISTRALS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 2, "sliding_window": None},
    "ministral3": {"num_key_value_heads": 2, "head_dim": 16},
    "mistral4": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 20,
        "q_lora_rank": 12,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 14,
    },
}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
}


@pytest.mark.parametrize("kind", _MISTRALS)
@pytest.mark.parametrize("tied", [False, True])
def test_mistral3_is_its_text_model(kind: str, tied: bool, tmp_path: Path) -> None:
    text = {**_DECODER, **_MISTRALS[kind], "model_type": kind}
    config = transformers.Mistral3Config(
        text_config=text, vision_config=_PIXTRAL, tie_word_embeddings=tied
    )
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "whole")
    _compare(model, tmp_path / "whole")
    ours = load_pretrained(tmp_path / "whole")
    assert ours.config.tie_embeddings is tied
    _save_as_text(ours, model, tmp_path / "text", kind)


def test_llama4_with_a_vision_tower_is_its_text_model(tmp_path: Path) -> None:
    text = {
        **_DECODER,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size_mlp": 40,
        "num_local_experts": 2,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8,
    }
    widths = dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32)
    vision = {**_PIXTRAL, **widths, "intermediate_size": 32, "model_type": "llama4_vision_model"}
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    model = transformers.Llama4ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "whole")
    _compare(model, tmp_path / "whole")
    ours = load_pretrained(tmp_path / "whole")
    _save_as_text(ours, model, tmp_path / "text", "llama4_text")


def test_gemma4_with_a_vision_tower_is_its_text_model(tmp_path: Path) -> None:
    text = {
        **{key: value for key, value in TEXT.items() if key not in _GEMMA3_ONLY},
        "global_head_dim": 16,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
    }
    vision = {**VISION, "head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 64}
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
    model = transformers.Gemma4ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "whole")
    _compare(model, tmp_path / "whole")
    ours = load_pretrained(tmp_path / "whole")
    _save_as_text(ours, model, tmp_path / "text", "gemma4_text")


def _save_as_text(ours: Decoder, model: Any, folder: Path, kind: str) -> None:
    save_pretrained(ours, folder)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert again.config.model_type == kind
    tokens = np.arange(3, 27, dtype=np.int32)[None]
    np.testing.assert_allclose(
        oracle_logits(again, tokens), oracle_logits(model, tokens), atol=1e-5
    )
