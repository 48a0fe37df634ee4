"""Who takes part in the model-server benchmark: how each is started, asked, and stopped."""

import contextlib
import dataclasses
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import _model_server_load as load
import _model_server_models as models
import _model_server_wire as wires

HERE = Path(__file__).resolve().parent
XLA_FLAGS = (
    "--xla_cpu_prefer_vector_width=512 --xla_cpu_experimental_ynn_fusion_type="
    "LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_REDUCE"
)
"""For all that run JAX: the encoder is compiled in a tenth of the time and runs faster."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contestant:
    """A server that hosts the benchmark's models."""

    name: str
    wire: str
    path: str
    """Where a model is asked, with `{model}` for its name."""
    environment: str = ""
    """The peer's folder of the peers' directory; empty: this process's interpreter."""
    script: str = ""
    settings: str = ""
    """What was tuned, for the report."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    flags: Sequence[str] = ()
    starts_only: bool = False
    """Whether only its start is measured."""


CONTESTANTS = (
    Contestant(
        name="fornax",
        wire="v2-binary",
        path="/v2/models/{model}/infer",
        settings="HTTP, defaults",
    ),
    Contestant(
        name="fornax-1-thread",
        wire="v2-binary",
        path="/v2/models/{model}/infer",
        settings="cpu_threads 1: no program is divided over threads, not the large ones either",
        flags=("--cpu-threads", "1"),
    ),
    Contestant(
        name="fornax-trusting",
        wire="v2-binary",
        path="/v2/models/{model}/infer",
        settings="started only: with the executables that the bundles carry, which it is told to "
        "trust",
        flags=("--trust-executables", "true"),
        starts_only=True,
    ),
    Contestant(
        name="ray",
        environment="ray",
        script="serve_ray.py",
        wire="raw",
        path="/{model}",
        settings="one replica a model, serve.batch with no wait, RAY_SERVE_THROUGHPUT_OPTIMIZED=1",
        env={"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_USAGE_STATS_ENABLED": "0"},
    ),
    Contestant(
        name="mlserver",
        environment="mlserver",
        script="serve_mlserver.py",
        wire="v2-json",
        path="/v2/models/{model}/infer",
        settings="REST (JSON; it has no binary tensors), in process, max_batch_time 0.5 ms",
    ),
    Contestant(
        name="litserve",
        environment="litserve",
        script="serve_litserve.py",
        wire="raw",
        path="/{model}",
        settings="bytes in and out, batch_timeout 0, fast_queue, one worker a model",
    ),
    Contestant(
        name="bentoml",
        environment="bentoml",
        script="serve_bentoml.py",
        wire="json",
        path="/{model}",
        settings="JSON, one worker, adaptive batching, access log off",
        env={"BENTOML_DO_NOT_TRACK": "True"},
    ),
    Contestant(
        name="onnxruntime",
        environment="onnxruntime",
        script="serve_onnxruntime.py",
        wire="v2-binary",
        path="/v2/models/{model}/infer",
        settings="fused graph, two threads, uvicorn with raw ASGI, batches of what waits",
    ),
)


class Server:
    """A contestant that is running."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def stop(self) -> None:
        """End the process and all that it started."""
        family = descendants(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        for pid in [self.process.pid, *family]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def processor_seconds(self) -> float:
        """Processor time that the server's living processes have taken so far."""
        total = 0
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Bytes that the server's processes hold, each process's share of what is shared."""
        total = 0
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += 1024 * int(next(li for li in lines if li.startswith("Pss:")).split()[1])
        return total


def descendants(pid: int) -> list[int]:
    """Return the processes that `pid` started, and those that they started."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def free_port() -> int:
    """Return a port with nobody on it nor on the two after it, which no client is given."""
    for port in random.sample(range(20_000, 30_000, 4), 100):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for offset in range(3):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            return port
    raise RuntimeError("no three ports in a row are free between 20000 and 30000")


def start(command: Sequence[str], env: Mapping[str, str], port: int, log: Path) -> Server:
    """Start a server; it is not waited for."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(command),
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "XLA_FLAGS": XLA_FLAGS, "JAX_PLATFORMS": "cpu", **env},
        )
    return Server(process, port, log)


def command(contestant: Contestant, peers: Path, port: int, names: Sequence[str]) -> list[str]:
    """Return what starts a peer."""
    python = peers / contestant.environment / "bin" / "python"
    script = HERE / "peers" / contestant.script
    return [str(python), str(script), "--port", str(port), "--models", ",".join(names)]


def fornax_command(repository: Path, port: int, flags: Sequence[str] = ()) -> list[str]:
    """Return what starts Fornax."""
    run = "from fornax.cli.main import main; main()"
    return [
        sys.executable,
        "-c",
        run,
        "host",
        str(repository),
        "--http",
        str(port),
        "--grpc",
        "none",
        *flags,
    ]


def wait_for_answers(
    server: Server, contestant: Contestant, references: Mapping[str, Path], limit: float
) -> float:
    """Ask until every model has given a right answer; return the seconds that it took."""
    begun = time.perf_counter()
    for name, reference in references.items():
        model = models.MODELS[name]
        path = contestant.path.format(model=name)
        data = wires.request(contestant.wire, model, model.requests(1)[0], path)
        while not _answers(server.port, contestant, model, data, np.load(reference)):
            if server.process.poll() is not None or time.perf_counter() - begun > limit:
                tail = server.log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{contestant.name} does not answer for {name}:\n{tail}")
            time.sleep(0.02)
    return time.perf_counter() - begun


def _answers(
    port: int, contestant: Contestant, model: models.Model, data: bytes, reference: np.ndarray
) -> bool:
    try:
        status, headers, body = load.ask(port, data)
    except (OSError, load.WrongAnswerError):
        return False
    if status != 200:
        return False
    array = wires.answer(contestant.wire, model, headers, body)
    return bool(np.abs(array - reference[0].reshape(model.rows, -1)).max() <= load.TOLERANCE)
