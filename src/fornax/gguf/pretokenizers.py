"""How byte-level vocabularies of GGUF files split text: `tokenizer.ggml.pre` to expressions.

They are those of the models' own tokenizer.json, by which llama.cpp's were made. A text is split
into the matches of the first expression and what lies between, each of these by the second, and so
on.
"""

from dataclasses import dataclass

__all__ = ["PRE_TOKENIZERS", "PreTokenizer"]

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    """The expression of GPT-4 and what came after it, with this many digits together."""
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased_words(ending: str, digits: str) -> str:
    """That of GPT-4o, which parts words where lower case turns into upper case."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}"
        rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


@dataclass(frozen=True)
class PreTokenizer:
    """One way of splitting."""

    splits: tuple[str, ...]
    """Expressions, in order."""
    whole_words: bool = False
    """Whether a piece that is a token is taken as it is, without merges."""
    bos: bool = False
    """Whether a text begins with the beginning-of-sequence token where the file does not say."""
    compose: bool = False
    """Whether characters are composed first (Unicode's form C)."""


_LLAMA3 = PreTokenizer((_words("{1,3}"),), whole_words=True, bos=True)
_QWEN2 = PreTokenizer((_words(""),))
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_GPT4 = PreTokenizer((_words("{1,3}"),))
_GPT4O = PreTokenizer((_cased_words(f"{_CONTRACTION}?", "{1,3}"),))

PRE_TOKENIZERS = {
    "default": PreTokenizer(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    ),
    "gpt-2": PreTokenizer((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "qwen2": PreTokenizer((_words(""),), compose=True),
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "stablelm2": _QWEN2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "dbrx": _GPT4,
    "smaug-bpe": _GPT4,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "tekken": PreTokenizer((_cased_words("", ""),), whole_words=True, bos=True),
}
"""By the name in the file."""
