"""What a router costs and what its choice of replicas brings: `python benchmarks/router.py`.

Cost: one replica of a small model is asked directly and through its router, in turns, by the same
load generator on the same processors: requests/s, latency, processor time of the router a request.
So is `fornax host` with a small bundle, over HTTP and over gRPC. What is asked directly is a server
without a router, since replicas answer theirs alone.

TLS: the same requests through two routers, one of which speaks TLS to its replica, as it does to
other machines.

Choice: prompts of a few long documents, each asked about several times in random order, go to three
replicas whose caches hold a part of the documents each. The share of prompt tokens that the engines
find in their prefix caches is compared between the policies.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.request import Request, urlopen

import jax.numpy as jnp
import numpy as np

import _harness
import _random_llama
from fornax import export
from fornax.bench.connection import Pool, request_bytes
from fornax.bench.v2.config import HostBenchConfig
from fornax.bench.v2.grpc_target import GrpcTarget
from fornax.bench.v2.target import HttpTarget, Target
from fornax.cluster.routing import read_serving_status
from fornax.config.jsonl import read_json_lines
from fornax.export import Spec

POLICIES = ("prefix-aware", "least-requests", "round-robin")
LOADS: dict[str, dict[str, object]] = {
    "1 token, whole": {"max_tokens": 1},
    "32 tokens, stream": {"max_tokens": 32, "stream": True, "ignore_eos": True},
}
_TICKS = os.sysconf("SC_CLK_TCK")
_START_SECONDS = 600
_COMMAND = ("-m", "fornax")
_WITH_TLS = (
    "-c",
    """
import functools, sys
from fornax.cli.main import main
from fornax.cluster import routing
from fornax.config.credentials import Credentials
routing.launch_replicas = functools.partial(
    routing.launch_replicas, credentials=Credentials.make(tls=True)
)
sys.exit(main())
""",
)
"""The command, whose replicas are guarded as if they were on other machines."""


@dataclass(frozen=True)
class Turn:
    """What one turn measured."""

    seconds: float
    latencies: Sequence[float]
    router_cpu: float

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    def percentile(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    args = arguments()
    model = _random_llama.make("tiny", args.folder)
    lines = [*cost(model, args), "", *cost_of_tls(model, args), "", *choice(model, args)]
    busy = f"Load average of the machine's {os.cpu_count()} processors: {os.getloadavg()[1]:.1f}."
    text = "\n".join([*lines, "", busy])
    _harness.write_results("router", text)
    print(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "random-llama")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=200, help="a turn")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--questions", type=int, default=8, help="about each document")
    return parser.parse_args()


@contextmanager
def launched(
    words: Sequence[str], replicas: int, routing: Sequence[str] = (), *, tls: bool = False
) -> Iterator[tuple[str, Path]]:
    """A router before replicas that are ready: its address and its run directory."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        given = ["launch", "--replicas", str(replicas), "--run-dir", str(run_dir)]
        given += ["--routing", *routing] if routing else []
        program = _WITH_TLS if tls else _COMMAND
        with started([*given, "--", *words], lambda: all_ready(run_dir, replicas), program):
            yield read_serving_status(run_dir).url, run_dir


@contextmanager
def started(
    words: Sequence[str], ready: Callable[[], bool], program: Sequence[str] = _COMMAND
) -> Iterator[None]:
    """A command of `fornax` that runs and is ready."""
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, *program, *words],
            stdout=log,
            stderr=log,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        try:
            until = time.monotonic() + _START_SECONDS
            while not ready():
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(Path(log.name).read_text())
                time.sleep(0.2)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def serve_words(model: Path, pages: int, port: int = 0) -> list[str]:
    words = ["serve", str(model), "--port", str(port), "--disable-access-log"]
    words += ["--max-model-len", "1024", "--max-num-seqs", "8", "--step-sizes", "coarse"]
    return [*words, "--num-gpu-blocks-override", str(pages)]


def all_ready(run_dir: Path, replicas: int) -> bool:
    if not read_json_lines(run_dir / "events.jsonl"):
        return False
    phases = [each.phase for each in read_serving_status(run_dir).replicas]
    return phases == ["ready"] * replicas


HEAD = (
    "| load | {0} req/s | {1} req/s | ratio | {0} p50 / p99 ms | {1} p50 / p99 ms | p50 ratio "
    "| p99 ratio | CPU ms per request of {2} |"
)
RULE = "|---|---|---|---|---|---|---|---|---|"


def cost(model: Path, args: argparse.Namespace) -> Iterator[str]:
    """The table of costs."""
    yield "One replica behind its router, and a server without one; medians of the rounds' ratios."
    yield ""
    yield HEAD.format("direct", "router", "the router")
    yield RULE
    (port,) = free_ports(1)
    with (
        started(serve_words(model, 600, port), lambda: answers(f"http://127.0.0.1:{port}/ready")),
        launched(serve_words(model, 600), 1) as (url, run_dir),
    ):
        pids = {"router": read_serving_status(run_dir).pid}
        for name, fields in LOADS.items():
            places = {"direct": f"http://127.0.0.1:{port}", "router": url}
            ways = {way: Completions(at, fields) for way, at in places.items()}
            yield compared(f"serve: {name}", ways, args, pids)
    http, grpc = free_ports(2)
    with small_models() as words:
        bare = [*words, "--http", str(http), "--grpc", str(grpc)]
        with (
            started(bare, lambda: answers(f"http://127.0.0.1:{http}/v2/health/ready")),
            launched([*words, "--http", "0", "--grpc", "0"], 1) as (_, run_dir),
        ):
            pids = {"router": read_serving_status(run_dir).pid}
            direct = {"http": f"127.0.0.1:{http}", "grpc": f"127.0.0.1:{grpc}"}
            yield from of_host({"direct": direct, "router": addresses(run_dir)}, args, pids)


def cost_of_tls(model: Path, args: argparse.Namespace) -> Iterator[str]:
    """The table of what TLS between router and replica adds."""
    yield "One replica behind its router, with TLS between them and without."
    yield ""
    yield HEAD.format("plain", "TLS", "the routers")
    yield RULE
    served = serve_words(model, 600)
    with (
        launched(served, 1) as (plain, first),
        launched(served, 1, tls=True) as (secure, second),
    ):
        pids = {"plain": read_serving_status(first).pid, "TLS": read_serving_status(second).pid}
        for name, fields in LOADS.items():
            ways = {"plain": Completions(plain, fields), "TLS": Completions(secure, fields)}
            yield compared(f"serve: {name}", ways, args, pids)
    with small_models() as words:
        hosted = [*words, "--http", "0", "--grpc", "0"]
        with launched(hosted, 1) as (_, first), launched(hosted, 1, tls=True) as (_, second):
            pids = {"plain": read_serving_status(first).pid, "TLS": read_serving_status(second).pid}
            places = {"plain": addresses(first), "TLS": addresses(second)}
            yield from of_host(places, args, pids)


@contextmanager
def small_models() -> Iterator[list[str]]:
    """The words of a model server with one small bundle."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        export.save(
            Path(folder) / "models" / "small" / "1",
            {"score": lambda params, x: {"y": jnp.tanh(x @ params["up"]) @ params["down"]}},
            {"up": rng.standard_normal((64, 64), "f"), "down": rng.standard_normal((64, 1), "f")},
            inputs={"score": {"x": Spec(("b", 64), "float32")}},
            buckets={"b": [1, 8]},
            platforms=("cpu",),
        )
        yield ["host", str(Path(folder) / "models"), "--access-log", "none"]


def addresses(run_dir: Path) -> dict[str, str]:
    """Where a launched model server listens, by protocol."""
    status = read_serving_status(run_dir)
    return {"http": status.url, "grpc": str(status.grpc).removeprefix("grpc://")}


def of_host(
    places: Mapping[str, Mapping[str, str]], args: argparse.Namespace, pids: Mapping[str, int]
) -> Iterator[str]:
    """The rows of the model server."""
    for protocol, kind in (("http", HttpTarget), ("grpc", GrpcTarget)):
        ways = {}
        for way, at in places.items():
            config = HostBenchConfig(model="small", protocol=protocol, url=at[protocol])
            ways[way] = Inferences(lambda kind=kind, config=config: kind(config))
        name = {"http": "HTTP", "grpc": "gRPC"}[protocol]
        yield compared(f"host: 64 numbers, {name}", ways, args, pids)


class Asking(Protocol):
    """Clients of one server."""

    async def connect(self, clients: int) -> None: ...

    async def ask(self) -> None: ...

    async def close(self) -> None: ...


class Completions:
    """Asks for one completion again and again."""

    def __init__(self, url: str, fields: dict[str, object]):
        body = json.dumps({"prompt": "the quick brown fox jumps over", **fields}).encode()
        headers = {"content-type": "application/json"}
        self._request = request_bytes("POST", f"{url}/v1/completions", headers=headers, body=body)
        host, _, port = url.partition("://")[2].partition(":")
        self._address = host, int(port)

    async def connect(self, clients: int) -> None:
        self._pool = Pool(*self._address, timeout=600.0)
        await self._pool.connect(clients)

    async def ask(self) -> None:
        answer = await self._pool.exchange(self._request)
        assert answer.status == 200, answer.body

    async def close(self) -> None:
        await self._pool.close()


class Inferences:
    """Asks a model server for one inference again and again."""

    def __init__(self, make: Callable[[], Target]):
        self._make = make
        self._request = make().encode({"x": np.ones((1, 64), np.float32)})

    async def connect(self, clients: int) -> None:
        self._target = self._make()
        await self._target.connect(clients)

    async def ask(self) -> None:
        failure = await self._target.send(self._request)
        assert failure is None, failure

    async def close(self) -> None:
        await self._target.close()


def compared(
    name: str, ways: Mapping[str, Asking], args: argparse.Namespace, pids: Mapping[str, int]
) -> str:
    """A row: both ways in turns; the first turn of each is for warming up.

    Args:
      pids: of the routers, by way.
    """
    turns: dict[str, list[Turn]] = {way: [] for way in ways}
    for number in range(args.rounds + 1):
        for way in sorted(turns, reverse=bool(number % 2)):
            turns[way].append(asyncio.run(turn(ways[way], args, pids.get(way))))
    for each in turns.values():
        del each[0]
    return row(name, turns, list(pids))


async def turn(asking: Asking, args: argparse.Namespace, pid: int | None) -> Turn:
    """Ask as often as a turn has requests, so many at once."""
    left, latencies = args.requests, []

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            began = time.perf_counter()
            await asking.ask()
            latencies.append(time.perf_counter() - began)

    await asking.connect(args.concurrency)
    cpu, began = cpu_seconds(pid), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(args.concurrency)))
    taken = time.perf_counter() - began
    await asking.close()
    return Turn(taken, latencies, cpu_seconds(pid) - cpu)


def answers(url: str) -> bool:
    try:
        get(url)
    except OSError:
        return False
    return True


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def cpu_seconds(pid: int | None) -> float:
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def row(name: str, turns: dict[str, list[Turn]], routers: Sequence[str]) -> str:
    first, second = turns.values()

    def ratio(of) -> float:
        pairs = zip(first, second, strict=True)
        return statistics.median(of(later) / of(earlier) for earlier, later in pairs)

    def shown(of, which: list[Turn]) -> str:
        return f"{statistics.median(of(each) for each in which):.1f}"

    def cpu(which: list[Turn]) -> float:
        answered = sum(len(each.latencies) for each in which)
        return 1e3 * sum(each.router_cpu for each in which) / answered

    p50, p99 = (lambda t: t.percentile(0.5)), (lambda t: t.percentile(0.99))
    cells = [
        name,
        shown(lambda t: t.rate, first),
        shown(lambda t: t.rate, second),
        f"{ratio(lambda t: t.rate):.2f}",
        f"{shown(p50, first)} / {shown(p99, first)}",
        f"{shown(p50, second)} / {shown(p99, second)}",
        f"{ratio(p50):.2f}",
        f"{ratio(p99):.2f}",
        " / ".join(f"{cpu(turns[way]):.2f}" for way in routers),
    ]
    return f"| {' | '.join(cells)} |"


def choice(model: Path, args: argparse.Namespace) -> Iterator[str]:
    """The rows of the table of policies."""
    rng = random.Random(0)
    words = [f"word{number}" for number in range(500)]
    documents = [" ".join(rng.choices(words, k=80)) for _ in range(args.documents)]
    asked = [f"{text} question {n}" for text in documents for n in range(args.questions)]
    rng.shuffle(asked)
    tokens = statistics.mean(map(len, documents))
    yield (
        f"{args.documents} documents of {tokens:.0f} characters, {args.questions} questions about "
        f"each in random order, {args.concurrency} at once, three replicas."
    )
    yield ""
    yield "| policy | prompt tokens found in prefix caches | requests of the replicas |"
    yield "|---|---|---|"
    for policy in POLICIES:
        words = serve_words(model, args.documents * 12)
        with launched(words, 3, [f"policy={policy}"]) as (url, _):
            asyncio.run(ask_all(url, asked, args.concurrency))
            metrics = get(f"{url}/metrics")
        hits, queries = (
            total(metrics, f"vllm:prefix_cache_{name}_total") for name in ("hits", "queries")
        )
        per = re.findall(
            r'fornax_router_requests_total\{code="200",replica="(\d)"\} (\d+)', metrics
        )
        counts = " / ".join(count for _, count in sorted(per))
        yield f"| {policy} | {hits / queries:.1%} | {counts} |"


async def ask_all(url: str, prompts: Sequence[str], concurrency: int) -> None:
    host, _, port = url.partition("://")[2].partition(":")
    pool, waiting = Pool(host, int(port), timeout=600.0), iter(prompts)

    async def client() -> None:
        for prompt in waiting:
            body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
            headers = {"content-type": "application/json"}
            request = request_bytes("POST", f"{url}/v1/completions", headers=headers, body=body)
            answer = await pool.exchange(request)
            assert answer.status == 200, answer.body

    await asyncio.gather(*(client() for _ in range(concurrency)))
    await pool.close()


def get(url: str) -> str:
    with urlopen(Request(url)) as reply:
        return reply.read().decode()


def total(metrics: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}\{{.*\}} (\S+)$", metrics, re.M))


if __name__ == "__main__":
    main()
