"""`fornax host` in a process of its own, over a small repository."""

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.xla_flags import xla_flags

from fornax import export
from fornax.config import environment
from fornax.export import Spec

READY = r"ready after [\d.]+ s: serving"


class Server:
    """A running `fornax host`."""

    def __init__(self, words: list[str], log: Path, wait: str, devices: int = 1):
        self.log = log
        devices_of = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags()}
        if devices > 1:
            devices_of = environment.virtual_cpus(devices)
        with log.open("wb") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "fornax", "host", *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment.for_child(devices_of),
            )
        try:
            self.wait_for(wait)
        except BaseException:
            self.popen.kill()
            self.popen.wait()
            raise

    def wait_for(self, words: str, seconds: float = 180) -> str:
        """Wait until the log has something; the whole log.

        A start takes 1.7 to 2.8 s of a processor, of which it gets its share: 39 s beside 24
        others on two processors, and it is not to be called hung beside more.
        """
        until = time.monotonic() + seconds
        while not re.search(words, text := self.log.read_text()):
            assert self.popen.poll() is None, text
            assert time.monotonic() < until, text
            time.sleep(0.02)
        return text

    def address(self, protocol: str) -> str:
        """Where it listens."""
        found = re.search(rf"{protocol}://([\w.]+:\d+)", self.log.read_text())
        assert found is not None
        return found[1]

    def memory(self) -> int:
        """Bytes that the process holds."""
        status = Path(f"/proc/{self.popen.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024

    def returns_to(self, before: int) -> None:
        """Wait until it holds about as much as before; it gives back every few seconds."""
        until = time.monotonic() + 120
        while (held := self.memory()) > before * 1.2 + 2**26:
            assert time.monotonic() < until, f"{held} bytes are held, {before} were before"
            time.sleep(0.1)

    def stop(self, number: int = signal.SIGTERM, seconds: float = 120) -> int:
        """Send a signal; the exit code."""
        self.popen.send_signal(number)
        return self.popen.wait(seconds)


def _rank(params, ids, weight):
    x_BTD = params["table"][ids] * (ids > 0)[..., None]
    return {"score": jnp.sum(x_BTD, axis=1) @ params["w"] * weight}


def _ranker(scale: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((50, 8)).astype(np.float32)
    return {"table": table, "w": scale * rng.standard_normal(8).astype(np.float32)}


WIDE = 65536
"""Numbers in a row of `wide`."""


def _predict(params, x, scale):
    return {"y": jnp.tanh(x @ params["w"]) * scale[:, None]}


def _text(params, s):
    return {"s": s, "length": jnp.sum(s > 0, axis=1)}


def _wide(params, x):
    return {"x": x + 1}


def _slow(params, x):
    """A tenth of a second of arithmetic, whose result is dropped."""
    mixed = jnp.broadcast_to(x[:, :1], (x.shape[0], 256)) * jnp.ones((256, 1, 256))
    mixed = jax.lax.fori_loop(0, 25, lambda _, m: jnp.tanh(m @ jnp.eye(256) + m), mixed)
    return {"x": x + 1 + jnp.minimum(jnp.sum(jnp.abs(mixed)), 0)}


def write_tiny(
    root: Path, name: str, function: Callable, inputs: dict[str, Spec], queue_limit: int
) -> Path:
    """Two versions of `tiny`: predict, text, wide, slow, and a function of the test's own."""
    weights = np.arange(12, dtype=np.float32).reshape(4, 3)
    for version in (1, 2):
        export.save(
            root / "tiny" / str(version),
            {"predict": _predict, name: function, "text": _text, "wide": _wide, "slow": _slow},
            {"w": weights * version},
            inputs={
                "predict": {"x": Spec(("b", 4), "float32"), "scale": Spec(("b",), "float32")},
                name: inputs,
                "text": {"s": Spec(("b", "n"), "bytes")},
                "wide": {"x": Spec(("b", WIDE), "float32")},
                "slow": {"x": Spec(("b", 4), "float32")},
            },
            buckets={"b": [1, 4], "n": [16]},
            platforms=("cpu",),
        )
    settings = f"versions: {{type: all}}\nbatching: {{queue_limit: {queue_limit}}}\n"
    (root / "tiny" / "serving.yaml").write_text(settings)
    return root


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of a ranker."""
    root = tmp_path_factory.mktemp("bundles")
    for version, scale in ((1, 1.0), (2, 2.0)):
        export.save(
            root / "ranker" / str(version),
            {"predict": _rank},
            _ranker(scale),
            inputs={
                "predict": {
                    "ids": Spec(("b", "t"), "int32", low=0, high=49),
                    "weight": Spec(("b",), "float32"),
                }
            },
            buckets={"b": [1, 4], "t": [8]},
            platforms=("cpu",),
        )
    return root


@pytest.fixture
def repository(bundles: Path, tmp_path: Path) -> Path:
    """A repository with version 1 of the ranker."""
    root = tmp_path / "models"
    shutil.copytree(bundles / "ranker" / "1", root / "ranker" / "1")
    return root


def _starter(folder: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def run(repository: Path, *words: str, wait: str = READY, devices: int = 1) -> Server:
        log = folder / f"server{len(started)}.log"
        words = (str(repository), "--http", "0", "--grpc", "0", *words)
        server = Server(list(words), log, wait, devices)
        started.append(server)
        return server

    yield run
    for server in started:
        if server.popen.poll() is None:
            server.popen.kill()
            server.popen.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers on free ports."""
    yield from _starter(tmp_path)


@pytest.fixture(scope="module")
def start_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts servers that a file's tests share."""
    yield from _starter(tmp_path_factory.mktemp("servers"))
