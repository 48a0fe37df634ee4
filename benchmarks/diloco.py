"""Loss and bytes of DiLoCo beside plain data parallelism: `python benchmarks/diloco.py --data DIR`.

    fornax data build --output data/stdlib-1k --tokenizer.vocab-size 1024 --holdout 0.05
    python benchmarks/diloco.py --data data/stdlib-1k

Every contestant trains the same model on the same records in the same order, as many tokens in as
many steps. Slices are stepped in turn in one process, with the functions that `fornax launch
--slices` runs; tests show that its losses are these bit for bit. What is compared is the model that
all slices share. Bytes are those that a slice sends in a step on average: for data parallelism the
gradient in float32, once.
"""

import argparse
import datetime
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from _curves import picture
from fornax.config import from_mapping
from fornax.data import Hosts
from fornax.train import Ledger, TrainConfig, pretrain_task
from fornax.train.diloco import DilocoConfig, OuterOptimizer
from fornax.train.evaluate import evaluate
from fornax.train.session import Programs, first_state, prepare
from fornax.train.state import TrainState

MODEL = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "tie_embeddings": True,
}
STREAMING = {
    "sync_every": 20,
    "num_fragments": 4,
    "fragment_sync_delay": 2,
    "fragment_update_alpha": 0.5,
}
AVERAGE = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
CONTESTANTS: dict[str, dict[str, Any] | None] = {
    "data parallel": None,
    "DiLoCo, H = 20": {"sync_every": 20},
    "DiLoCo, H = 20, eta = 0.4": {"sync_every": 20, "outer_learning_rate": 0.4},
    "averaged, H = 20": {"sync_every": 20, **AVERAGE},
    "streaming, H = 20, 4 parts": STREAMING,
    "the same in e3m0": {**STREAMING, "exchange_dtype": "e3m0"},
}


class Contestant:
    """One way to train; each step is one of every slice."""

    def __init__(self, config: TrainConfig, programs: Programs, slices: int) -> None:
        self.programs, self.task = programs, programs.parts.task
        self.diloco = config.diloco
        count = 1 if self.diloco is None else slices
        self.states = [first_state(config, programs) for _ in range(count)]
        self.streams = [
            self.task.batches("train", Hosts(index=n, count=count)) for n in range(count)
        ]
        self.sent = 0
        self.step = 0
        self.steps = config.steps
        self.optimizer: OuterOptimizer | None = None
        self._flight: tuple[int, int, jax.Array] | None = None
        if self.diloco is not None:
            params = programs.abstract.params
            self.optimizer = OuterOptimizer(self.diloco, programs.parts, params)
            self.outer = [self.optimizer.init(state.params) for state in self.states]

    def advance(self) -> None:
        """One step."""
        self.step += 1
        for n, stream in enumerate(self.streams):
            self.states[n], _ = self.programs.step(self.states[n], next(stream))
        if self.optimizer is None or self.diloco is None:
            leaves = jax.tree.leaves(self.programs.abstract.params)
            self.sent += 4 * sum(leaf.size for leaf in leaves)
        else:
            self._exchange(self.optimizer, self.diloco)

    def _exchange(self, optimizer: OuterOptimizer, diloco: DilocoConfig) -> None:
        last = self.step == self.steps
        number = diloco.due(self.step)
        if number is not None and not last:
            self._flight = self._begun(optimizer, number, diloco.fragment_sync_delay)
        if self._flight is not None and (last or self._flight[0] == self.step):
            self._taken_in(optimizer, self._flight, diloco.fragment_update_alpha)
            self._flight = None
        for number in range(diloco.num_fragments if last else 0):
            self._taken_in(optimizer, self._begun(optimizer, number, 0), 0.0)

    def _begun(self, optimizer: OuterOptimizer, number: int, delay: int) -> Any:
        rows = [
            optimizer.contribution(outer, state.params, number)
            for outer, state in zip(self.outer, self.states, strict=True)
        ]
        self.sent += rows[0].nbytes
        return self.step + delay, number, jnp.stack(rows)

    def _taken_in(self, optimizer: OuterOptimizer, flight: Any, alpha: float) -> None:
        _, number, rows = flight
        weights = jnp.ones(len(self.states))
        for n, state in enumerate(self.states):
            self.outer[n], params = optimizer.apply(
                self.outer[n], state.params, number, rows, weights, alpha
            )
            self.states[n] = replace(state, params=params)

    def loss(self, batches: int) -> float:
        """Bits per byte of held-out text, of the parameters that all slices share."""
        state: TrainState = self.states[0]
        if self.optimizer is not None:
            state = replace(state, params=self.optimizer.common(self.outer[0], state.params))
        stream = self.task.batches("eval", Hosts())
        try:
            found = evaluate(self.task, self.programs.evaluate, state, stream, batches)
        finally:
            stream.close()
        return found["bits_per_byte"]

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


def curves(args: argparse.Namespace, settings: dict[str, Any]) -> Iterator[tuple[str, Any, float]]:
    """Of each contestant its points (step, bits per byte), and the bytes that it sent a step."""
    for name, diloco in CONTESTANTS.items():
        config = from_mapping(TrainConfig, {**settings, "diloco": diloco})
        programs = prepare(config, pretrain_task(config), Ledger(), jax.devices()[:1])
        contestant = Contestant(config, programs, args.slices)
        points = []
        while contestant.step < config.steps:
            contestant.advance()
            if contestant.step % args.every == 0:
                points.append((contestant.step, contestant.loss(args.eval_batches)))
        contestant.close()
        sent = contestant.sent / config.steps
        print(f"{name}: {points[-1][1]:.3f} bits/byte, {sent / 1e3:.1f} kB a step", flush=True)
        yield name, points, sent


def table(found: list[tuple[str, Any, float]], every: int) -> list[str]:
    """The rows of the result."""
    steps = [step for step, _ in found[0][1]]
    shown = [step for step in steps if step % (2 * every) == 0 or step == steps[-1]]
    base = found[0]
    lines = [
        f"| | {' | '.join(f'step {step}' for step in shown)} | "
        "beside data parallel | sent a step | less |",
        f"|---|{'---|' * len(shown)}---|---|---|",
    ]
    for name, points, sent in found:
        at = dict(points)
        values = " | ".join(f"{at[step]:.3f}" for step in shown)
        more = points[-1][1] / base[1][-1][1] - 1
        lines.append(
            f"| {name} | {values} | {more:+.1%} | {sent / 1e3:.1f} kB | {base[2] / sent:.0f} x |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="a dataset of 1024 tokens")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--slices", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--every", type=int, default=40, help="steps between evaluations")
    parser.add_argument("--eval-batches", type=int, default=8)
    parser.add_argument("--picture", type=Path, help="where the curves go, as SVG")
    args = parser.parse_args()
    settings = {
        "model": MODEL,
        "data": {"source": {"type": "dataset", "path": args.data}},
        "steps": args.steps,
        "batch_size": args.batch_size,
        "seq_len": args.seq_len,
        "optim": {
            "optimizer": {"type": "adamw", "weight_decay": 0.1},
            "learning_rate": 3e-3,
            "schedule": {"type": "cosine", "warmup_steps": 40},
        },
    }
    found = list(curves(args, settings))
    text = [
        "# DiLoCo beside data parallelism",
        "",
        f"{datetime.date.today()}, {platform.machine()}, jax {jax.__version__}, "
        f"`python benchmarks/diloco.py --steps {args.steps} --slices {args.slices}`. Bits per byte "
        f"of held-out text of the standard library; {args.slices} slices, {args.batch_size} rows "
        f"of {args.seq_len} tokens a step over all of them, AdamW with learning rate 0.003. The "
        "outer learning rate eta is 0.7 and its momentum 0.9 where nothing else is said; averaged "
        "means 1 and 0.",
        "",
        *table(found, args.every),
    ]
    results = Path(__file__).parent / "results"
    path = results / f"{datetime.date.today()}-cpu-diloco.md"
    path.write_text("\n".join([*text, ""]))
    print("\n".join(text))
    if args.picture:
        title = "Bits per byte of held-out text by step, data parallel and DiLoCo"
        args.picture.write_text(picture(title, {name: points for name, points, _ in found}))


if __name__ == "__main__":
    main()
