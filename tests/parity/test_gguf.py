"""GGUF files: numbers equal the package gguf's, models equal transformers'."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from tests.parity.cases import build
from tests.parity.conftest import make_oracle, oracle_logits
from tests.parity.gguf_files import write_gguf

from fornax.gguf import TYPES, dequantize
from fornax.models import load_pretrained, read_config, save_pretrained

pytestmark = pytest.mark.parity
TOLERANCE = 1e-4
_TYPES = gguf.GGMLQuantizationType


@pytest.mark.parametrize("number", TYPES)
def test_random_blocks_equal_those_of_gguf(number: int) -> None:
    """Every bit of a block is a code, a scale or an offset that some file can hold."""
    kind = TYPES[number]
    assert gguf.GGML_QUANT_SIZES[_TYPES(number)] == (kind.size, kind.bytes)
    assert _TYPES(number).name == kind.name
    rng = np.random.default_rng(number)
    raw = rng.integers(0, 256, (7, kind.bytes * (1024 // kind.size)), dtype=np.uint8)
    for scale in {"d", "m"} & set(kind.layout.names or ()):
        blocks = raw.view(kind.layout)
        blocks[scale] = rng.standard_normal(blocks.shape)
    ours = dequantize(raw, kind).astype(np.float32)
    np.testing.assert_array_equal(
        ours.view(np.uint32), gguf.quants.dequantize(raw, _TYPES(number)).view(np.uint32)
    )


_YARN = {
    "rope_scaling_type": gguf.RopeScalingType.YARN,
    "rope_scaling_factor": 4.0,
    "rope_scaling_orig_ctx_len": 16,
}
_LINEAR = {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": 4.0}
_GEMMA = {"sliding_window": 5}
_EXPERTS = {"expert_count": 8, "expert_used_count": 3}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama-tied": ({}, {}),
    "llama-wide-heads": ({}, {}),
    "llama-biases": ({}, {}),
    "llama-linear": ({}, _LINEAR),
    "llama-llama3": ({}, {}),
    "qwen2": ({}, {}),
    "qwen2-yarn": ({}, _YARN),
    "qwen3": ({}, {}),
    "gemma2": (
        {"query_pre_attn_scalar": 16},
        _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": ({"query_pre_attn_scalar": 16}, _GEMMA),
    "gemma3-linear": (
        {"query_pre_attn_scalar": 16},
        _GEMMA
        | _LINEAR
        | {
            "rope_scaling_factor": 8.0,
            "rope_freq_base_swa": 100.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "phi4-mini": (
        {},
        {"rope_scaling_orig_ctx_len": 16, "rope_scaling_attn_factors": 1.5**0.5},
    ),
    "mixtral": ({}, _EXPERTS | {"expert_used_count": 2}),
    "qwen2-moe": (
        {},
        _EXPERTS | {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40},
    ),
    "qwen3-moe": ({"norm_topk_prob": True}, _EXPERTS | {"expert_feed_forward_length": 24}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_agree(name: str, tmp_path: Path) -> None:
    """A file of float32 is the model that it was made from."""
    config, length = build(name)
    own, more = CASES[name]
    for key, value in own.items():
        setattr(config, key, value)
    oracle = make_oracle(config)
    tokens = np.random.default_rng(0).integers(3, 97, (2, length), dtype=np.int32)
    theirs = oracle_logits(oracle, tokens)
    model = load_pretrained(write_gguf(oracle, tmp_path / "model.gguf", more=more))
    ours = nnx.jit(model)(tokens)
    assert theirs.std() > 0.3
    assert np.abs(np.asarray(ours) - theirs).max() < TOLERANCE


@pytest.mark.parametrize("theta", [500_000.0, 10_000.0])
def test_divisors_of_llama3_are_recognised(theta: float, tmp_path: Path) -> None:
    """A file has the divisors of frequencies, not what they were made from."""
    config, _ = build("llama2")
    config.head_dim, config.max_position_embeddings = 64, 131_072
    config.rope_parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    path = write_gguf(make_oracle(config), tmp_path / "model.gguf")
    kept = {key: x for key, x in config.rope_parameters.items() if key != "rope_theta"}
    assert read_config(path)["rope_scaling"] == kept


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama2", "Q8_0"), ("qwen2", "Q4_0"), ("llama-tied", "Q5_1"), ("llama2", "F16")],
)
def test_quantized_files_are_what_transformers_reads(name: str, kind: str, tmp_path: Path) -> None:
    """The same file by both: the same weights, then the same logits."""
    config, length = build(name)
    config.intermediate_size = 64
    path = write_gguf(make_oracle(config), tmp_path / "model.gguf", kind)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model = load_pretrained(path, "float32")
    tokens = np.random.default_rng(0).integers(3, 97, (2, length), dtype=np.int32)
    assert np.abs(np.asarray(model(tokens)) - oracle_logits(oracle, tokens)).max() < TOLERANCE
    save_pretrained(model, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    for key, value in oracle.state_dict().items():
        np.testing.assert_array_equal(again[key].numpy(), value.numpy(), key)
