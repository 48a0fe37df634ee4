"""Nothing that comes over a network is unpickled outside Ray: by the sources, and by sockets."""

import ast
import contextlib
import itertools
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fornax
from fornax.cluster.exchange import Exchange
from fornax.cluster.peer_memory import PeerMemory, memory_files
from fornax.config.credentials import Credentials
from fornax.config.frames import Frame, Kind, send
from fornax.data.worker import DataServer
from fornax.tune.rollout.sampler_server import SamplerServer

CODE = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "torch"}
"""Modules whose readers run what they read."""

ALLOWED = {
    "bench/v2/run.py": "load generators, children of this process, through a pool's pipes",
    "cluster/calls.py": "functions of Cluster.map, through socket pairs that processes inherit",
    "cluster/ray_engine.py": "the same calls on Ray, which carries them",
    "evaluate/quantized.py": "one measurement, a child of this process, through a pool's pipes",
    "rewards/pool.py": "reward workers, children of this process, on inherited connections",
    "rewards/slots.py": "reward workers, children of this process, on inherited connections",
    "rewards/worker.py": "the other end of those",
}


def unpickles(tree: ast.AST) -> set[int]:
    """Lines that import such a module, or have what unpickles called."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                bad = any(each.name.partition(".")[0] in CODE for each in names)
            case ast.ImportFrom(module=str(module)):
                given = {each.name for each in node.names}
                bad = (
                    module.partition(".")[0] in CODE
                    or (module.startswith("multiprocessing") and given - {"Connection", "wait"})
                    or "ProcessPoolExecutor" in given
                )
            case ast.Call(func=ast.Attribute(attr="recv"), args=[], keywords=[]):
                bad = True  # a Connection's; a socket's takes a size
            case ast.keyword(arg="allow_pickle", value=value):
                bad = not (isinstance(value, ast.Constant) and value.value is False)
            case _:
                bad = False
        if bad:
            found.add(getattr(node, "lineno", 0))
    return found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import torch.nn",
        "from multiprocessing.managers import BaseManager",
        "from concurrent.futures import ProcessPoolExecutor",
        "x = connection.recv()",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_what_unpickles_is_seen(text: str):
    assert unpickles(ast.parse(text)) == {1}


@pytest.mark.slow
def test_only_channels_between_parent_and_child_unpickle():
    root = Path(fornax.__file__).parent
    found = {}
    for path in sorted(root.rglob("*.py")):
        if lines := unpickles(ast.parse(path.read_text(encoding="utf-8"))):
            found[str(path.relative_to(root))] = sorted(lines)
    assert found.keys() == ALLOWED.keys(), found


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (self.path,)


def sampler(run: Credentials, stack: contextlib.ExitStack) -> str:
    listener = socket.create_server(("127.0.0.1", 0))
    server = SamplerServer(listener, run)
    stack.callback(server.close)
    threading.Thread(target=server.run, args=(object(),), daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def data_worker(run: Credentials, stack: contextlib.ExitStack) -> str:
    listener = socket.create_server(("127.0.0.1", 0))
    server = DataServer(listener, run)
    stack.callback(server.close)
    threading.Thread(target=server.run, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def agent(run: Credentials, stack: contextlib.ExitStack) -> str:
    files = memory_files("test")
    memory = PeerMemory(0, files, credentials=run, report=lambda message: None)
    for each in files:
        stack.callback(os.close, each)
    stack.callback(memory.close)
    return memory.address


def exchange(run: Credentials, stack: contextlib.ExitStack) -> str:
    made = Exchange(slices=1, token=run.token, announce=lambda text, **_: None)
    made.start()
    stack.callback(made.close)
    return made.address


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


@pytest.mark.parametrize(
    ("serve", "secured"),  # the exchange is on loopback only
    [*itertools.product([sampler, data_worker, agent], [False, True]), (exchange, False)],
)
def test_a_pickle_is_dropped_and_not_run(
    serve: Callable[..., str], secured: bool, stack: contextlib.ExitStack, tmp_path: Path
):
    """As the first bytes, as a Connection frames it, as facts and body of a frame, and by one who
    has certificate and token."""
    run = Credentials.make(tls=secured)
    host, _, port = serve(run, stack).rpartition(":")
    bomb = pickle.dumps(Bomb(str(tmp_path / "ran")))
    join = Frame(kind=Kind.JOIN, facts={"token": run.token}, body=bomb)
    for what in (bomb, struct.pack("!i", len(bomb)) + bomb, framed(bomb), join):
        for peer in connections(run, host, int(port)):
            with peer:
                peer.settimeout(300)
                with contextlib.suppress(OSError):  # it may be refused before all is sent
                    send(peer, what) if isinstance(what, Frame) else peer.sendall(what)
                    peer.shutdown(socket.SHUT_WR)
                wait_for_end(peer)
    assert not (tmp_path / "ran").exists()
    pickle.loads(bomb)  # the payload is a real one
    assert (tmp_path / "ran").exists()


def framed(facts: bytes) -> bytes:
    """A whole frame whose facts are a pickle."""
    from isal.isal_zlib import crc32

    head = struct.pack("!4sBxHHxxQIQ", b"FXO1", Kind.JOIN, 0, 0, 0, len(facts), 0)
    return head + struct.pack("!I", crc32(facts, crc32(head))) + facts


def connections(run: Credentials, host: str, port: int) -> Iterator[socket.socket]:
    """One in the clear, and one with the run's certificate where it has one."""
    yield socket.create_connection((host, port), 120)
    if run.key:
        yield run.dial(socket.create_connection((host, port), 120))


def wait_for_end(peer: socket.socket) -> None:
    """Until the other end closes the connection; TimeoutError when it does not."""
    buffer, until = bytearray(1 << 12), time.monotonic() + 300
    with contextlib.suppress(ConnectionError):
        while peer.recv_into(buffer):
            assert time.monotonic() < until
