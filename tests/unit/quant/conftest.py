"""A small float model with its tokenizer, and text."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fornax.data import load_tokenizer, train_bpe
from fornax.models import (
    Decoder,
    DecoderConfig,
    create_decoder,
    save_pretrained,
    token_logprobs,
)

CONFIG = DecoderConfig(
    vocab_size=384,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=128,
    initializer_range=0.1,
    tie_embeddings=True,
)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSON lines: sixteen documents of 1,200 words of a language that was drawn, in which a word
    says which are likely to follow, in indented lines."""
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list("etaoinshrdlucm"), 1 + draw.poisson(4))) for _ in range(400)]
    likely = 1 / np.arange(1, len(words) + 1) ** 1.2
    likely /= likely.sum()
    followers = [draw.permutation(len(words)) for _ in words]
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    with file.open("w") as out:
        for _ in range(16):
            at, found = 0, []
            for rank in draw.choice(len(words), 1200, p=likely):
                at = int(followers[at][rank])
                found.append(words[at] + (":\n" + "    " * (rank % 3) if rank % 13 == 12 else ""))
            out.write(json.dumps({"text": " ".join(found)}) + "\n")
    return file


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Path:
    """A directory."""
    folder = tmp_path_factory.mktemp("model")
    lines = texts.read_text().splitlines()
    train_bpe([json.loads(line)["text"] for line in lines[:4]], 384).save(folder / "tokenizer")
    save_pretrained(create_decoder(CONFIG, seed=1), folder / "float", folder / "tokenizer")
    return folder / "float"


@pytest.fixture(scope="session")
def outliers(tmp_path_factory: pytest.TempPathFactory, model: Path, texts: Path) -> Path:
    """A directory whose model is trained a little, and whose first MLP has in each group of inputs
    of `down` one that is never there and whose weights are large: few bits are left to the rest."""
    folder = tmp_path_factory.mktemp("outliers")
    decoder = create_decoder(CONFIG, seed=1)
    tokenizer = load_tokenizer(model)
    ids = [x for line in texts.read_text().splitlines() for x in tokenizer.encode(_text(line))]
    rows_NT = np.array(ids[: len(ids) // 64 * 64], np.int32).reshape(-1, 64)
    _train(decoder, rows_NT)
    mlp = decoder.layers.mlp
    up_LDF, down_LFD = (np.array(x.kernel[...]) for x in (mlp.up, mlp.down))
    dead_F = [0, 128]
    up_LDF[0, :, dead_F] = 0
    down_LFD[0, dead_F] = 30 * down_LFD[0].std() * np.sign(down_LFD[0, dead_F])
    mlp.up.kernel.set_value(jnp.asarray(up_LDF))
    mlp.down.kernel.set_value(jnp.asarray(down_LFD))
    save_pretrained(decoder, folder / "float", model)
    return folder / "float"


def _text(line: str) -> str:
    return json.loads(line)["text"]


def _train(decoder: Decoder, rows_NT: np.ndarray) -> None:
    graphdef, state = nnx.split(decoder)
    optimizer = optax.adam(5e-3)
    moments = optimizer.init(state)

    @jax.jit
    def step(state, moments, rows_BT):
        def loss(state):
            found = token_logprobs(nnx.merge(graphdef, state), rows_BT[:, :-1], rows_BT[:, 1:])
            return -found.logprobs.mean()

        updates, moments = optimizer.update(jax.grad(loss)(state), moments)
        return optax.apply_updates(state, updates), moments

    draw = np.random.default_rng(0)
    for _ in range(60):
        state, moments = step(state, moments, rows_NT[draw.integers(0, len(rows_NT), 8)])
    nnx.update(decoder, state)
