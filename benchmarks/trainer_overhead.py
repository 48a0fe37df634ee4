"""What the trainer costs beside the compiled step: `python benchmarks/trainer_overhead.py`.

Two questions, each answered by turns taken one after the other in one process:

1. A model so small that its step is almost free: the loop's time a step, less the time of the same
   compiled program called directly, is what the host does for each step (take a batch, place it,
   dispatch, fetch metrics, write metrics.jsonl, TensorBoard and the ledger). It does not depend on
   the model, so its share of a 200 ms step is the overhead there, at most: with a longer step the
   host works while the device does.
2. A model whose step takes a few hundred milliseconds here: the same two times, and their ratio.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path

import jax

from fornax.data import BuildConfig, DataConfig, Dataset, Jsonl, TrainBpe, build
from fornax.models import DecoderConfig
from fornax.train import Hosts, Ledger, TrainConfig, pretrain_task, summarise, train
from fornax.train.hosts import to_global
from fornax.train.session import first_state, prepare

BUDGET = 0.02
STEP_SECONDS = 0.200


def make_dataset(folder: Path) -> Path:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 8))) for _ in range(500)]
    lines = [{"text": " ".join(rng.choices(words, k=200))} for _ in range(1500)]
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = BuildConfig(
        source=Jsonl(path=str(folder / "text.jsonl")),
        output=folder / "dataset",
        tokenizer=TrainBpe(vocab_size=512),
    )
    return build(config).path


def loop_seconds(config: TrainConfig, run_dir: Path) -> float:
    """Seconds per step of a whole run: steps and waiting for data, by its own ledger."""
    result = train(config, run_dir, progress="none")
    assert result.step == config.steps
    spent = summarise(run_dir / "goodput.jsonl").seconds
    return (spent["step"] + spent["wait_for_data"]) / config.steps


def direct_seconds(config: TrainConfig) -> float:
    """Seconds per step of the same compiled program, on one batch that lies on the device."""
    task = pretrain_task(config)
    programs = prepare(config, task, Ledger())
    batches = task.batches("train", Hosts())
    rows = next(batches)
    batches.close()
    shapes = programs.shapes_of(rows)
    compiled, batch = programs.lower_step(shapes).compile(), to_global(rows, shapes)
    state, _ = compiled(first_state(config, programs), batch, programs.frozen)
    jax.block_until_ready(state)
    began = time.perf_counter()
    for _ in range(config.steps):
        state, _ = compiled(state, batch, programs.frozen)
    jax.block_until_ready(state)
    return (time.perf_counter() - began) / config.steps


def compare(config: TrainConfig, folder: Path, rounds: int, name: str) -> dict[str, float]:
    loops, directs = [], []
    for number in range(rounds):
        directs.append(direct_seconds(config))
        loops.append(loop_seconds(config, folder / f"{name}-{number}"))
    host = statistics.median(a - b for a, b in zip(loops, directs, strict=True))
    ratio = statistics.median(a / b for a, b in zip(loops, directs, strict=True))
    return {
        "direct_ms": 1e3 * statistics.median(directs),
        "loop_ms": 1e3 * statistics.median(loops),
        "host_ms": 1e3 * host,
        "ratio": ratio,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="steps of the small model a round")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        base = TrainConfig(
            batch_size=8,
            seq_len=256,
            steps=args.steps,
            save_every=None,
            data=DataConfig(source=Dataset(path=str(make_dataset(folder)))),
        )
        small = dataclasses.replace(
            base,
            seq_len=16,
            model=DecoderConfig(
                vocab_size=512, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1
            ),
        )
        large = dataclasses.replace(
            base,
            steps=max(5, args.steps // 15),
            model=DecoderConfig(
                vocab_size=512, hidden_size=128, intermediate_size=352, num_layers=4, num_heads=4
            ),
        )
        found = {
            "almost free": compare(small, folder, args.rounds, "small"),
            "real": compare(large, folder, args.rounds, "large"),
        }
    report(found, args)


def report(found: dict[str, dict[str, float]], args: argparse.Namespace) -> None:
    share = found["almost free"]["host_ms"] / 1e3 / STEP_SECONDS
    lines = [
        "# Trainer overhead outside the compiled step",
        "",
        f"{datetime.date.today()}, {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} cores, jax {jax.__version__}, {jax.default_backend()}; "
        f"medians of {args.rounds} rounds, loop and direct calls in turn; metrics.jsonl, "
        "TensorBoard and ledger written every step.",
        "",
        "| step | compiled step alone, ms | in the trainer, ms | difference, ms | ratio |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {name} | {f['direct_ms']:.2f} | {f['loop_ms']:.2f} | {f['host_ms']:.2f} "
        f"| {f['ratio']:.3f} |"
        for name, f in found.items()
    ]
    lines += [
        "",
        f"Host work of a step is {found['almost free']['host_ms']:.2f} ms: {share:.2%} of a "
        f"{1e3 * STEP_SECONDS:.0f} ms step; the limit is {BUDGET:.0%}. "
        f"{'Held' if share < BUDGET else 'NOT held'}.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    name = f"{datetime.date.today()}-{jax.default_backend()}-trainer_overhead.md"
    (results / name).write_text(text)


if __name__ == "__main__":
    main()
