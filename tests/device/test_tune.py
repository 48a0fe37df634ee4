"""GRPO whose sampler shares the trainer's device: rewards rise, and the first ratio is one."""

import json
from pathlib import Path

from tests.device.machine import ON_GPU, as_on_gpu

from fornax.data import train_bpe
from fornax.models import DecoderConfig, create_decoder, save_pretrained
from fornax.optim import AdamW, Constant, OptimConfig
from fornax.train import read_metrics
from fornax.tune import tune
from fornax.tune.config import DrGRPO, GRPOConfig, RolloutConfig

REWARD = """
def score(prompt, completion, letter):
    return completion.count(letter) / 8
"""


def test_grpo_on_one_device(tmp_path: Path) -> None:
    tokenizer = train_bpe(["Answer with letters, please."], vocab_size=262)
    tokenizer.save(tmp_path / "tokenizer")
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "head_dim": 64}
    small = {"hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "head_dim": 8}
    model = DecoderConfig(
        **(wide if ON_GPU else small),
        vocab_size=tokenizer.vocab_size,
        num_layers=1,
        max_position_embeddings=64,
        eos_token_ids=(tokenizer.eos_id or 0,),
        family="llama",
    )
    save_pretrained(create_decoder(model, seed=0), tmp_path / "model", tmp_path / "tokenizer")
    (tmp_path / "rewards.py").write_text(REWARD)
    lines = [{"prompt": f"Answer {number}:", "letter": "e"} for number in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = GRPOConfig(
        model=str(tmp_path / "model"),
        data=str(tmp_path / "prompts.jsonl"),
        reward=(f"{tmp_path / 'rewards.py'}:score",),
        algorithm=DrGRPO(),
        steps=12 if ON_GPU else 4,
        batch_size=64 if ON_GPU else 16,
        group_size=16 if ON_GPU else 8,
        max_length=32,
        rollout=RolloutConfig(max_tokens=8),
        optim=OptimConfig(
            optimizer=AdamW(weight_decay=0.0), learning_rate=0.02, schedule=Constant()
        ),
        doctor=False,
    )
    with as_on_gpu():
        tune(config, tmp_path / "run", progress="none")
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert abs(records[0]["ratio_max"] - 1) < 1e-2
    assert all(record["loss"] == record["loss"] for record in records)
    if ON_GPU:
        assert records[-1]["reward"] > records[0]["reward"]
