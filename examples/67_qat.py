"""Train a model for the 3 bits that it will be served in, beside rounding it afterwards.

python examples/67_qat.py
"""

import asyncio
import dataclasses
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from fornax.data import BuildConfig, DataConfig, Dataset, Stdlib, TrainBpe, build
from fornax.models import DecoderConfig, load_pretrained
from fornax.optim import OptimConfig
from fornax.quant import QuantConfig, plan_qat, quantize
from fornax.train import TrainConfig, convert, load_decoder, train

temporary = tempfile.TemporaryDirectory()
root = Path(temporary.name)

# 1. A little text: one package of the standard library, and another one to measure on.
package = Path(asyncio.__file__).parent
dataset = build(
    BuildConfig(
        source=Stdlib(root=package),
        tokenizer=TrainBpe(vocab_size=512),
        holdout=0.0,
        output=root / "data",
    )
)
texts = [file.read_text() for file in sorted((package.parent / "json").glob("*.py"))]
(root / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

# 2. A small model, and from there the same steps again: as before, or with rounded weights.
config = TrainConfig(
    model=DecoderConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4
    ),
    data=DataConfig(source=Dataset(path=str(dataset.path))),
    seq_len=64,
    batch_size=16,
    steps=60,
    optim=OptimConfig(learning_rate=3e-3),
)
train(config, root / "base", progress="none")
more = dataclasses.replace(
    config, init_from=str(root / "base"), optim=OptimConfig(learning_rate=1e-3)
)
runs = {"float": more, "qat": dataclasses.replace(more, quant=QuantConfig(qat="w3a16"))}

# 3. Both in 3 bits.
for name, run in runs.items():
    train(run, root / name, progress="none")
    convert(root / name, root / f"{name}-hf")
    report = quantize(
        root / f"{name}-hf",
        root / f"{name}-w3",
        scheme="w3a16",
        data=str(root / "texts.jsonl"),
        length=64,
    )
    assert report.held_out is not None
    losses = (report.held_out.float_loss, report.held_out.loss)
    print(f"{name}: {losses[0]:.4f} nats per token; {losses[1]:.4f} in 3 bits")

# 4. Of the second, the numbers in the file are those that training saw, bit for bit.
trained, read = load_decoder(root / "qat"), load_pretrained(root / "qat-w3")
quantizer = plan_qat(trained, runs["qat"].quant)
assert quantizer is not None
seen, stored = (nnx.to_pure_dict(nnx.state(model, nnx.Param)) for model in (trained, read))
pairs = zip(jax.tree.leaves(jax.jit(quantizer.round)(seen)), jax.tree.leaves(stored), strict=True)
assert all((np.asarray(a) == np.asarray(b)).all() for a, b in pairs)
print(f"bit for bit: {quantizer}")
temporary.cleanup()
