"""What one client's requests do to another's: `python benchmarks/hostile_requests.py`.

A bystander streams one completion after the other from `fornax serve`. Windows in which it is alone
take turns with windows in which a neighbour, a process of its own, sends one kind of request as
fast as it is answered, so that what else the machine does falls on both. Compared are the gaps
between the bystander's tokens: the 99th of 100 may at most double. Neighbours with honest requests
stand first: they say what sharing the processor costs. How the requests were answered, and what
memory the server gained, is printed beside it.
"""

import argparse
import collections
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import _harness
import _random_llama

_RUNAWAY = "start: X\nX: /.*a.{18}/ & /.*b.{17}/ & ~/.*c.{16}/\n"
_PATTERNS = [{"pattern": f".*[a-{chr(98 + i % 20)}].{{{i}}}"} for i in range(40)]
_HONEST: dict[str, dict[str, Any]] = {
    "honest: a prompt of a word": {},
    "honest: a prompt of 600 tokens": {"prompt": list(range(100, 700)), "max_tokens": 8},
}
HOSTILE: dict[str, dict[str, Any]] = {
    "12 kB of stop strings, n=8": {"stop": ["x" * 12_000], "n": 8},
    "4 kB of stop strings, n=8": {"stop": ["x" * 4_000], "n": 8},
    "2.4 MB of bad words": {"bad_words": [f"word{i:06d}" for i in range(240_000)]},
    "16 kB of bad words": {"bad_words": [f"w{i % 1000}" * 4 for i in range(900)]},
    "repetition of up to 60,000 tokens": {
        "repetition_detection": {"max_pattern_size": 60_000, "min_pattern_size": 3, "min_count": 2}
    },
    "100,000 words that are numbers": {"bad_words": [1] * 100_000},
    "300,000 allowed tokens": {"allowed_token_ids": list(range(500)) * 600},
    "a grammar without end": {"structured_outputs": {"grammar": _RUNAWAY}},
    "a schema without end": {"structured_outputs": {"json": {"allOf": _PATTERNS}}},
    "a choice of 60 kB": {"structured_outputs": {"choice": ["a" * 60_000]}},
    "a choice of 16 kB": {"structured_outputs": {"choice": ["a" * 16_000]}},
    "128 completions of 30 prompts": {"n": 128, "prompt": ["hello"] * 30},
}
NEIGHBOURS = _HONEST | HOSTILE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-40m", choices=list(_random_llama.SHAPES))
    parser.add_argument("--seconds", type=float, default=4.0, help="of each window")
    parser.add_argument("--rounds", type=int, default=6, help="windows alone, and as many beside")
    parser.add_argument("--only", default="", help="neighbours whose name has this")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark-models"))
    parser.add_argument("--neighbour", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.neighbour:
        be_neighbour(args.neighbour)
        return
    chosen = [name for name in NEIGHBOURS if args.only in name]
    model = _random_llama.make(args.model, args.folder)
    rows = []
    with serving(model) as (port, process), neighbour(port) as beside:
        bystand(port, 5.0)
        for name in chosen:
            memory, answers = resident(process), collections.Counter()
            windows: dict[bool, list[np.ndarray]] = {False: [], True: []}
            for _ in range(args.rounds):
                windows[False].append(bystand(port, args.seconds))
                with beside(name, answers):
                    windows[True].append(bystand(port, args.seconds))
            grown = max(0, resident(process) - memory)
            alone, during = (np.concatenate(windows[which]) for which in (False, True))
            rows.append(row(name, alone, during, answers, grown))
            print(rows[-1], file=sys.stderr, flush=True)
    header = (
        "neighbour's requests",
        "answers",
        "p99 alone, ms",
        "p99 beside, ms",
        "ratio",
        "longest",
        "MB",
    )
    text = "\n\n".join(
        [
            f"# Hostile requests, {args.model}",
            f"{_harness.machine()}; {_harness.versions('jax', 'llguidance', 'tokenizers')}. The "
            f"clients run on the same processor. {args.rounds} windows alone and as many beside, "
            f"of {args.seconds:g} s, in turns.",
            _harness.table(header, rows),
        ]
    )
    if chosen == list(NEIGHBOURS):
        _harness.write_results(f"hostile_requests-{args.model}", text)
    print(text)


def row(
    name: str, alone: np.ndarray, during: np.ndarray, answers: collections.Counter, grown: int
) -> tuple[str, ...]:
    quiet, loud = (1e3 * float(np.quantile(gaps, 0.99)) for gaps in (alone, during))
    told = ", ".join(f"{count} x {status}" for status, count in sorted(answers.items())) or "none"
    longest = f"{1e3 * during.max():.0f} ms"
    return (
        name,
        told,
        f"{quiet:.1f}",
        f"{loud:.1f}",
        f"{loud / quiet:.2f}",
        longest,
        f"{grown >> 20}",
    )


@contextmanager
def serving(model: Path) -> Iterator[tuple[int, int]]:
    """Run `fornax serve` until the context ends; its port and process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    entry = "import sys; from fornax.cli.main import main; sys.exit(main())"
    limits = ["--max-num-seqs", "8", "--max-model-len", "1024", "--disable-access-log"]
    command = [sys.executable, "-c", entry, "serve", str(model), "--port", str(port), *limits]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            for _ in range(1800):
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(log.read()[-4000:])
                if ready(port):
                    break
                time.sleep(0.5)
            yield port, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(90)


def ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def bystand(port: int, seconds: float) -> np.ndarray:
    """Seconds between the events of streams, the wait for the first one included."""
    body = {"prompt": "hello there", "max_tokens": 64, "ignore_eos": True, "stream": True}
    gaps, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        last = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), _JSON)
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                now = time.monotonic()
                gaps.append(now - last)
                last = now
        connection.close()
    return np.array(gaps)


_JSON = {"Content-Type": "application/json"}


@contextmanager
def neighbour(port: int) -> Iterator[Callable[[str, collections.Counter], Any]]:
    """A process that sends requests; what is yielded has it send one kind during a context."""
    command = [sys.executable, __file__, "--neighbour", str(port)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    lines_in, lines_out = process.stdin, process.stdout

    @contextmanager
    def beside(name: str, answers: collections.Counter) -> Iterator[None]:
        """Count the answers' statuses."""
        print(name, file=lines_in, flush=True)
        try:
            yield
        finally:
            print("stop", file=lines_in, flush=True)
            answers.update(json.loads(lines_out.readline()))

    try:
        yield beside
    finally:
        process.terminate()
        process.wait(30)


def be_neighbour(port: int) -> None:
    """Send the kind of request that a line names until the next line comes."""
    for line in sys.stdin:
        stop = threading.Event()
        answers: collections.Counter = collections.Counter()
        common = {"prompt": "hello", "max_tokens": 32, "ignore_eos": True}
        body = json.dumps({**common, **NEIGHBOURS[line.strip()]}).encode()
        thread = threading.Thread(target=send, args=(port, body, answers, stop))
        thread.start()
        sys.stdin.readline()
        stop.set()
        thread.join(130)
        print(json.dumps(answers), flush=True)


def send(port: int, body: bytes, answers: collections.Counter, stop: threading.Event) -> None:
    while not stop.is_set():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            connection.request("POST", "/v1/completions", body, _JSON)
            answer = connection.getresponse()
            answer.read()
            answers[answer.status] += 1
        except OSError:
            answers["no answer"] += 1
        finally:
            connection.close()


def resident(process: int) -> int:
    """Bytes of memory that a process holds (Linux)."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
