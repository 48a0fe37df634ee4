"""A run on two hosts from Python: a rank is killed, the run recovers, and no loss changes.

python examples/80_launch.py
"""

import asyncio
import tempfile
import time
from pathlib import Path

import yaml

from fornax.cluster import Cluster, Run, drill
from fornax.data import BuildConfig, Stdlib, TrainBpe, build

temporary = tempfile.TemporaryDirectory()
root = Path(temporary.name)

# A little text: one package of the standard library.
corpus = BuildConfig(
    source=Stdlib(root=Path(asyncio.__file__).parent),
    tokenizer=TrainBpe(vocab_size=512),
    holdout=0,
    output=root / "data",
)
config = {
    "model": {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 1,
        "num_heads": 2,
    },
    "data": {"source": {"type": "dataset", "path": str(build(corpus).path)}},
    "mesh": {"data": -1, "fsdp": 1},
    "seq_len": 32,
    "batch_size": 8,
    "steps": 200,
    "save_every": 50,
    "log": {"tensorboard": False, "every": 1},
}
file = root / "run.yaml"
file.write_text(yaml.safe_dump(config))


def losses(run: Run) -> list[tuple[int, float]]:
    """Of every step."""
    return [(record["step"], record["loss"]) for record in run.metrics()]


def reached(run: Run, step: int) -> None:
    """Wait until a step is recorded."""
    while not any(record["step"] >= step for record in run.metrics()):
        time.sleep(0.05)


with Cluster(hosts=2, spares=False) as cluster:
    undisturbed = cluster.train(file, run_dir=root / "undisturbed")
    assert undisturbed.wait() == 0

with Cluster(hosts=2) as cluster:
    run = cluster.train(file, run_dir=root / "run")
    reached(run, 25)
    drill(run.run_dir, "kill", 1)  # kill -9
    assert run.wait() == 0

assert losses(run) == losses(undisturbed), "a fault changed a number"
print(f"{len(losses(run))} losses, equal to the undisturbed run's bits")
for line in run.status().lines():
    print(line)
