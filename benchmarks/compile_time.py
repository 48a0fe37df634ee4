"""What experts add to the compile time of a training step: traced, lowered and compiled, not run.

    python benchmarks/compile_time.py                 # CPU: one device and eight virtual ones
    python benchmarks/compile_time.py --rounds 1 --layers 8

The dense stack is that of Llama 3.1 8B (`recipes/llama3-8b.yaml`). The other one differs from it in
its MLPs alone: each is 128 experts of width 768, eight for a token and a router with a balance
loss, as in Qwen3 30B-A3B. No array is allocated. Each measurement is a process of its own, and
they take turns, so that nothing is traced twice; a ratio is taken within a round.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import _harness

LAYERS = 32
LENGTH = 4096
PHASES = ("trace", "lower", "compile")
MESHES: dict[str, dict[str, int]] = {
    "one device": {"fsdp": 1},
    "fsdp 8": {"fsdp": 8},
    "fsdp 2, expert 4": {"fsdp": 2, "expert": 4},
}
"""Of a dense model `expert` divides what `fsdp` does."""
LLAMA: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": LLAMA,
    "experts": {
        **LLAMA,
        "experts": {
            "num_experts": 128,
            "experts_per_token": 8,
            "intermediate_size": 768,
            "balance_loss": 0.001,
        },
    },
}


def measure(model: str, mesh: str, layers: int) -> dict[str, float]:
    """Seconds of each phase, in this process, whose virtual devices are those of the mesh."""
    import jax

    from fornax.config import from_mapping
    from fornax.train import Hosts, Ledger, TrainConfig, pretrain_task
    from fornax.train.session import prepare
    from fornax.train.step import make_train_step
    from fornax.train.tasks.pretrain import row_shapes

    config = from_mapping(
        TrainConfig,
        {
            "model": {**MODELS[model], "num_layers": layers},
            "batch_size": jax.device_count(),
            "seq_len": LENGTH,
            "remat": "save_attention",
            "dtypes": {"params": "float32", "compute": "bfloat16"},
            "mesh": MESHES[mesh],
            "data": {"virtual_shards": 1},
        },
    )
    task = pretrain_task(config, read_data=False)
    programs = prepare(config, task, Ledger(), jax.devices())
    batch = programs.shapes_of(row_shapes(config, Hosts()))
    where = jax.tree.map(lambda leaf: leaf.sharding, programs.abstract)
    step = jax.jit(make_train_step(programs.parts), donate_argnums=0, out_shardings=(where, None))
    times = [time.perf_counter()]
    traced = step.trace(programs.abstract, batch, programs.abstract_frozen)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile()
    times.append(time.perf_counter())
    seconds = [after - before for before, after in itertools.pairwise(times)]
    return dict(zip(PHASES, seconds, strict=True))


@dataclasses.dataclass(frozen=True)
class Taken:
    """One measurement."""

    model: str
    mesh: str
    seconds: dict[str, float]

    @property
    def whole(self) -> float:
        """All phases."""
        return sum(self.seconds.values())


def take(model: str, mesh: str, layers: int) -> Taken:
    """Measure in a new process."""
    devices = 1
    for size in MESHES[mesh].values():
        devices *= size
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "NPROC": "16",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, __file__, "--one", model, "--mesh", mesh, "--layers", str(layers)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return Taken(model, mesh, json.loads(done.stdout.splitlines()[-1]))


def report(rounds: list[list[Taken]], layers: int) -> str:
    """Medians of all rounds, and of the ratios within each."""
    found: dict[tuple[str, str], list[Taken]] = {}
    for taken in (one for turn in rounds for one in turn):
        found.setdefault((taken.mesh, taken.model), []).append(taken)
    rows = []
    for mesh in MESHES:
        dense, experts = found[mesh, "dense"], found[mesh, "experts"]
        for model, own in (("dense", dense), ("experts", experts)):
            seconds = [statistics.median(one.seconds[phase] for one in own) for phase in PHASES]
            whole = statistics.median(one.whole for one in own)
            pairs = zip(own, dense, strict=True)
            ratios = [one.whole / other.whole for one, other in pairs]
            least, most = min(ratios), max(ratios)
            text = "1" if model == "dense" else f"{statistics.median(ratios):.2f}"
            text += "" if model == "dense" else f" ({least:.2f} to {most:.2f})"
            rows.append([mesh, model, *(f"{x:.1f}" for x in seconds), f"{whole:.1f}", text])
    head = ["mesh", "MLPs", *(f"{phase}, s" for phase in PHASES), "all, s", "to dense"]
    return (
        "# Compile time of experts\n\n"
        f"{_harness.machine()}; {_harness.versions('jax', 'jaxlib')}. One training step of "
        f"{layers} layers of Llama 3.1 8B's width, a row of {LENGTH} tokens for each device, "
        "AdamW, remat save_attention, parameters float32, products bfloat16; compiled for CPU, not "
        "run. The experts' stack has 128 of width 768 in each layer. Medians of "
        f"{len(rounds)} rounds, each measurement in a process of its own.\n\n"
        f"{_harness.table(head, rows)}\n"
    )


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/…")
    parser.add_argument("--one", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--mesh", choices=MESHES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.mesh, args.layers)))
        return
    order = [(model, mesh) for mesh in MESHES for model in MODELS]
    rounds = []
    for turn in range(args.rounds):
        order.reverse()
        rounds.append([take(model, mesh, args.layers) for model, mesh in order])
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr, flush=True)
    text = report(rounds, args.layers)
    print(text)
    if args.write:
        _harness.write_results("compile_time", text)


if __name__ == "__main__":
    main()
