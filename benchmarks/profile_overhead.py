"""What profiling costs a step, captured or not: `python benchmarks/profile_overhead.py`.

The trainer's step and the engine's calls, in turn in one process: without annotations and requests,
with them and no capture, and while a capture runs. What a capture of one step costs besides, its
start and its end, is what the continuous mode divides by the steps between two.
"""

import argparse
import contextlib
import datetime
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np

from fornax import profile
from fornax.data import DataConfig, Dataset
from fornax.llm import LLM, SamplingParams
from fornax.models import DecoderConfig, create_decoder
from fornax.train import ProfileConfig, TrainConfig
from fornax.train.loop import Loop
from spike_guard import make_loop, take
from trainer_overhead import make_dataset

BUDGET = 0.01
EVERY = 1000
MODEL = DecoderConfig(
    vocab_size=512, hidden_size=128, intermediate_size=352, num_layers=4, num_heads=4
)
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


class _Nothing(contextlib.nullcontext):
    """Replaces an annotation, and counts."""

    made = 0

    def __init__(self, *args: object, **facts: object) -> None:
        super().__init__()
        _Nothing.made += 1


@contextlib.contextmanager
def bare() -> Iterator[None]:
    """Without any annotation."""
    import fornax.llm.engine as engine

    kept = [
        (owner, name, getattr(owner, name))
        for owner in (jax.profiler, engine)
        for name in ("TraceAnnotation", "StepTraceAnnotation")
    ]
    for owner, name, _ in kept:
        setattr(owner, name, _Nothing)
    try:
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def turn(loop: Loop) -> None:
    """One step with all that the loop does around it."""
    loop._turns += 1
    loop._heed()
    assert loop._turn()
    loop._drain(0)


def measure(
    plain: Callable[[], object], annotated: Callable[[], object], rounds: int, block: int
) -> np.ndarray:
    """[rounds, 3 kinds, 2]: processor and wall seconds of a call, of blocks in turn."""
    found = np.zeros((rounds, 3, 2))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for kind in np.random.default_rng(number).permutation(3):
                with ExitStack() as stack:
                    if kind == 0:
                        stack.enter_context(bare())
                    if kind == 2:
                        stack.enter_context(profile.capture(folder))
                    call = annotated if kind else plain
                    begun = np.array([time.process_time(), time.perf_counter()])
                    for _ in range(block):
                        call()
                    ended = np.array([time.process_time(), time.perf_counter()])
                found[number, kind] = (ended - begun) / block
    return found


def count(call: Callable[[], object]) -> int:
    """Annotations of a call, those of threads beside it too."""
    with bare():
        before = _Nothing.made
        for _ in range(10):
            call()
        return round((_Nothing.made - before) / 10)


def one_capture(loop: Loop, rounds: int) -> np.ndarray:
    """[2]: processor and wall seconds that a step with a capture of its own takes more."""
    more = []
    with tempfile.TemporaryDirectory() as folder:
        alone = ProfileConfig(every=1, out=folder)
        for _ in range(rounds):
            times = []
            for config in (ProfileConfig(), alone):
                loop.captures.config = config
                begun = np.array([time.process_time(), time.perf_counter()])
                turn(loop)
                times.append(np.array([time.process_time(), time.perf_counter()]) - begun)
            more.append(times[1] - times[0])
        loop.captures.config = ProfileConfig()
    return np.median(more, axis=0)


def annotations_alone(count: int = 20_000) -> float:
    """Seconds of one annotation when nothing captures."""
    begun = time.process_time()
    for number in range(count):
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            pass
    return (time.process_time() - begun) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60, help="blocks of each kind")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        config = TrainConfig(
            batch_size=8,
            seq_len=128,
            steps=1_000_000,
            save_every=None,
            data=DataConfig(source=Dataset(path=str(make_dataset(folder)))),
            model=MODEL,
        )
        loop = make_loop(config, folder / "run", stack)
        for _ in range(20):
            turn(loop)
        trainer = measure(lambda: take(loop), lambda: turn(loop), args.rounds, 8)
        captured = one_capture(loop, max(5, args.rounds // 4))
        counts = [count(lambda: turn(loop))]
    llm = LLM(create_decoder(MODEL), max_num_seqs=8, max_model_len=128)
    prompts = [list(range(2, 2 + length)) for length in (5, 9, 17, 33, 6, 12, 24, 48)]

    def generate() -> None:
        llm.generate(prompts, GREEDY)

    for _ in range(3):
        generate()
    engine = measure(generate, generate, args.rounds, 1)
    report(trainer, engine, captured, [*counts, count(generate)], args.rounds)


def compared(seconds: np.ndarray, kind: int) -> tuple[float, float, float]:
    """Median of the ratio to the plain kind of the same round less 1, and its 95 % interval."""
    ratio = seconds[:, kind] / seconds[:, 0] - 1
    picks = np.random.default_rng(0).integers(0, len(ratio), (10_000, len(ratio)))
    low, high = np.percentile(np.median(ratio[picks], axis=1), [2.5, 97.5])
    return float(np.median(ratio)), float(low), float(high)


def rows(name: str, seconds: np.ndarray) -> list[str]:
    found = []
    for kind, what in enumerate(("no annotations", "annotations, no capture", "a capture runs")):
        cells = [f"{1e3 * np.median(seconds[:, kind, clock]):.3f}" for clock in (0, 1)]
        for clock in (0, 1):
            middle, low, high = compared(seconds[:, :, clock], kind)
            cells.append(f"{middle:+.2%} ({low:+.2%} to {high:+.2%})" if kind else "")
        found.append(f"| {name}, {what} | {' | '.join(cells)} |")
    return found


def report(
    trainer: np.ndarray, engine: np.ndarray, captured: np.ndarray, counts: list[int], rounds: int
) -> None:
    each = annotations_alone()
    step, call = (np.median(seconds[:, 0], axis=0) for seconds in (trainer, engine))
    continuous = captured / EVERY / step
    shares = [n * each / whole[0] for n, whole in zip(counts, (step, call), strict=True)]
    lines = [
        "# What profiling costs",
        "",
        f"{datetime.date.today()}, {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, jax {jax.__version__}, "
        f"{jax.default_backend()}; medians of {rounds} rounds in which the kinds come in turn, the "
        "ratio to the first of the same round with its 95 % interval. A call of the engine is all "
        "of eight prompts, 32 tokens each.",
        "",
        "| | processor ms | wall ms | processor, more | wall, more |",
        "|---|---:|---:|---:|---:|",
        *rows("trainer's step", trainer),
        *rows("engine's call", engine),
        "",
        f"An annotation of a step that nobody captures takes {1e6 * each:.2f} us, others less. "
        f"A training step has {counts[0]} annotations, {shares[0]:.3%} of its processor time at "
        f"most; the engine's call {counts[1]}, {shares[1]:.2%} at most. The limit is {BUDGET:.0%}: "
        f"{'held' if max(shares) < BUDGET else 'NOT held'}.",
        "",
        f"A capture of one step takes {1e3 * captured[0]:.0f} ms of processor time and "
        f"{1e3 * captured[1]:.0f} ms more than the step: one step in {EVERY} is "
        f"{continuous[0]:.2%} of this step of {1e3 * step[0]:.1f} ms, and less of a longer one.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    name = f"{datetime.date.today()}-{jax.default_backend()}-profile_overhead.md"
    (Path(__file__).parent / "results" / name).write_text(text)


if __name__ == "__main__":
    main()
