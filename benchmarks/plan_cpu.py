"""Predicted step time beside the measured one on this machine: `python benchmarks/plan_cpu.py`.

The same train step is compiled for this CPU, predicted from its text and the machine's measured
peaks (`fornax.mesh.hardware.cpu`), and run. Run it on an idle machine: both the peaks and the steps
are measured.
"""

import argparse
import datetime
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from fornax.config import from_mapping
from fornax.hlo import analyse, parse
from fornax.plan.compile import compile_train
from fornax.plan.cost.schedule import predict
from fornax.plan.topology import parse_topology
from fornax.train import Ledger, TrainConfig, pretrain_task
from fornax.train.session import first_state, prepare

RESULTS = Path(__file__).parent / "results"

SHAPES = {
    "11M": {"hidden_size": 256, "intermediate_size": 704, "num_layers": 6, "num_heads": 4},
    "36M": {"hidden_size": 512, "intermediate_size": 1408, "num_layers": 8, "num_heads": 8},
}
ROWS, LENGTH, VOCABULARY = 4, 256, 8192


@dataclass(frozen=True)
class Result:
    """One shape, seconds of a step."""

    name: str
    predicted: float
    lowest: float
    median: float
    bound: str


def config_of(name: str) -> TrainConfig:
    """A small run."""
    model = {**SHAPES[name], "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
    return from_mapping(TrainConfig, {"model": model, "batch_size": ROWS, "seq_len": LENGTH})


def predicted(config: TrainConfig) -> tuple[float, str]:
    """Seconds that `fornax.plan` says, and what binds."""
    topology = parse_topology("cpu")
    (artifact,) = compile_train(config, topology, programs=("train_step",))
    facts = analyse(parse(artifact.hlo), dict(artifact.mesh))
    found = predict(facts.schedule, artifact.devices, topology)
    return found.step_seconds, found.bound


def measured(config: TrainConfig, steps: int) -> list[float]:
    """Seconds of each of `steps` steps on one device, after two that warm up."""
    programs = prepare(config, pretrain_task(config, read_data=False), Ledger(), jax.devices()[:1])
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, LENGTH + 1), np.int32)
    rows = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones((ROWS, LENGTH), np.int32),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
        "loss_weights": np.ones((ROWS, LENGTH), np.float32),
    }
    state = first_state(config, programs)
    times = []
    for _ in range(steps + 2):
        begun = time.perf_counter()
        state, metrics = programs.step(state, rows)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - begun)
    return times[2:]


def compare(name: str, steps: int) -> Result:
    """Predict and measure one shape."""
    config = config_of(name)
    seconds, bound = predicted(config)
    times = measured(config, steps)
    return Result(name, seconds, min(times), statistics.median(times), bound)


def report(results: list[Result]) -> str:
    """The results file."""
    lines = [
        "# Predicted and measured steps on this CPU",
        "",
        f"{datetime.date.today().isoformat()}, jax {jax.__version__}. One training step in float32,"
        f" {ROWS} rows of {LENGTH} tokens; predicted from the compiled program and this machine's"
        " measured peaks, without a calibration fitted to steps.",
        "",
        "| model | predicted ms | measured ms, best | median | predicted / best | bound |",
        "|---|---|---|---|---|---|",
    ]
    for one in results:
        lines.append(
            f"| {one.name} | {1e3 * one.predicted:.0f} | {1e3 * one.lowest:.0f} "
            f"| {1e3 * one.median:.0f} | {one.predicted / one.lowest:.2f} | {one.bound} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/…")
    args = parser.parse_args()
    text = report([compare(name, args.steps) for name in SHAPES])
    print(text)
    if args.write:
        name = f"{datetime.date.today().isoformat()}-cpu-plan_cpu.md"
        (RESULTS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
