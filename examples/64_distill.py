"""Distil a wide model into a narrow one: on every logit, then on the likeliest, stored on disk.

python examples/64_distill.py

It makes its own models, so it needs no download and runs in seconds. The teacher here is random; a
student that comes to agree with it has learned its logits, for there is nothing else to learn.
"""

import json
import random
import tempfile
from pathlib import Path

from fornax.data import train_bpe
from fornax.models import DecoderConfig, create_decoder, save_pretrained
from fornax.optim import Constant, OptimConfig
from fornax.train import read_metrics
from fornax.tune import tune
from fornax.tune.config import DistillConfig, TopLogits

temporary = tempfile.TemporaryDirectory()
root = Path(temporary.name)

rng = random.Random(0)
words = ["".join(rng.choices("abcde", k=rng.randint(2, 5))) for _ in range(40)]
lines = [{"text": " ".join(rng.choices(words, k=12))} for _ in range(64)]
(root / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

# One tokenizer, two shapes: distillation compares the probabilities of the same tokens.
train_bpe([line["text"] for line in lines], vocab_size=320).save(root / "tokenizer")
for name, width, layers in (("teacher", 96, 3), ("student", 48, 2)):
    shape = DecoderConfig(
        vocab_size=320, hidden_size=width, intermediate_size=96, num_layers=layers, num_heads=4
    )
    save_pretrained(create_decoder(shape, seed=width), root / name, root / "tokenizer")

shared = {
    "model": str(root / "student"),
    "data": str(root / "text.jsonl"),
    "max_length": 64,
    "steps": 30,
    "optim": OptimConfig(learning_rate=3e-3, schedule=Constant()),
    "doctor": False,  # its checks take longer than this training; leave it on in real runs
}
runs = {
    "every logit": DistillConfig(teacher=str(root / "teacher"), **shared),
    # Written by one pass of the teacher, as no run has yet; later runs that name the same path
    # read them, and need no teacher.
    "top 32 of them, stored": DistillConfig(
        teacher=str(root / "teacher"),
        divergence="jensen_shannon",
        logits=TopLogits(k=32, path=str(root / "logits")),
        **shared,
    ),
}
for name, config in runs.items():
    out = root / config.divergence
    tune(config, out, progress="none")
    steps = list(read_metrics(out / "metrics.jsonl"))
    first, last = steps[0], steps[-1]
    print(
        f"{name}: divergence {first['divergence']:.4f} to {last['divergence']:.4f}, "
        f"same likeliest token {first['agreement']:.0%} to {last['agreement']:.0%}"
    )
    assert last["divergence"] < first["divergence"]
temporary.cleanup()
