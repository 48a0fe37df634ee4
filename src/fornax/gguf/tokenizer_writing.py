"""The tokenizer of a Hugging Face directory as metadata of a GGUF file: `tokenizer`'s inverse.

A file says how a byte-level vocabulary splits text by a name. The name is found by trying: each
that `pretokenizers` has is read back, and the first whose tokens of some texts are the directory's
is taken. So what is written is known to be read as it was.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from fornax.config.errors import ConfigError
from fornax.config.json_files import read_json_object
from fornax.gguf.file import GGUFFile, Value
from fornax.gguf.pretokenizers import PRE_TOKENIZERS
from fornax.gguf.tokenizer import tokenizer_json

__all__ = ["tokenizer_metadata"]

_MISSING = "a GGUF file has its tokenizer in it: put the model's tokenizer.json into its directory"

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Types of tokens."""
_TEXTS = (
    "Hello, world! It's 3.14159 and 1234567 of them -- don't you'LL see?",
    "  two spaces\n\n\n three lines\t\ttabs \r\n end   ",
    "def f(x_1, *args):\n    return {'a': x_1 ** 2, \"b\": [1, 22, 333]}  # CamelCase\n",
    "Größe naïve café ÀÉÎ; Ελληνικά, кириллица, 中文字符和標點。日本語のテスト한국어",
    "e\u0301 a\u030a \u00bd \u2460 \u0661\u0662\u0663 🙂👩‍👩‍👧 ₿ €100 №5 https://x.org/a/b?c=d&e=%20f",
    "HTTPServer XMLHttpRequest iPhone12 A1b2C3 ...!!!??? (/) <|x|> $$ ^ ~ |",
)


def tokenizer_metadata(
    folder: Path, *, vocab_size: int, ends: Sequence[int], bos: int | None, pad: int | None
) -> dict[str, Value]:
    """The keys `tokenizer.*`.

    Args:
      folder: with tokenizer.json, and tokenizer_config.json and chat_template.jinja where it has
        them.
      vocab_size: rows of the table of embeddings: tokens that the tokenizer lacks are unused ones.
      ends: tokens that end a text, the first of which is the file's.
      bos: the token that begins a text, where config.json names one.
      pad: the same of padding.

    Raises:
      CheckpointError: no tokenizer.json, or a damaged one.
      ConfigError: a kind of tokenizer that a file cannot say, or one that would be read as another.
    """
    spec = read_json_object(folder / "tokenizer.json", _MISSING)
    beside = folder / "tokenizer_config.json"
    options = read_json_object(beside) if beside.exists() else {}
    model = spec.get("model") or {}
    if model.get("type") != "BPE":
        raise ConfigError(
            f"{folder / 'tokenizer.json'} is a {model.get('type')} tokenizer; a GGUF file takes "
            "BPE, by bytes or SentencePiece's"
        )
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if own.get_vocab_size() > vocab_size:
        raise ConfigError(
            f"{folder / 'tokenizer.json'} has {own.get_vocab_size()} tokens and config.json "
            f"vocab_size={vocab_size}; use the model's own tokenizer"
        )
    bytewise = bool(model.get("byte_fallback"))
    tokens, types = _tokens(spec, own, vocab_size, bytewise=bytewise)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    found: dict[str, Value] = {
        "tokenizer.ggml.model": "llama" if bytewise else "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        **_special(own, options, ends=ends, bos=bos, pad=pad, unk=model.get("unk_token")),
    }
    if template := _chat_template(folder, options):
        found["tokenizer.chat_template"] = template
    if bytewise:
        found["tokenizer.ggml.scores"] = _scores(tokens, model["merges"])
        tries = [{"tokenizer.ggml.add_space_prefix": prefix} for prefix in (True, False)]
    else:
        found["tokenizer.ggml.merges"] = merges
        tries = [{"tokenizer.ggml.pre": name} for name in PRE_TOKENIZERS]
    want = [own.encode(text, add_special_tokens=False).ids for text in _TEXTS]
    for more in tries:
        read = Tokenizer.from_str(tokenizer_json(GGUFFile(folder, {**found, **more}, {})))
        if [read.encode(text, add_special_tokens=False).ids for text in _TEXTS] == want:
            return {**found, **more}
    known = "" if bytewise else f": it splits text as none of {', '.join(PRE_TOKENIZERS)} does"
    raise ConfigError(
        f"{folder / 'tokenizer.json'} gives other tokens than a GGUF file of it would{known}; take "
        "a scheme of compressed-tensors, such as w4a16"
    )


def _tokens(
    spec: Mapping[str, Any], own: Tokenizer, vocab_size: int, *, bytewise: bool
) -> tuple[list[str], np.ndarray]:
    """Tokens and their types by id."""
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = np.full(vocab_size, _UNUSED, np.int32)
    for token, number in own.get_vocab(with_added_tokens=True).items():
        if number >= vocab_size:
            raise ConfigError(
                f"token {token!r} has the number {number}, and config.json vocab_size={vocab_size}"
            )
        tokens[number], types[number] = token, _NORMAL
        if bytewise and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[number] = _BYTE
    for added in spec.get("added_tokens") or ():
        types[added["id"]] = _CONTROL if added.get("special") else _USER_DEFINED
    unknown = (spec["model"] or {}).get("unk_token")
    if bytewise and unknown is not None:
        types[own.token_to_id(unknown)] = _UNKNOWN
    return tokens, types


def _special(
    own: Tokenizer,
    options: Mapping[str, Any],
    *,
    ends: Sequence[int],
    bos: int | None,
    pad: int | None,
    unk: str | None,
) -> dict[str, Value]:
    """Numbers of special tokens, and whether a text begins with one."""

    def named(role: str, default: int | None) -> int | None:
        given = options.get(f"{role}_token")
        text = given.get("content") if isinstance(given, dict) else given
        number = own.token_to_id(text) if isinstance(text, str) else None
        return default if number is None else number

    ids = {
        "bos": named("bos", bos),
        "eos": ends[0] if ends else named("eos", None),
        "padding": named("pad", pad),
        "unknown": None if unk is None else own.token_to_id(unk),
    }
    plain, whole = (own.encode("a", add_special_tokens=added).ids for added in (False, True))
    found: dict[str, Value] = {
        f"tokenizer.ggml.{role}_token_id": number
        for role, number in ids.items()
        if number is not None
    }
    found["tokenizer.ggml.add_bos_token"] = whole[:1] == [ids["bos"]] and whole[1:2] == plain[:1]
    found["tokenizer.ggml.add_eos_token"] = len(whole) > 1 and whole[-1] == ids["eos"]
    return found


def _chat_template(folder: Path, options: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    given = options.get("chat_template")
    if isinstance(given, list):
        given = next((each["template"] for each in given if each.get("name") == "default"), None)
    return given if isinstance(given, str) else None


def _scores(tokens: Sequence[str], merges: Sequence[Any]) -> np.ndarray:
    """Scores that put merges into their order: that of the token that a merge makes falls."""
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    order = {made: number for number, made in enumerate(dict.fromkeys(map("".join, pairs)))}
    return np.array([-order.get(token, len(order)) for token in tokens], np.float32)
