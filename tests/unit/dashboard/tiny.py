"""A pretraining run small enough to be made by a test: its data, its config, the run."""

import json
import random
from pathlib import Path

from fornax.data import BuildConfig, DataConfig, Dataset, Jsonl, TrainBpe, build
from fornax.models import DecoderConfig
from fornax.train import EvalConfig, LogConfig, TrainConfig, train


def train_tiny(folder: Path, steps: int = 12) -> Path:
    """Train a decoder of two layers on made-up words; the run directory, `folder/runs/tiny`."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 7))) for _ in range(200)]
    lines = [{"text": " ".join(rng.choices(words, k=rng.randint(5, 90)))} for _ in range(100)]
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = build(
        BuildConfig(
            source=Jsonl(path=str(folder / "text.jsonl")),
            output=folder / "built",
            tokenizer=TrainBpe(vocab_size=280),
            holdout=0.1,
        )
    )
    config = TrainConfig(
        model=DecoderConfig(
            vocab_size=280,
            hidden_size=32,
            intermediate_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
        ),
        data=DataConfig(source=Dataset(path=str(data.path))),
        seq_len=32,
        batch_size=8,
        steps=steps,
        save_every=6,
        eval=EvalConfig(every=6, batches=1),
        log=LogConfig(tensorboard=False),
    )
    train(config, folder / "runs" / "tiny", progress="none")
    return folder / "runs" / "tiny"
