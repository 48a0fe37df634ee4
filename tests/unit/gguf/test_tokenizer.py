"""The tokenizer in a file is the library's, by every way in which models are loaded."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.gguf.files import TINY, tiny_tokenizer, write, write_tiny

from fornax.config.errors import CheckpointError
from fornax.data import load_tokenizer
from fornax.gguf import TYPES, end_tokens, open_gguf
from fornax.gguf.pretokenizers import PRE_TOKENIZERS
from fornax.llm.text.chat_template import ChatTemplate
from fornax.models import load_pretrained, save_pretrained
from fornax.models.families.gguf.architectures import ARCHITECTURES

_TEXTS = ("the thing", "in  the\n\nring", "größe 東京", "<tool> the <|im_end|>", "")


def test_byte_level(tmp_path: Path) -> None:
    """Merges in their order, added tokens found first, the beginning put in front."""
    tokenizer = load_tokenizer(write_tiny(tmp_path / "a.gguf"))
    backend = tokenizer.backend
    backend.encode_special_tokens = False
    encoded = backend.encode("the thing<|im_end|><tool>")
    assert encoded.tokens == ["<|begin|>", "the", "\u0120", "th", "ing", "<|im_end|>", "<tool>"]
    assert encoded.ids[-2:] == [298, 299]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (297, None, None)
    for text in _TEXTS:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert backend.decode(ids, skip_special_tokens=False) == text
    assert backend.decode([299, 298], skip_special_tokens=True) == "<tool>"


def _sentencepiece(**changed: Any) -> dict[str, Any]:
    pieces = {"\u2581": -9.0, "a": -10.0, "b": -11.0, "ab": -1.0, "\u2581a": -2.0, "ba": -0.5}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *pieces, "  "]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([0.0] * 259 + [*pieces.values(), 0.0], np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3, *[6] * 256, *[1] * 6, 4], np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return {**TINY, **metadata, **changed}


@pytest.mark.parametrize(
    ("text", "prefixed", "bare"),
    [
        ("ab", ["\u2581", "ab"], ["ab"]),  # "ab" has a higher score than "\u2581a"
        ("aba", ["\u2581a", "ba"], ["a", "ba"]),  # "ba" has the highest
        ("a a", ["\u2581a", "\u2581a"], ["a", "\u2581a"]),
        ("a  b", ["\u2581a", "  ", "\u2581", "b"], ["a", "  ", "b"]),  # a new text begins there
        ("é", ["\u2581", "<0xC3>", "<0xA9>"], ["<0xC3>", "<0xA9>"]),
    ],
)
def test_sentencepiece(text: str, prefixed: list[str], bare: list[str], tmp_path: Path) -> None:
    """Of two pairs the one whose token has the higher score is merged first, and what has no token
    becomes bytes."""
    for tokens, prefix in ((prefixed, True), (bare, False)):
        metadata = _sentencepiece(**{"tokenizer.ggml.add_space_prefix": prefix})
        path = write(tmp_path / f"{prefix}.gguf", metadata, {})
        backend = load_tokenizer(path).backend
        found = backend.encode(text)
        assert found.tokens == ["<s>", *tokens]
        if "  " not in text:
            assert backend.decode(found.ids) == text


def test_roles_templates_and_ends(tmp_path: Path) -> None:
    """Chat templates by name; a token that ends a turn ends a completion although the file names
    the end of a text only."""
    names = {"tokenizer.chat_template.tool_use": "T", "tokenizer.ggml.eos_token_id": 0}
    path = write_tiny(tmp_path / "a.gguf", **{k.replace(".", "__"): x for k, x in names.items()})
    template = ChatTemplate.find(path)
    assert template is not None
    assert template.sources["tool_use"] == "T"
    assert template.render([{"role": "user", "content": "x"}]) == "x<|im_end|>"
    assert end_tokens(open_gguf(path)) == [0, 298]


@pytest.mark.slow
def test_saved_beside_a_model(tmp_path: Path) -> None:
    """A directory with its files is the same tokenizer and the same template."""
    path = write_tiny(tmp_path / "a.gguf")
    save_pretrained(load_pretrained(path), tmp_path / "hf", path)
    ours, saved = load_tokenizer(path), load_tokenizer(tmp_path / "hf")
    assert json.loads(saved.backend.to_str()) == json.loads(ours.backend.to_str())
    assert (saved.bos_id, saved.eos_id) == (ours.bos_id, ours.eos_id)
    template = ChatTemplate.find(tmp_path / "hf")
    assert template is not None
    assert template.sources == {"default": tiny_tokenizer()["tokenizer.chat_template"]}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"tokenizer.ggml.model": "t5"},
            "tokenizer.ggml.model='t5' is not read, only gpt2 and llama",
        ),
        ({"tokenizer.ggml.model": 3}, "tokenizer.ggml.model is a int"),
        ({"tokenizer.ggml.pre": "falcon"}, "tokenizer.ggml.pre='falcon' is not read, only default"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "has 'a' twice"),
        ({"tokenizer.ggml.tokens": None}, "has no tokenizer"),
        ({"tokenizer.ggml.token_type": np.array([1], np.int32)}, "for each of the 300 tokens"),
        ({"tokenizer.ggml.merges": ["x yz"]}, "has 'x yz', which are not two tokens"),
        ({"tokenizer.ggml.merges": None}, "merges is not a list"),
        ({"tokenizer.ggml.bos_token_id": 300}, "bos_token_id=300 is none of the 300 tokens"),
        ({"tokenizer.ggml.add_eos_token": True}, "tokenizer.ggml.eos_token_id is not"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores is missing"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    """The message names the file and the key."""
    metadata = {**TINY, **tiny_tokenizer(), **changed}
    if changed.get("tokenizer.ggml.tokens") == ["a", "a"]:
        metadata["tokenizer.ggml.token_type"] = np.array([1, 1], np.int32)
        del metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.add_bos_token"]
    kept = {key: x for key, x in metadata.items() if x is not None}
    path = write(tmp_path / "a.gguf", kept, {})
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_the_guide_lists_what_is_read() -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/models.md").read_text(encoding="utf-8")
    rows = guide[guide.index("## GGUF files") : guide.index("## On a mesh")]
    names = [*PRE_TOKENIZERS, *(row.name for row in ARCHITECTURES)]
    assert [name for name in names if f"`{name}`" not in rows] == []
    assert [kind.name for kind in TYPES.values() if kind.name not in rows] == []
