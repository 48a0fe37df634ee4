"""An engine over several processes: one schedules, the others carry out its operations.

All processes hold their part of the same arrays and run the same programs. What a program needs of
the host, an operation's name and its small arrays, goes from process 0 to the others over TCP,
as frames (`fornax.config.frames`): a secret first, then operations; nothing is unpickled.
"""

import contextlib
import dataclasses
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable

import jax
import numpy as np

from fornax import __version__
from fornax.config import frames
from fornax.config.errors import ClusterError, ConfigError
from fornax.config.frames import Frame, Kind, LinkError
from fornax.llm.config import DraftModel, EngineConfig
from fornax.llm.executor import Executor
from fornax.llm.limits import Limits
from fornax.mesh import check_processes
from fornax.mesh.hosts import decide, gather
from fornax.mesh.startup import find_processes
from fornax.models import DecoderConfig

__all__ = ["Leader", "check_group", "follow", "join_group"]

_JOIN_SECONDS = 60.0
_LONGEST = 1 << 30
_KINDS = "iufb"
"""Kinds of numpy's types that go to other processes."""


def check_group(config: EngineConfig) -> None:
    """Refuse an engine that several processes cannot be.

    Raises:
      ClusterError: adapters or a draft model in several processes.
      ConfigError: a process without part of the mesh.
    """
    count = jax.process_count()
    check_processes("serving a language model", count)
    if config.enable_lora:
        check_processes("serving adapters", count)
    if isinstance(config.speculative_config, DraftModel):
        check_processes("speculation with a draft model", count)
    if count > 1 and config.tensor_parallel_size != jax.device_count():
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size} and the {count} processes of the "
            f"engine have {jax.device_count()} devices together; give --tensor-parallel-size "
            f"{jax.device_count()}, so that each process has its part"
        )


class Leader:
    """Process 0's connections to the others."""

    def __init__(self, listener: socket.socket, token: str, count: int):
        """Take the connections of the others, of which each brings the token.

        Raises:
          ClusterError: one does not come.
        """
        self._peers: list[socket.socket] = []
        self._lost: LinkError | None = None
        self._ready = threading.Event()
        until = time.monotonic() + _JOIN_SECONDS
        while len(self._peers) < count:
            listener.settimeout(max(0.01, until - time.monotonic()))
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                raise ClusterError(
                    f"{count - len(self._peers)} of {count} processes did not connect to process 0 "
                    f"within {_JOIN_SECONDS:g} s; see what they printed"
                ) from None
            if _is_member(peer, token):
                self._peers.append(peer)
            else:
                peer.close()

    @property
    def ready(self) -> bool:
        """Whether all have compiled their programs."""
        return self._ready.is_set()

    def watch(self, lost: Callable[[LinkError], None]) -> None:
        """Note in threads when the others have compiled, and call `lost` when one ends."""

        def listen(peer: socket.socket, left: list[socket.socket]) -> None:
            try:
                while True:
                    if frames.receive(peer, longest=0).kind is Kind.READY:
                        left.remove(peer)
                        if not left:
                            self._ready.set()
            except LinkError as error:
                self._lost = LinkError(f"a process of this engine ended: {error}")
                self._ready.set()
                lost(self._lost)

        left = list(self._peers)
        for peer in self._peers:
            threading.Thread(
                target=listen, args=(peer, left), name="fornax-engine-group", daemon=True
            ).start()

    def wait_ready(self) -> None:
        """Return when all have compiled.

        Raises:
          LinkError: one of them ended.
        """
        self._ready.wait()
        if self._lost is not None:
            raise self._lost

    def tell(self, operation: str, *arrays: np.ndarray) -> None:
        """Have the others carry out an operation.

        Raises:
          LinkError: one of them ended.
        """
        parts = [np.ascontiguousarray(each).reshape(np.shape(each)) for each in arrays]
        facts = {
            "operation": operation,
            "arrays": [[each.dtype.str, list(each.shape)] for each in parts],
        }
        body = b"".join(each.tobytes() for each in parts)
        for peer in self._peers:
            frames.send(peer, Frame(kind=Kind.STEP, facts=facts, body=body))

    def close(self) -> None:
        """Let the others end."""
        for peer in self._peers:
            with contextlib.suppress(LinkError):
                frames.send(peer, Frame(kind=Kind.BYE))
            peer.close()


def _is_member(peer: socket.socket, token: str) -> bool:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.settimeout(_JOIN_SECONDS / 4)
    try:
        given = str(frames.receive(peer, longest=0).facts.get("token", ""))
    except LinkError:
        return False
    peer.settimeout(None)
    return hmac.compare_digest(given.encode(), token.encode())


def join_group(
    limits: Limits, config: EngineConfig, model: DecoderConfig
) -> Leader | socket.socket:
    """Connect the processes of an engine; all of them call this once, with the engine made.

    Returns:
      In process 0 its connections to the others, in these the one to process 0.

    Raises:
      ClusterError: versions, limits or options differ between processes, or one did not come.
    """
    mine = {"version": __version__, "options": repr(config), "model": repr(model), **_named(limits)}
    _agree(gather(mine))
    listener: socket.socket | None = None

    def listen() -> tuple[str, int, str]:
        nonlocal listener
        host = str(find_processes(None).coordinator).rpartition(":")[0]
        listener = socket.create_server((host, 0))
        host, port = listener.getsockname()[:2]
        return host, port, secrets.token_hex(32)

    host, port, token = decide(listen)
    if listener is not None:
        with listener:
            return Leader(listener, token, jax.process_count() - 1)
    connection = socket.create_connection((host, port), timeout=_JOIN_SECONDS)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    frames.send(connection, Frame(kind=Kind.JOIN, facts={"token": token}))
    return connection


def _named(limits: Limits) -> dict[str, str]:
    found = {field.name: getattr(limits, field.name) for field in dataclasses.fields(limits)}
    return {name: repr(value) for name, value in found.items()}


def _agree(said: list[dict[str, str]]) -> None:
    first = said[0]
    for number, other in enumerate(said):
        for name in first:
            if other.get(name) != first[name]:
                raise ClusterError(
                    f"process {number} of this engine has {name}={other.get(name)} and process 0 "
                    f"has {first[name]}; start all with the same command, files and devices"
                )


def follow(executor: Executor, connection: socket.socket) -> None:
    """Carry out what process 0 says, with all programs compiled, until it ends the engine.

    Raises:
      LinkError: process 0 is gone.
      EngineError: it says what is no operation.
    """
    frames.send(connection, Frame(kind=Kind.READY))
    while True:
        frame = frames.receive(connection, longest=_LONGEST)
        if frame.kind is Kind.BYE:
            return
        if frame.kind is not Kind.STEP:
            raise LinkError(f"{frame.kind.name} is nothing that an engine's process is told")
        executor.carry_out(str(frame.facts.get("operation")), _arrays(frame))


def _arrays(frame: Frame) -> list[np.ndarray]:
    """The arrays of a frame; LinkError for what is none."""
    found, at = [], 0
    for name, shape in frame.facts["arrays"]:
        dtype = np.dtype(name)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if dtype.kind not in _KINDS or not 0 <= size <= len(frame.body) - at:
            raise LinkError(f"an array of {name} and shape {shape} is not in its frame")
        found.append(np.frombuffer(frame.body, dtype, size // dtype.itemsize, at).reshape(shape))
        at += size
    return found
