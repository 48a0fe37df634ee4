"""A GGUF file is loaded as the model that it says, or refused for what it says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.gguf.files import TINY, tiny_tensors, tiny_tokenizer, write, write_tiny

from fornax.config.errors import CheckpointError, ConfigError
from fornax.gguf import open_gguf
from fornax.models import config_from_hf, open_pretrained, read_config, stored_dtypes
from fornax.models.families.gguf import gguf_tensors


def _read(path: Path, name: str, **options: Any) -> np.ndarray:
    """One parameter."""
    return np.asarray(open_pretrained(path, **options).read(name))


def test_rows_of_heads_are_put_in_halves(tmp_path: Path) -> None:
    """The rows 2 i and 2 i + 1 of a head in the file are the rows i and i + half here."""
    path = write_tiny(tmp_path / "a.gguf")
    stored = tiny_tensors()
    for part, heads in (("q", 4), ("k", 2)):
        found = _read(path, f"layers/attention/{part}/kernel")
        for layer in range(2):
            rows = stored[f"blk.{layer}.attn_{part}.weight"].reshape(heads, 8, 32)
            kernel = found[layer].transpose(1, 2, 0)
            np.testing.assert_array_equal(kernel[:, :4], rows[:, 0::2])
            np.testing.assert_array_equal(kernel[:, 4:], rows[:, 1::2])


def test_quantized_matrices_and_their_dtype(tmp_path: Path) -> None:
    """Codes times scales, in bfloat16 unless told otherwise, beside vectors of float32."""
    tensors: dict[str, np.ndarray] = tiny_tensors()
    codes = np.random.default_rng(1).integers(-127, 128, (32, 64), dtype=np.int8)
    tensors["blk.1.ffn_down.weight"] = codes
    path = write(tmp_path / "a.gguf", {**TINY, **tiny_tokenizer()}, tensors)
    assert stored_dtypes(path) == {"bfloat16"}
    assert open_pretrained(path).dtype == "bfloat16"
    found = _read(path, "layers/mlp/down/kernel", dtype="float32")[1]
    np.testing.assert_array_equal(found.T, codes * np.float32(0.5))


def test_float16_needs_a_choice(tmp_path: Path) -> None:
    tensors = {
        name: x.astype(np.float16) if x.ndim > 1 else x for name, x in tiny_tensors().items()
    }
    path = write(tmp_path / "a.gguf", {**TINY, **tiny_tokenizer()}, tensors)
    with pytest.raises(ConfigError, match="stored as float16; say which dtype"):
        open_pretrained(path)
    found = _read(path, "embed/embedding", dtype="float32")
    np.testing.assert_array_equal(found, tensors["token_embd.weight"])


def test_embeddings_are_tied_where_the_file_has_one_table(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    del tensors["output.weight"]
    path = write(tmp_path / "a.gguf", {**TINY, **tiny_tokenizer()}, tensors)
    assert config_from_hf(read_config(path)).tie_embeddings
    assert "lm_head/kernel" not in open_pretrained(path).blocks


def _described(path: Path, **metadata: Any) -> dict[str, Any]:
    """The config.json of a file with a table of embeddings and nothing else."""
    table = {"token_embd.weight": np.zeros((8, 32), np.float32)}
    name = metadata.pop("general.architecture")
    keys = {key.replace("llama.", f"{name}."): x for key, x in TINY.items()}
    keys |= {key if "." in key else f"{name}.{key}": x for key, x in metadata.items()}
    kept = {key: x for key, x in keys.items() if x is not None}
    return read_config(write(path, {**kept, "general.architecture": name}, table))


def test_gemma_2_of_the_largest_size_scales_queries_by_its_width(tmp_path: Path) -> None:
    """Files do not say how; of all sizes 27B alone has another factor."""
    caps = {"gemma2.attention.sliding_window": 16, "gemma2.attention.key_length": 16}
    caps |= {"gemma2.rope.dimension_count": 16}
    for layers, scalar in ((26, 16), (42, 16), (46, 8)):
        values = _described(
            tmp_path / f"{layers}.gguf",
            **{"general.architecture": "gemma2", "gemma2.block_count": layers, **caps},
        )
        assert config_from_hf(values).query_pre_attn_scalar == scalar


REFUSED: dict[str, dict[str, Any]] = {
    "general.architecture='bert' is not read, only llama": {"general.architecture": "bert"},
    "general.architecture='qwen3' with qwen3.expert_count": {
        "general.architecture": "qwen3",
        "expert_count": 4,
    },
    "attention.sliding_window=16": {"llama.attention.sliding_window": 16},
    "rope.dimension_count=4": {"llama.rope.dimension_count": 4},
    "rope.scaling.type='longrope'": {"llama.rope.scaling.type": "longrope"},
    "layers differ": {"llama.attention.head_count_kv": np.array([2, 4], np.int32)},
    "block_count=None": {"llama.block_count": None},
    "block_count='two'": {"llama.block_count": "two"},
    "rms_epsilon is missing": {"llama.attention.layer_norm_rms_epsilon": None},
    "freq_base=-1.0": {"llama.rope.freq_base": -1.0},
    "value_length=4": {"llama.attention.value_length": 4},
    "vocab_size=9": {"llama.vocab_size": 9},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_refused(said: str, tmp_path: Path) -> None:
    """The message names the file and the key."""
    path = tmp_path / "a.gguf"
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        _described(path, **{"general.architecture": "llama", **REFUSED[said]})
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_scales_that_are_no_numbers(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray] = {"token_embd.weight": np.zeros((8, 32), np.int8)}
    path = write(tmp_path / "a.gguf", TINY, tensors)
    raw = bytearray(path.read_bytes())
    raw[-34:-32] = np.float16("nan").tobytes()
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"token_embd.weight .Q8_0. holds scales"):
        gguf_tensors(open_gguf(path))["model.embed_tokens.weight"].view()


def test_tensors_that_the_architecture_does_not_have(tmp_path: Path) -> None:
    """They are named as the file names them."""
    tensors = {**tiny_tensors(), "blk.0.ssm_a.weight": np.ones(3, np.float32)}
    path = write(tmp_path / "a.gguf", {**TINY, **tiny_tokenizer()}, tensors)
    with pytest.raises(CheckpointError, match=r"unexpected blk.0.ssm_a.weight \[3\]"):
        open_pretrained(path)
