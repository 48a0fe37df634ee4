"""Reinforce what a model answers: GRPO with a reward function of your own.

A tiny fresh model learns to answer with the letter "e". Real runs begin with a trained model.

python examples/63_grpo.py
"""

import json
import tempfile
from pathlib import Path

from fornax.data import train_bpe
from fornax.models import DecoderConfig, create_decoder, save_pretrained
from fornax.optim import AdamW, Constant, OptimConfig
from fornax.train import read_metrics
from fornax.tune import tune
from fornax.tune.config import DrGRPO, GRPOConfig, RolloutConfig

REWARD = '''
def score(prompt, completion, letter):
    """Any function of the prompt, the completion and the other columns of the line."""
    return completion.count(letter) / 8
'''

with tempfile.TemporaryDirectory() as root:
    folder = Path(root)
    tokenizer = train_bpe(["Answer with letters, please."], vocab_size=262)
    tokenizer.save(folder / "tokenizer")
    model = DecoderConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        eos_token_ids=(tokenizer.eos_id,),
        family="llama",
    )
    save_pretrained(create_decoder(model, seed=0), folder / "model", folder / "tokenizer")
    (folder / "rewards.py").write_text(REWARD)
    lines = [{"prompt": f"Answer {number}:", "letter": "e"} for number in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    config = GRPOConfig(
        model=str(folder / "model"),
        data=str(folder / "prompts.jsonl"),
        reward=(f"{folder / 'rewards.py'}:score",),
        algorithm=DrGRPO(),
        steps=25,
        batch_size=64,
        group_size=16,
        max_length=32,
        rollout=RolloutConfig(max_tokens=8),
        optim=OptimConfig(
            optimizer=AdamW(weight_decay=0.0), learning_rate=0.05, schedule=Constant()
        ),
        doctor=False,  # it would refuse: a fresh model does not know yet how to end
    )
    tune(config, folder / "run", progress="none")
    rewards = [record["reward"] for record in read_metrics(folder / "run" / "metrics.jsonl")]
    samples = (folder / "run" / "samples.jsonl").read_text().splitlines()

print("reward", " ".join(f"{reward:.2f}" for reward in rewards[::4]))
print("last completion:", json.loads(samples[-1])["completion"])
assert rewards[-1] > rewards[0] + 0.3
