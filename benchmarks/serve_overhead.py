"""What the server costs a token at batch 32: `python benchmarks/serve_overhead.py`.

Three ways to decode the same 32 sequences take turns: the compiled step alone, over and over; the
engine in process, with scheduling, sampling parameters and stop checks; and `fornax serve` over
HTTP with 32 streams, where the client runs on the same processor. Compared is the time a token
while all 32 decode: from the last row's first token to the first row's last one.

The processor time of the server and of the client during a turn says where the difference goes.
"""

import argparse
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import _harness
import _random_llama
from _contestants import Cell, Contestant, note, started
from fornax.bench import BenchConfig, bench

PEERS = Path(__file__).parent / "peers"
WAYS = ("step", "engine", "server")
BUDGET = 0.05
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Taken:
    """One turn: seconds per token while all rows decode, and processor seconds spent."""

    token_s: float
    server_cpu_s: float = 0.0
    client_cpu_s: float = 0.0


def main() -> None:
    args = arguments()
    model = _random_llama.make(args.model, args.folder)
    settings = [
        "--model",
        str(model),
        "--precision",
        args.precision,
        "--threads",
        str(args.threads),
    ]
    scripts = {"step": "peer_fornax_step.py", "engine": "peer_fornax.py"}
    commands = {
        way: [sys.executable, str(PEERS / script), *settings] for way, script in scripts.items()
    }
    cell = Cell(batch=args.batch, prompt=args.prompt, new=args.new)
    taken: dict[str, list[Taken]] = {way: [] for way in WAYS}
    with started(commands) as contestants, serving(model, args) as server:
        for contestant in contestants:
            contestant.prepare(cell)
        for number in range(args.rounds + 1):
            for way in (*WAYS[number % 3 :], *WAYS[: number % 3]):
                if way == "server":
                    taken[way].append(over_http(server, model, args, number))
                else:
                    (one,) = (c for c in contestants if c.name == way)
                    taken[way].append(in_process(one, cell, args, number))
            note(f"round {number} of {args.rounds}")
    for turns in taken.values():
        del turns[0]
    text = report(args, taken)
    _harness.write_results(f"serve_overhead-{args.model}", text)
    print(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-300m", choices=list(_random_llama.SHAPES))
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16", "int8"))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-models"))
    return parser.parse_args()


@dataclass(frozen=True)
class Serving:
    """A running server."""

    port: int
    process: int


@contextlib.contextmanager
def serving(model: Path, args: argparse.Namespace) -> Iterator[Serving]:
    """Run `fornax serve` until the context ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    precision = ["--dtype", "float32" if args.precision == "float32" else "bfloat16"]
    precision += ["--quantization", "int8"] if args.precision == "int8" else []
    limits = ["--max-num-seqs", str(args.batch), "--max-model-len", "1152"]
    entry = "import sys; from fornax.cli.main import main; sys.exit(main())"
    words = ["serve", str(model), "--port", str(port), *limits, *precision]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", entry, *words], stdout=errors, stderr=errors
        )
        try:
            note("starting the server")
            warm = BenchConfig(port=port, num_prompts=1, input_len=8, output_len=2)
            deadline = time.monotonic() + 900
            while True:
                try:
                    with socket.create_connection(("127.0.0.1", port), timeout=1):
                        break
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        errors.seek(0)
                        raise SystemExit(errors.read()[-4000:]) from None
                    time.sleep(0.5)
            bench(replace(warm, ready_check_timeout_sec=900.0))
            yield Serving(port, process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def in_process(contestant: Contestant, cell: Cell, args: argparse.Namespace, number: int) -> Taken:
    vocab = _random_llama.SHAPES[args.model].vocab
    prompts = _random_llama.prompts(cell.batch, cell.prompt, vocab, seed=number)
    return Taken(steady(contestant.turn(prompts, cell.new).seconds))


def over_http(server: Serving, model: Path, args: argparse.Namespace, number: int) -> Taken:
    config = BenchConfig(
        port=server.port,
        tokenizer=model,
        num_prompts=args.batch,
        input_len=args.prompt,
        output_len=args.new,
        ignore_eos=True,
        temperature=0.0,
        seed=number,
    )
    before, mine = cpu_seconds(server.process), time.process_time()
    outcomes = bench(config).outcomes
    failed = [outcome.error for outcome in outcomes if outcome.error]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    return Taken(
        steady([outcome.arrivals for outcome in outcomes]),
        cpu_seconds(server.process) - before,
        time.process_time() - mine,
    )


def steady(rows: list[list[float]]) -> float:
    """Seconds per token while every row decodes."""
    start, end = max(row[0] for row in rows), min(row[-1] for row in rows)
    count = sum(start < when <= end for row in rows for when in row)
    if count < len(rows):
        raise SystemExit("the rows do not decode together; raise --new")
    return (end - start) / count


def cpu_seconds(process: int) -> float:
    """Processor time, user and system, of a process so far (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def report(args: argparse.Namespace, taken: dict[str, list[Taken]]) -> str:
    def over(way: str, floor: str) -> float:
        pairs = zip(taken[way], taken[floor], strict=True)
        return statistics.median(a.token_s / b.token_s for a, b in pairs) - 1

    names = {
        "step": "the compiled step alone",
        "engine": "the engine in process",
        "server": "fornax serve over HTTP, its client beside it",
    }
    rows = [
        (
            names[way],
            f"{1e6 * statistics.median(turn.token_s for turn in turns):.1f}",
            "" if way == "step" else f"{over(way, 'step'):+.1%}",
            f"{over(way, 'engine'):+.1%}" if way == "server" else "",
        )
        for way, turns in taken.items()
    ]
    tokens = args.batch * args.new
    server, client = (
        1e6 * statistics.median(getattr(turn, name) for turn in taken["server"]) / tokens
        for name in ("server_cpu_s", "client_cpu_s")
    )
    held = "Held" if over("server", "step") < BUDGET else "NOT held"
    return "\n".join(
        [
            f"# Server overhead per token at batch {args.batch}",
            "",
            f"{_harness.machine()}; {args.threads} threads; {_harness.versions('jax', 'uvicorn')}; "
            f"{args.model}, {args.precision}; {args.batch} sequences, prompts of {args.prompt}, "
            f"{args.new} tokens each; medians of {args.rounds} rounds, the three in turn.",
            "",
            _harness.table(("", "microseconds a token", "over the step", "over the engine"), rows),
            "",
            f"The limit for HTTP, JSON and scheduling is {BUDGET:.0%} over the step. {held}.",
            f"Processor time a token during the turns over HTTP: server {server:.1f} microseconds, "
            f"all of its threads, compiled step included; client {client:.1f}.",
        ]
    )


if __name__ == "__main__":
    main()
