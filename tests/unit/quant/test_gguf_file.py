"""A directory as a GGUF file: what the reader makes of it, and what is refused."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from fornax.cli.main import main
from fornax.config import CheckpointError, ConfigError
from fornax.data import load_tokenizer
from fornax.gguf import open_gguf
from fornax.models import load_pretrained
from fornax.models.families.gguf import writable
from fornax.models.layout import flat_variables
from fornax.quant import GGUF_SCHEMES, quantize_gguf

TEXT = "def f(x):\n    return {'a': x ** 2, 'naïve': [1, 22, 4096]}  # it's"


@pytest.mark.slow
def test_a_float32_file_is_the_directory(model: Path, tmp_path: Path):
    """Bit for bit, rotated halves of heads included; its tokenizer gives the same tokens."""
    quantize_gguf(model, tmp_path / "model.gguf", GGUF_SCHEMES["f32"])
    want, read = (flat_variables(load_pretrained(x)) for x in (model, tmp_path / "model.gguf"))
    assert want.keys() == read.keys()
    for path, variable in want.items():
        np.testing.assert_array_equal(read[path][...], variable[...], str(path))
    ours, theirs = (load_tokenizer(x) for x in (tmp_path / "model.gguf", model))
    assert list(ours.encode(TEXT)) == list(theirs.encode(TEXT))
    assert (ours.eos_id, ours.bos_id, ours.pad_id) == (theirs.eos_id, theirs.bos_id, theirs.pad_id)


@pytest.mark.slow
def test_the_command_says_what_it_wrote(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Rows of 128 are not blocks of 256: those matrices are Q8_0."""
    out = tmp_path / "model.Q4_K_M.gguf"
    assert main(["quantize", str(model), "--scheme", "Q4_K_M", "--out", str(out)]) == 0
    types = {name: x.type.name for name, x in open_gguf(out).tensors.items()}
    assert types["token_embd.weight"] == types["blk.0.attn_q.weight"] == "Q8_0"
    assert types["blk.0.ffn_down.weight"] == "Q4_K"
    assert types["blk.1.ffn_down.weight"] == "Q6_K"
    assert types["blk.0.attn_norm.weight"] == "F32"
    assert "Q4_K: squared error" in capsys.readouterr().out
    logits = [
        np.asarray(jax.jit(load_pretrained(x, "float32"))(np.arange(40)[None]))
        for x in (model, out)
    ]
    assert (logits[0] - logits[1]).std() < 0.15 * logits[0].std()


def test_what_cannot_be_written_is_refused(model: Path, tmp_path: Path):
    scheme = GGUF_SCHEMES["q8_0"]
    with pytest.raises(ConfigError, match=r"folder does not end in \.gguf"):
        quantize_gguf(model, tmp_path / "folder", scheme)
    (tmp_path / "there.gguf").write_text("mine")
    with pytest.raises(CheckpointError, match="exists"):
        quantize_gguf(model, tmp_path / "there.gguf", scheme)
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json into its directory"):
        quantize_gguf(copy, tmp_path / "out.gguf", scheme)
    shutil.copyfile(model / "tokenizer.json", copy / "tokenizer.json")
    spec = json.loads((copy / "tokenizer.json").read_text())
    spec["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    (copy / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ConfigError, match="splits text as none of default, gpt-2"):
        quantize_gguf(copy, tmp_path / "out.gguf", scheme)
    with pytest.raises(ConfigError, match="OlmoForCausalLM is not written as GGUF, only Llama"):
        writable({"architectures": ["OlmoForCausalLM"]})
    assert not list(tmp_path.glob("*out.gguf*"))


def test_options_of_the_other_format_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["quantize", str(model), "--scheme", "q8_0", "--out", str(tmp_path / "x.gguf")]
    assert main([*words, "--rules", "lm_head=keep"]) == 2
    assert "--rules does not act on the GGUF scheme q8_0" in capsys.readouterr().err
