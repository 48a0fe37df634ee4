"""Train, be refused, resume: the trainer as a library.

python examples/20_train.py
"""

import asyncio
import dataclasses
import tempfile
from pathlib import Path

from fornax.config import ConfigError
from fornax.data import BuildConfig, DataConfig, Dataset, Stdlib, TrainBpe, build, load_tokenizer
from fornax.models import DecoderConfig, generate
from fornax.optim import AdamW, OptimConfig
from fornax.train import EvalConfig, TrainConfig, load_run, read_metrics, train

temporary = tempfile.TemporaryDirectory()
root = Path(temporary.name)

# A little text: one package of the standard library.
corpus = BuildConfig(
    source=Stdlib(root=Path(asyncio.__file__).parent),
    tokenizer=TrainBpe(vocab_size=512),
    holdout=0.1,
    output=root / "data",
)
dataset = build(corpus)

config = TrainConfig(
    model=DecoderConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4
    ),
    data=DataConfig(source=Dataset(path=str(dataset.path))),
    seq_len=64,
    steps=40,
    optim=OptimConfig(optimizer=AdamW(), learning_rate=3e-3),
    eval=EvalConfig(every=20, batches=4),
    save_every=20,
)
result = train(config, root / "run", progress="none")
print(f"{result.reason} at step {result.step}: {result.evaluation}")

# The run directory has checkpoints now: a config that would change what is learned is refused.
longer = dataclasses.replace(config, steps=80)
try:
    train(longer, root / "run", progress="none")
except ConfigError as error:
    print(f"refused: {error}")

result = train(longer, root / "run", accept_changes=["steps"], progress="none")
for record in read_metrics(root / "run" / "metrics.jsonl"):
    if "eval/loss" in record:
        print(f"step {record['step']}: {record['eval/bits_per_byte']:.2f} bits per byte held out")
assert result.step == 80
assert result.goodput is not None
print(f"{result.goodput.attempts} attempts, {result.goodput.wall_seconds:.1f} s in all")

tokenizer = load_tokenizer(dataset.path / "tokenizer")
prompt = tokenizer.encode("async def ")
(tokens,) = generate(load_run(root / "run").model, [prompt], max_tokens=12)
print(repr(tokenizer.decode([*prompt, *tokens])))
temporary.cleanup()
