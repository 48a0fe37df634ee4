"""What the guard against loss spikes adds to a step: `python benchmarks/spike_guard.py`.

Two loops of the same run in one process, with the guard and without, take their steps in turn.
Counted is processor time of the process, copies of the state into memory included; the interval
is a bootstrap of the mean over steps.
"""

import argparse
import dataclasses
import datetime
import os
import platform
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np

from fornax.checkpoint import Checkpointer
from fornax.config import dump_yaml
from fornax.config.progress import Quiet
from fornax.data import DataConfig, Dataset
from fornax.models import DecoderConfig
from fornax.train import Ledger, RunDirectory, SpikeConfig, TrainConfig, pretrain_task
from fornax.train.captures import Captures, Inbox
from fornax.train.loop import Loop
from fornax.train.metrics import MetricsFile
from fornax.train.recorder import Recorder
from fornax.train.rewind import SpikeGuard
from fornax.train.session import prepare, start
from fornax.train.signals import StopSignals
from trainer_overhead import make_dataset


def make_loop(config: TrainConfig, folder: Path, stack: ExitStack) -> Loop:
    """A loop before its first step."""
    directory = stack.enter_context(RunDirectory(folder))
    checkpointer = Checkpointer(directory.checkpoints)
    stack.callback(checkpointer.close)
    ledger, task = Ledger(), pretrain_task(config)
    programs = prepare(config, task, ledger)
    begun = start(config, programs, checkpointer)
    stack.callback(begun.batches.close)
    ledger.open(directory.goodput, 0)
    guard = None
    if config.spikes is not None:
        guard = SpikeGuard(
            config,
            config.spikes,
            programs=programs,
            checkpointer=checkpointer,
            path=directory.spikes,
            begun=begun,
        )
    recorder = Recorder(
        sinks=[MetricsFile(directory.metrics, 0)],
        progress=Quiet(),
        ledger=ledger,
        every=1,
        steps=config.steps,
        unit="tokens",
        flops_per_unit=None,
        peak_flops=None,
        max_skipped=20,
    )
    return Loop(
        config=config,
        config_yaml=dump_yaml(config),
        programs=programs,
        start=begun,
        checkpointer=checkpointer,
        recorder=recorder,
        ledger=ledger,
        signals=StopSignals(),
        captures=Captures(
            config=config.profile, directory=directory, log=recorder.progress.log, ledger=ledger
        ),
        inbox=Inbox(directory=directory.path, log=recorder.progress.log),
        guard=guard,
    )


def take(loop: Loop) -> float:
    """Processor seconds of one step, which is over when this returns."""
    began = time.process_time()
    rows = loop._next_rows()
    assert rows is not None
    loop._take(rows)
    loop._drain(0)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps of each")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        plain = TrainConfig(
            batch_size=8,
            seq_len=256,
            steps=args.steps + 20,
            save_every=None,
            data=DataConfig(source=Dataset(path=str(make_dataset(folder)))),
            model=DecoderConfig(
                vocab_size=512, hidden_size=128, intermediate_size=352, num_layers=4, num_heads=4
            ),
        )
        guarded = dataclasses.replace(plain, spikes=SpikeConfig(warmup=10))
        loops = [make_loop(c, folder / n, stack) for c, n in ((plain, "a"), (guarded, "b"))]
        for _ in range(20):
            [take(loop) for loop in loops]
        seconds = np.array([[take(loop) for loop in loops] for _ in range(args.steps)])
    report(seconds)


def report(seconds_S2: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    picks = rng.integers(0, len(seconds_S2), (10_000, len(seconds_S2)))
    means_R2 = seconds_S2[picks].mean(1)
    ratio = means_R2[:, 1] / means_R2[:, 0] - 1
    low, high = np.percentile(ratio, [2.5, 97.5])
    without, with_guard = 1e3 * seconds_S2.mean(0)
    text = "\n".join(
        [
            "# The guard against loss spikes, a step",
            "",
            f"{datetime.date.today()}, {platform.processor() or platform.machine()}, "
            f"{os.cpu_count()} cores, jax {jax.__version__}, {jax.default_backend()}; "
            f"{len(seconds_S2)} steps of each, in turn, processor time of the process; a copy "
            "of the state every 50 steps.",
            "",
            "| | processor ms per step |",
            "|---|---:|",
            f"| without | {without:.2f} |",
            f"| with the guard | {with_guard:.2f} |",
            "",
            f"Added: {with_guard / without - 1:.2%}, 95 % interval {low:.2%} to {high:.2%}; "
            f"medians differ by {np.diff(np.median(seconds_S2, 0))[0] * 1e3:.3f} ms.",
        ]
    )
    print(text)
    name = f"{datetime.date.today()}-{jax.default_backend()}-spike_guard.md"
    (Path(__file__).parent / "results" / name).write_text(text + "\n")


if __name__ == "__main__":
    main()
