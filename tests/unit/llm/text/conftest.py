"""Small tokenizers: a trained byte-level one and SentencePiece-style ones made by hand."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from fornax.data import train_bpe

_TEXT = ["hello wörld 日本語 🎉🎉 the quick brown fox jumps", "def main():\n    return 1\n"]


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """A byte-level BPE with two added tokens that are not special."""
    backend = train_bpe(_TEXT * 20, 400).backend
    backend.add_tokens(
        [AddedToken("<tool_call>", special=False), AddedToken(" <b>", special=False)]
    )
    return backend


def _sentencepiece(steps: list[decoders.Decoder]) -> Tokenizer:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [*"▁abcdehlorw", "he", "ll", "hell", "▁w", "or", "▁▁"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("▁", "w"), ("o", "r"), ("▁", "▁")]
    model = models.BPE(
        vocab={word: number for number, word in enumerate(words)},
        merges=merges,
        unk_token="<unk>",
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")  # pyrefly: ignore[missing-attribute]
    backend.decoder = decoders.Sequence(steps)  # pyrefly: ignore[missing-attribute]
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


@pytest.fixture(scope="session")
def llama() -> Tokenizer:
    """As Llama 2's: one space is dropped at the start of a text."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _sentencepiece([*steps, decoders.Strip(" ", 1, 0)])


@pytest.fixture(scope="session")
def gemma() -> Tokenizer:
    """As Gemma's: every space is kept."""
    return _sentencepiece([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """A decoder that the token table does not describe."""
    return _sentencepiece([decoders.ByteFallback(), decoders.Metaspace("▁", "first")])
