"""GGUF files that Fornax writes: blocks equal the package gguf's, models equal transformers'."""

import json
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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fornax.gguf import TYPES, quantize
from fornax.models import load_pretrained
from fornax.quant.gguf_file import quantize_gguf
from fornax.quant.gguf_schemes import GGUF_SCHEMES

pytestmark = pytest.mark.parity
TOLERANCE = 1e-4
_TYPES = gguf.GGMLQuantizationType
_KINDS = {kind.name: kind for kind in TYPES.values()}


def numbers(rows: int = 64, columns: int = 512) -> np.ndarray:
    """Rows of all sizes, some of them zeros, some with few large numbers."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, columns)) * rng.lognormal(0, 2, (rows, 1))
    x[0], x[1, :256] = 0, 0
    x[2] = rng.standard_t(2, columns)
    x[3] = np.abs(x[3])
    return x.astype(np.float32)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_blocks_are_those_of_gguf(name: str) -> None:
    x = numbers()
    want = gguf.quants.quantize(x, _TYPES[name])
    np.testing.assert_array_equal(quantize(x, _KINDS[name]), want.view(np.uint8))


@pytest.mark.parametrize(("name", "most"), [("Q4_K", 0.0075), ("Q6_K", 0.00061)])
def test_k_types_lose_no_more_than_llama_cpp(name: str, most: float) -> None:
    """Squared error by gguf's own reading, as a share. On Gaussian rows ggml's has 0.0072 and
    0.00060."""
    x = np.random.default_rng(0).normal(size=(256, 1024)).astype(np.float32)
    read = gguf.quants.dequantize(quantize(x, _KINDS[name]), _TYPES[name])
    assert ((read - x) ** 2).sum() / (x**2).sum() < most


def add_tokenizer(folder: Path, vocab_size: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 3], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"})
    )


def directory(name: str, folder: Path, **changes: Any) -> tuple[Any, np.ndarray]:
    """A directory of one of the cases with a vocabulary of bytes; its oracle, and tokens."""
    config, length = build(name)
    config.vocab_size = 320
    for key, value in changes.items():
        setattr(config, key, value)
    oracle = make_oracle(config)
    oracle.save_pretrained(folder)
    add_tokenizer(folder, 300)
    return oracle, np.random.default_rng(0).integers(3, 300, (2, length), dtype=np.int32)


CASES: dict[str, dict[str, Any]] = {
    "llama-tied": {},
    "llama-wide-heads": {},
    "llama-biases": {},
    "llama-linear": {},
    "qwen2": {},
    "qwen2-yarn": {},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "phi4-mini": {},
    "mixtral": {},
    "qwen2-moe": {},
    "qwen3-moe": {},
}


@pytest.mark.parametrize("name", CASES)
def test_a_float32_file_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    oracle, tokens = directory(name, tmp_path / "hf", **CASES[name])
    report = quantize_gguf(tmp_path / "hf", tmp_path / "model.gguf", GGUF_SCHEMES["f32"])
    assert set(report.types) == {"F32"}
    assert report.errors["F32"] < 1e-14  # of norms to which one is added
    theirs = oracle_logits(oracle, tokens)
    ours = nnx.jit(load_pretrained(tmp_path / "model.gguf"))(tokens)
    assert np.abs(np.asarray(ours) - theirs).max() < TOLERANCE


@pytest.mark.parametrize("scheme", ["f16", "q8_0", "q4_0", "q4_k_m", "q6_k"])
def test_transformers_reads_the_same_model(scheme: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    directory("llama2", tmp_path / "hf", **sizes)
    path = tmp_path / "model.gguf"
    report = quantize_gguf(tmp_path / "hf", path, GGUF_SCHEMES[scheme])
    assert (
        set(report.types) - {"F32"}
        == {
            "f16": {"F16"},
            "q8_0": {"Q8_0"},
            "q4_0": {"Q4_0", "Q6_K"},
            "q4_k_m": {"Q4_K", "Q6_K"},
            "q6_k": {"Q6_K"},
        }[scheme]
    )
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = np.random.default_rng(0).integers(3, 300, (2, 16), dtype=np.int32)
    ours = load_pretrained(path, "float32")(tokens)
    assert np.abs(np.asarray(ours) - oracle_logits(read, tokens)).max() < TOLERANCE
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    text = "the quick brown fox's 42 jumps\n over naïve dogs"
    own = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    assert tokenizer.encode(text, add_special_tokens=False) == own.encode(text).ids
