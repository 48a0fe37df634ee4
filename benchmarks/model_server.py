"""Serve the same three models from every contestant and measure what their clients see.

    python benchmarks/model_server.py                  # all of it, within twelve minutes
    python benchmarks/model_server.py --quick --models mlp --concurrency 1,8 --only fornax,ray

An MLP of one row, a recommender scoring 16 candidates and a 12-layer sentence encoder are hosted
by Fornax from its bundles; by Ray Serve, MLServer, LitServe and BentoML as the same JAX functions,
compiled at the same buckets and batched as their documentation says; and by ONNX Runtime as the
same graphs behind a small server of the same kind. One generator of load, in a process of its own,
asks them all with the same tensors and checks their answers.

Contestants run one at a time, in an order that rotates. In the first round they start with nothing
cached, in the others with what they kept: both are reported. Peers live in environments of their
own (`make bench-peers-hosts`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _harness
import _model_server_contestants as contestants
import _model_server_models as models
import _model_server_report as report
from _model_server_contestants import CONTESTANTS, Contestant

HERE = Path(__file__).resolve().parent
START_LIMIT = 180.0


@dataclass
class Standing:
    """What one contestant showed, over all rounds."""

    starts: list[float] = field(default_factory=list)
    """Seconds from the start to a right answer of every model; the first with nothing cached."""
    memory: int = 0
    cells: dict[tuple[str, int], list[report.Cell]] = field(default_factory=dict)
    absent: str = ""


class Clients:
    """The process that generates the load."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "_model_server_load.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def order(self, **order: Any) -> dict[str, Any]:
        """Carry out an order of `_model_server_load`; RuntimeError when it says there was one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        said = json.loads(self._process.stdout.readline() or '{"error": "the clients ended"}')
        if "error" in said:
            raise RuntimeError(said["error"])
        return said

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Run the rounds and write the results file."""
    args = _arguments()
    names, concurrencies = args.models.split(","), [int(c) for c in args.concurrency.split(",")]
    taking_part = [c for c in CONTESTANTS if c.name in args.only.split(",")]
    standings = {contestant.name: Standing() for contestant in taking_part}
    clients = Clients()
    with tempfile.TemporaryDirectory(prefix="fornax-host-bench-") as temporary:
        folder = Path(temporary)
        _run("_model_server_bundles.py", str(folder), args.models)
        bare = json.loads(_run("_model_server_bare.py", str(folder), args.models))
        for number in range(args.rounds):
            first = number % max(len(taking_part), 1)
            for contestant in taking_part[first:] + taking_part[:first]:
                standing = standings[contestant.name]
                if standing.absent:
                    continue
                print(f"round {number + 1}: {contestant.name}", file=sys.stderr, flush=True)
                try:
                    _turn(args, contestant, standing, folder, clients, names, concurrencies)
                except (RuntimeError, OSError) as error:
                    standing.absent = str(error).splitlines()[0]
                    print(error, file=sys.stderr)
        stages = {}
        mine = standings.get("fornax")
        if mine and not mine.absent and "mlp" in names:
            stages = json.loads(_run("_model_server_stages.py", str(folder)))
    clients.close()
    text = report.text(standings, taking_part, names, concurrencies, bare, stages, args)
    print(text)
    if not args.no_write:
        print(_harness.write_results("model_server", text))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(models.MODELS))
    parser.add_argument("--concurrency", default="1,8,64")
    parser.add_argument("--only", default=",".join(c.name for c in CONTESTANTS))
    parser.add_argument("--quick", action="store_true", help="one round, half a second a cell")
    quick = "--quick" in sys.argv
    parser.add_argument("--rounds", type=int, default=1 if quick else 3)
    parser.add_argument("--seconds", type=float, default=0.5 if quick else 1.3, help="a cell")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"))
    parser.add_argument("--no-write", action="store_true")
    return parser.parse_args()


def _run(script: str, *arguments: str) -> str:
    """Run a script of the benchmark as a process of its own; return what it prints."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "XLA_FLAGS": contestants.XLA_FLAGS, "JAX_PLATFORMS": "cpu"},
    )
    return done.stdout


def _turn(
    args: argparse.Namespace,
    contestant: Contestant,
    standing: Standing,
    folder: Path,
    clients: Clients,
    names: list[str],
    concurrencies: list[int],
) -> None:
    """Start a contestant, ask every model at every concurrency, stop it."""
    port = contestants.free_port()
    if contestant.environment:
        command = contestants.command(contestant, args.peers.resolve(), port, names)
    else:
        command = contestants.fornax_command(folder / "repository", port, contestant.flags)
    if not Path(command[0]).exists():
        raise RuntimeError(f"not installed: {command[0]}")
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / f"cache-{contestant.name}"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    references = {name: folder / f"{name}.npy" for name in names}
    server = contestants.start(
        command, {**cache, **contestant.env}, port, folder / f"{contestant.name}.log"
    )
    try:
        begun = contestants.wait_for_answers(server, contestant, references, START_LIMIT)
        standing.starts.append(begun)
        cells = [] if contestant.starts_only else _cells(names, concurrencies)
        for name, concurrency in cells:
            before = server.processor_seconds()
            start = time.perf_counter()
            said = clients.order(
                port=port,
                wire=contestant.wire,
                path=contestant.path.format(model=name),
                model=name,
                concurrency=concurrency,
                warmup=0.3,
                seconds=args.seconds,
                samples=32,
                reference=str(references[name]),
            )
            busy = (server.processor_seconds() - before) / (time.perf_counter() - start)
            cell = report.Cell(said["answers"], said["seconds"], said["latencies_us"], busy)
            standing.cells.setdefault((name, concurrency), []).append(cell)
        standing.memory = max(standing.memory, server.memory())
    finally:
        server.stop()


def _cells(names: list[str], concurrencies: list[int]) -> Iterator[tuple[str, int]]:
    return ((name, concurrency) for name in names for concurrency in concurrencies)


if __name__ == "__main__":
    main()
