"""Teach a model to prefer short answers with DPO, and let a reward model judge the change.

python examples/62_dpo.py

It makes its own model of two layers, so it needs no download and runs in seconds; with a model of
yours the lines that matter are the two configs and the calls.
"""

import json
import math
import random
import tempfile
from pathlib import Path

from fornax.adapters import LoRA
from fornax.data import train_bpe
from fornax.models import DecoderConfig, create_decoder, save_pretrained
from fornax.optim import Constant, OptimConfig
from fornax.train import EvalConfig, read_metrics
from fornax.tune import tune
from fornax.tune.config import DPO, PreferenceConfig, RewardModelConfig
from fornax.tune.reward_model import load_reward_model

temporary = tempfile.TemporaryDirectory()
root = Path(temporary.name)

# Pairs: the same prompt, a better and a worse answer.
rng = random.Random(0)
drinks, colours = ("tea", "milk", "juice", "water"), ("red", "white", "green", "clear")


def pair() -> dict[str, str]:
    drink, colour = rng.choice(drinks), rng.choice(colours)
    return {
        "prompt": f"is {drink} {colour}?",
        "chosen": f" {rng.choice(('yes', 'no'))}",
        "rejected": f" well, {drink} may be {rng.choice(colours)}",
    }


pairs = [pair() for _ in range(64)]
(root / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in pairs))

# A model with fresh weights, as a Hugging Face directory.
tokenizer = train_bpe(["".join(line.values()) for line in pairs], vocab_size=320)
tokenizer.save(root / "tokenizer")
model = DecoderConfig(
    vocab_size=320, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4
)
save_pretrained(create_decoder(model), root / "model", root / "tokenizer")

shared = {
    "model": str(root / "model"),
    "data": str(root / "pairs.jsonl"),
    "max_length": 64,
    "steps": 20,
    "lora": LoRA(rank=8),
    "optim": OptimConfig(learning_rate=1e-2, schedule=Constant()),
    "doctor": False,  # its checks take longer than this training; leave it on in real runs
}
dpo = PreferenceConfig(loss=DPO(beta=0.1), eval_share=0.25, eval=EvalConfig(every=20), **shared)
result = tune(dpo, root / "dpo", progress="none")
steps = list(read_metrics(root / "dpo" / "metrics.jsonl"))

# Policy and reference are one model at first, so the loss starts at ln 2.
print(f"loss at step 1: {steps[0]['loss']:.4f} (ln 2 = {math.log(2):.4f})")
assert abs(steps[0]["loss"] - math.log(2)) < 1e-4
assert result.evaluation is not None
for name in ("accuracy", "reward_margin", "logps_chosen", "logps_rejected"):
    print(f"held out, {name}: {result.evaluation[name]:.2f}")
assert result.evaluation["accuracy"] > 0.9

# The same pairs train a reward model, which scores any answer to any prompt.
tune(RewardModelConfig(centre=0.01, **shared), root / "reward", progress="none")
judge = load_reward_model(root / "reward")
answers = [" no", " well, tea may be green"]
scores = judge.score(["is tea green?"] * 2, answers)
for answer, score in zip(answers, scores, strict=True):
    print(f"{score:+.2f} {answer!r}")
assert scores[0] > scores[1]
temporary.cleanup()
