"""Every token is scored once, with the context promised, and the sums are those of the logits."""

import json
import math
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from fornax.config.errors import ConfigError, DataError
from fornax.data.tokenizer import train_bpe
from fornax.evaluate import EvaluateConfig
from fornax.evaluate.model import open_model
from fornax.evaluate.perplexity import (
    document_nats,
    measure_perplexity,
    read_documents,
    windows,
)
from fornax.models import Decoder, DecoderConfig, create_decoder, save_pretrained


@hypothesis.given(length=st.integers(0, 60), context=st.integers(2, 20), stride=st.integers(1, 19))
def test_windows_predict_each_token_once_with_enough_context(
    length: int, context: int, stride: int
) -> None:
    stride = min(stride, context - 1)
    seen: list[int] = []
    for start, end, first in windows(length, context, stride):
        assert end - start <= context
        assert first > start
        for token in range(first, end):
            assert token - start >= min(token, context - stride)
        seen += range(first, end)
    assert seen == list(range(1, length))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    config = DecoderConfig(
        vocab_size=290,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        max_position_embeddings=64,
    )
    return create_decoder(config, seed=0)


@pytest.fixture(scope="module")
def model(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_bpe(["one two three\n" * 20], 270)
    tokenizer.save(folder / "tokenizer")
    save_pretrained(decoder, folder / "hf", folder / "tokenizer")
    return folder / "hf"


def test_nats_are_those_of_the_logits(decoder: Decoder) -> None:
    generator = np.random.default_rng(0)
    sequences = [generator.integers(0, 290, n).astype(np.int32) for n in (5, 1, 23, 16)]
    found = document_nats(decoder, sequences, context=16, stride=8, batch=3)
    pieces = [(n, *w) for n, tokens in enumerate(sequences) for w in windows(len(tokens), 16, 8)]
    padded = np.zeros((len(pieces), 16), np.int32)
    for row, (n, start, end, _) in enumerate(pieces):
        padded[row, : end - start] = sequences[n][start:end]
    logprobs = np.asarray(jax.nn.log_softmax(jax.jit(decoder)(padded).astype(np.float32)))
    expected = np.zeros(len(sequences))
    for row, (n, start, end, first) in enumerate(pieces):
        expected[n] -= sum(logprobs[row, i - start - 1, sequences[n][i]] for i in range(first, end))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_file_in_bits_per_byte(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three\n" * 9)
    (tmp_path / "b.jsonl").write_text('{"text": "één"}\n\n{"text": "two", "more": 1}\n')
    paths = (str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl"))
    subject = open_model(str(model))
    found = measure_perplexity(subject, EvaluateConfig(model=str(model), text=paths, context=16))
    assert (found.documents, found.bytes) == (3, 9 * 14 + 5 + 3)
    total = found.loss.value * found.tokens
    assert found.bits_per_byte.value == pytest.approx(total / math.log(2) / found.bytes)
    assert found.perplexity.value == pytest.approx(math.exp(found.loss.value))
    assert found.loss.low < found.loss.value < found.loss.high
    with pytest.raises(ConfigError, match=r"context=65 is beyond the 64 positions"):
        measure_perplexity(subject, EvaluateConfig(model=str(model), text=paths, context=65))


def test_documents_come_from_text_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("whole\nfile\n")
    lines = [json.dumps({"body": f"line {n}"}) for n in range(3)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    paths = [str(tmp_path / "a.py"), str(tmp_path / "b.jsonl")]
    assert list(read_documents(paths, "body", None)) == [
        "whole\nfile\n",
        *(f"line {n}" for n in range(3)),
    ]
    assert len(list(read_documents(paths, "body", 2))) == 2
    with pytest.raises(
        DataError, match=r"b.jsonl:1: there is no text in the column text; it has body"
    ):
        list(read_documents(paths, "text", None))
    with pytest.raises(DataError, match="cannot be read as text"):
        list(read_documents([str(tmp_path / "none.txt")], "text", None))
