"""The tokenizer of a GGUF file as the files beside a Hugging Face model say it.

Two kinds are read. `gpt2`: byte-level BPE with merges. `llama`: SentencePiece's BPE, where the pair
whose token has the highest score is merged first; its merges are made from the scores, as
transformers makes them (`generate_merges`), and characters without a token become their bytes.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fornax.gguf.file import GGUFFile, Value, open_gguf
from fornax.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer

__all__ = ["end_tokens", "special_token", "tokenizer_file", "tokenizer_json", "write_tokenizer"]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
"""Types of tokens."""
_SPACE = "\u2581"
"""What stands for a space in SentencePiece's tokens."""
_KINDS = ("gpt2", "llama")
_ENDS = ("eos", "eot", "eom")
_END_TEXTS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
)
"""Control tokens that end a turn, whatever the file says: many name the end of a text only."""


def tokenizer_file(path: str | Path, name: str) -> str | None:
    """The contents of tokenizer.json or tokenizer_config.json; None for another name.

    Raises:
      CheckpointError: a file that is damaged, has no tokenizer, or one of a kind that is not read.
    """
    return _FILES[name](open_gguf(path)) if name in _FILES else None


def write_tokenizer(path: str | Path, folder: Path) -> None:
    """Write both files of a GGUF file's tokenizer into a directory.

    Raises:
      CheckpointError: see `tokenizer_file`.
      OSError: they cannot be written.
    """
    for name in _FILES:
        (folder / name).write_text(tokenizer_file(path, name) or "", encoding="utf-8")


def tokenizer_json(file: GGUFFile) -> str:
    """The contents of tokenizer.json.

    Raises:
      CheckpointError: see `tokenizer_file`.
    """
    kind, tokens = _kind(file), _tokens(file)
    types = _types(file, len(tokens))
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, types),
        "post_processor": _template(file, tokens),
        **(_byte_level(file, tokens) if kind == "gpt2" else _sentencepiece(file, tokens, types)),
    }
    return json.dumps(spec, ensure_ascii=False)


def _config(file: GGUFFile) -> str:
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {role: special_token(file, theirs) for role, theirs in roles.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _adds_bos(file),
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": _tokens(file)[x] for role, x in ids.items() if x is not None},
    }
    if templates := _chat_templates(file):
        config["chat_template"] = templates
    return json.dumps(config, ensure_ascii=False, indent=2)


_FILES = {"tokenizer.json": tokenizer_json, "tokenizer_config.json": _config}


def special_token(file: GGUFFile, role: str) -> int | None:
    """The id of a special token such as `bos`, `eos`, `padding`; None where the file has none.

    Raises:
      CheckpointError: an id beyond the vocabulary.
    """
    key = f"tokenizer.ggml.{role}_token_id"
    number = file.metadata.get(key)
    if number is None:
        return None
    count = len(_tokens(file))
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
        file.refuse(f"{key}={number!r} is none of the {count} tokens; write the file again")
    return number


def end_tokens(file: GGUFFile) -> list[int]:
    """Tokens that end a completion: those that the file names, its end-of-text token first, and
    those among its control tokens that end a turn. Empty where it has no tokenizer."""
    if "tokenizer.ggml.tokens" not in file.metadata:
        return []
    tokens = _tokens(file)
    types = _types(file, len(tokens))
    named = [number for role in _ENDS if (number := special_token(file, role)) is not None]
    control = {tokens[number]: int(number) for number in np.flatnonzero(types == _CONTROL)}
    known = [control[text] for text in _END_TEXTS if text in control]
    return list(dict.fromkeys([*named, *known]))


def _tokens(file: GGUFFile) -> list[str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        file.refuse(
            "has no tokenizer (tokenizer.ggml.tokens is not a list of texts); give one with "
            "--tokenizer"
        )
    return tokens


def _kind(file: GGUFFile) -> str:
    model = _typed(file, "tokenizer.ggml.model", str, None)
    if model not in _KINDS:
        file.refuse(
            f"tokenizer.ggml.model={model!r} is not read, only {' and '.join(_KINDS)}; give the "
            "model's tokenizer.json with --tokenizer"
        )
    return model


def _way(file: GGUFFile) -> PreTokenizer:
    name = _typed(file, "tokenizer.ggml.pre", str, "default")
    if name not in PRE_TOKENIZERS:
        file.refuse(
            f"tokenizer.ggml.pre={name!r} is not read, only {', '.join(PRE_TOKENIZERS)}; give the "
            "model's tokenizer.json with --tokenizer"
        )
    return PRE_TOKENIZERS[name]


def _adds_bos(file: GGUFFile) -> bool:
    default = True if _kind(file) == "llama" else _way(file).bos
    return _typed(file, "tokenizer.ggml.add_bos_token", bool, default)


def _types(file: GGUFFile, count: int) -> np.ndarray:
    return _numbers(file, "tokenizer.ggml.token_type", count, _NORMAL)


def _numbers(file: GGUFFile, key: str, count: int, default: float) -> np.ndarray:
    given = file.metadata.get(key)
    if given is None:
        return np.full(count, default)
    if not isinstance(given, np.ndarray) or len(given) != count:
        file.refuse(f"{key} must have a number for each of the {count} tokens")
    return given


def _typed(file: GGUFFile, key: str, kind: type, default: Any) -> Any:
    value: Value | None = file.metadata.get(key, default)
    if not isinstance(value, kind):
        found = "is missing" if key not in file.metadata else f"is a {type(value).__name__}"
        file.refuse(f"{key} {found}, and must be a {kind.__name__}; write the file again")
    return value


def _vocabulary(file: GGUFFile, tokens: Sequence[str]) -> dict[str, int]:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(x for number, x in enumerate(tokens) if vocabulary[x] != number)
        file.refuse(f"tokenizer.ggml.tokens has {twice!r} twice; write the file again")
    return vocabulary


def _byte_level(file: GGUFFile, tokens: list[str]) -> dict[str, Any]:
    """Parts of tokenizer.json."""
    way = _way(file)
    vocabulary = _vocabulary(file, tokens)
    split = [
        {"type": "Split", "pattern": {"Regex": x}, "behavior": "Isolated", "invert": False}
        for x in way.splits
    ]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    return {
        "normalizer": {"type": "NFC"} if way.compose else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*split, {**bytes_, "use_regex": False}],
        },
        "decoder": {**bytes_, "use_regex": True},
        "model": _bpe(vocabulary, _merges(file, vocabulary), ignore_merges=way.whole_words),
    }


def _merges(file: GGUFFile, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    given = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(given, list):
        file.refuse("tokenizer.ggml.merges is not a list of texts; write the file again")
    merges = []
    for merge in given:
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            file.refuse(
                f"tokenizer.ggml.merges has {merge!r}, which are not two tokens that make a third; "
                "write the file again"
            )
        merges.append((left, right))
    return merges


def _sentencepiece(file: GGUFFile, tokens: list[str], types: np.ndarray) -> dict[str, Any]:
    """Parts of tokenizer.json."""
    vocabulary = _vocabulary(file, tokens)
    if "tokenizer.ggml.scores" not in file.metadata:
        file.refuse("tokenizer.ggml.scores is missing; give a tokenizer with --tokenizer")
    scores = _numbers(file, "tokenizer.ggml.scores", len(tokens), 0.0)
    unknown = special_token(file, "unknown")
    if unknown is None and (marked := np.flatnonzero(types == _UNKNOWN)).size:
        unknown = int(marked[0])
    prefix = _typed(file, "tokenizer.ggml.add_space_prefix", bool, True)
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    begin = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*begin, escape]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": _bpe(
            vocabulary,
            _scored_merges(vocabulary, scores, types),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _scored_merges(
    vocabulary: Mapping[str, int], scores: np.ndarray, types: np.ndarray
) -> list[tuple[str, str]]:
    """All pairs of tokens that make a third, those of the highest score first."""
    plain = ~np.isin(types, (_UNKNOWN, _CONTROL, _BYTE))
    made = {token: number for token, number in vocabulary.items() if plain[number]}
    found = []
    for token, number in made.items():
        score = float(scores[number])
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in made and right in made:
                found.append((score, len(left), len(right), left, right))
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [merge[3:] for merge in found]


def _bpe(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], **options: Any
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": vocabulary,
        "merges": merges,
    }


def _added(tokens: Sequence[str], types: np.ndarray) -> list[dict[str, Any]]:
    """Tokens that are found in a text before it is split: control tokens, and those that users
    defined."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    found = np.flatnonzero(np.isin(types, (_UNKNOWN, _CONTROL, _USER_DEFINED))).tolist()
    return [
        {
            "id": number,
            "content": tokens[number],
            **flags,
            "special": int(types[number]) != _USER_DEFINED,
        }
        for number in found
    ]


def _template(file: GGUFFile, tokens: Sequence[str]) -> dict[str, Any] | None:
    """What is put around a text, if anything."""
    wanted = {
        "bos": _adds_bos(file),
        "eos": _typed(file, "tokenizer.ggml.add_eos_token", bool, False),
    }
    around: dict[str, list[Any]] = {"bos": [], "eos": []}
    special = {}
    for role in [role for role, asked in wanted.items() if asked]:
        number = special_token(file, role)
        if number is None:
            file.refuse(
                f"tokenizer.ggml.add_{role}_token is set and tokenizer.ggml.{role}_token_id is "
                "not; give a tokenizer with --tokenizer"
            )
        token = tokens[number]
        around[role] = [{"SpecialToken": {"id": token, "type_id": 0}}]
        special[token] = {"id": token, "ids": [number], "tokens": [token]}
    if not special:
        return None
    first, second = ({"Sequence": {"id": x, "type_id": 0}} for x in "AB")
    single = [*around["bos"], first, *around["eos"]]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *around["bos"], second, *around["eos"]],
        "special_tokens": special,
    }


def _chat_templates(file: GGUFFile) -> str | list[dict[str, str]] | None:
    """A template, or templates by name."""
    key = "tokenizer.chat_template"
    named = {
        "default" if name == key else name.removeprefix(f"{key}."): text
        for name, text in file.metadata.items()
        if (name == key or name.startswith(f"{key}.")) and isinstance(text, str)
    }
    if set(named) <= {"default"}:
        return named.get("default")
    return [{"name": name, "template": text} for name, text in named.items()]
