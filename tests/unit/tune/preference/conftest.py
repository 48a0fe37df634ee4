"""A tiny decoder and rows of pairs, shared by the tests of preference and distillation.

Legend: P pairs, T tokens of a row.
"""

import dataclasses
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fornax.data import load_tokenizer, train_bpe
from fornax.models import Decoder, DecoderConfig, create_decoder, save_pretrained

V = 48
CONFIG = DecoderConfig(
    vocab_size=V, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2
)


def draw_rows(shape: tuple[int, ...], *, seed: int = 0, length: int = 16) -> dict[str, np.ndarray]:
    """Sequences of unlike length, prompts of a third of them; int32 and float32 [*shape, T]."""
    rng = np.random.default_rng(seed)
    whole = (*shape, length)
    lengths = rng.integers(length // 2, length + 1, shape)[..., None]
    prompts = lengths // 3
    place = np.broadcast_to(np.arange(length), whole)
    tokens = rng.integers(1, V, whole)
    tokens = np.where(place < lengths, tokens, 0)
    targets = np.concatenate([tokens[..., 1:], np.zeros((*shape, 1), int)], axis=-1)
    trained = (place >= prompts - 1) & (place < lengths - 1)
    return {
        "tokens": tokens.astype(np.int32),
        "targets": np.where(trained, targets, 0).astype(np.int32),
        "loss_weights": trained.astype(np.float32),
        "segment_ids": (place < lengths).astype(np.int32),
        "positions": np.where(place < lengths, place, 0).astype(np.int32),
    }


@pytest.fixture(scope="session")
def rows() -> Any:
    return draw_rows


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    return create_decoder(CONFIG, seed=1)


WORDS = ("good", "fine", "bad", "poor", "red", "blue", "tea", "milk")


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bytes, three special tokens and a few words."""
    path = tmp_path_factory.mktemp("tokenizer")
    train_bpe([" ".join(WORDS) * 20], 280).save(path)
    return path


@pytest.fixture(scope="session")
def model_dir(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a Hugging Face directory, with its tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    size = load_tokenizer(tokenizer_dir).vocab_size
    config = dataclasses.replace(CONFIG, vocab_size=size)
    save_pretrained(create_decoder(config, seed=1), path, tokenizer_dir)
    return path


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture(scope="session")
def pairs_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Forty pairs: what is chosen ends in a good word."""
    rng = random.Random(0)
    lines = [
        {
            "prompt": f"{rng.choice(WORDS[4:])} {rng.choice(WORDS[4:])} is",
            "chosen": f" {rng.choice(WORDS[:2])}",
            "rejected": f" {rng.choice(WORDS[2:4])} {rng.choice(WORDS[4:])}",
        }
        for _ in range(40)
    ]
    return write_lines(tmp_path_factory.mktemp("data") / "pairs.jsonl", lines)
