"""A sampler as a process of its own: draws what a trainer asks, under the version that it names.

Connections are read by threads: arrays of the next version come in while the engine draws with the
one before. A version counts once it is whole and every checksum was right; the engine takes it over
between two shards, when the first that names it is to be drawn.
"""

import contextlib
import hmac
import queue
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from fornax.config.errors import EngineError
from fornax.config.frames import Frame, Kind, LinkError, receive, send
from fornax.tune.rollout.sampler import Sampler
from fornax.tune.rollout.shards import (
    HostWeights,
    Shard,
    completions_frame,
    frame_shard,
    frame_weight,
    nested,
)

__all__ = ["SamplerServer", "ShardSampler"]

_JOIN_SECONDS = 60.0
_TICK_SECONDS = 0.2

Change = Callable[[str, int], None]
"""(phase, version): what the process does now."""


class ShardSampler(Sampler, Protocol):
    """A sampler whose engine can begin as if it were new, and be stopped from another thread."""

    def interrupt(self) -> None:
        """Make `sample` raise EngineError until the next `update`."""

    def reset_prefix_cache(self) -> None:
        """Forget what earlier requests left in the cache."""


class SamplerServer:
    """Serves one trainer at a time; a newer one takes the place of the one before."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        """Serve nothing yet.

        Args:
          listener: a listening socket; connections wait in its backlog until `run`.
          token: what a connection must show first.
        """
        self._listener, self._token = listener, token
        self._process = secrets.token_hex(8)
        self._changed = threading.Condition()
        self._session = ""
        self._connections: set[_Connection] = set()
        self._asked: queue.Queue[tuple[_Connection, Shard]] = queue.Queue()
        self._whole: dict[int, dict[tuple[str | int, ...], np.ndarray]] = {}
        self._free: list[bytearray] = []
        self._drawing: _Connection | None = None
        self._closed = False

    def run(self, sampler: ShardSampler, change: Change = lambda phase, version: None) -> None:
        """Draw until `close`; the sampler is used by this thread alone, but for `interrupt`."""
        self._sampler = sampler
        threading.Thread(target=self._accept, name="sampler", daemon=True).start()
        loaded: tuple[str, int] | None = None
        change("idle", -1)
        while not self._closed:
            try:
                connection, shard = self._asked.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                continue
            weights = self._weights(connection, shard.version)
            if weights is None:
                continue
            wanted = (connection.session, shard.version)
            try:
                if loaded != wanted:
                    change("update", shard.version)
                    sampler.update(nested(weights), shard.version)
                    loaded = wanted
                change("generate", shard.version)
                answer = self._draw(sampler, connection, shard)
            except EngineError as error:
                loaded = None
                facts = {"number": shard.number, "why": str(error)}
                answer = Frame(kind=Kind.REFUSED, facts=facts)
            if connection.interrupted:  # the engine wants an update before it draws again
                loaded = None
            self._drop_before(shard.version)
            connection.say(answer)
            change("idle", shard.version)

    def close(self) -> None:
        """End all connections, and `run`."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._changed:
            for connection in self._connections:
                connection.close()
            self._changed.notify_all()

    def _draw(self, sampler: ShardSampler, connection: "_Connection", shard: Shard) -> Frame:
        before = sampler.stats()
        sampler.reset_prefix_cache()
        with self._changed:
            if connection.gone:
                raise EngineError("the trainer is gone")
            self._drawing = connection
        try:
            drawn = sampler.sample(shard.prompts, shard.settings, shard.seeds)
        finally:
            with self._changed:
                self._drawing = None
        stats = sampler.stats().minus(before)
        used = replace(stats, seconds=0.0, updates=0)  # the trainer's own count
        return completions_frame(shard.number, drawn, used)

    def _weights(self, connection: "_Connection", version: int) -> HostWeights | None:
        """A version, waited for; None where its trainer is gone."""
        with self._changed:
            while not connection.gone and not self._closed:
                if connection.session == self._session and version in self._whole:
                    return self._whole[version]
                self._changed.wait()
        return None

    def _drop_before(self, version: int) -> None:
        """Keep the memory of versions that no shard will name for the next ones."""
        with self._changed:
            for old in [each for each in self._whole if each < version]:
                for array in self._whole.pop(old).values():
                    if isinstance(base := _memory_of(array), bytearray):
                        self._free.append(base)

    def _memory(self, size: int) -> bytearray:
        with self._changed:
            for place, each in enumerate(self._free):
                if len(each) == size:
                    return self._free.pop(place)
        return bytearray(size)

    def _accept(self) -> None:
        while True:
            try:
                found, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(_Connection(found),), daemon=True).start()

    def _serve(self, connection: "_Connection") -> None:
        """Read a connection to its end, the first frame a JOIN with the token."""
        try:
            with contextlib.suppress(LinkError):
                connection.socket.settimeout(_JOIN_SECONDS)
                first = receive(connection.socket, longest=0)
                given = str(first.facts.get("token", ""))
                known = hmac.compare_digest(given.encode(), self._token.encode())
                if first.kind is not Kind.JOIN or not known:
                    return
                connection.socket.settimeout(None)
                self._welcome(connection, str(first.facts.get("session")))
                if first.facts.get("role") == "weights":
                    self._read_weights(connection)
                else:
                    self._read_prompts(connection)
        except (EngineError, KeyError, TypeError, ValueError) as error:
            connection.say(Frame(kind=Kind.REFUSED, facts={"why": str(error)}))
        finally:
            with self._changed:
                connection.gone = True
                self._connections.discard(connection)
                if self._drawing is connection:
                    connection.interrupted = True
                    self._sampler.interrupt()
                self._changed.notify_all()
            connection.close()

    def _welcome(self, connection: "_Connection", session: str) -> None:
        """Take a connection in; one of a new trainer ends those of the trainer before."""
        with self._changed:
            if session != self._session:
                self._session = session
                self._whole.clear()
                for other in self._connections:
                    other.close()
            connection.session = session
            self._connections.add(connection)
            facts = {"process": self._process, "versions": sorted(self._whole)}
        connection.say(Frame(kind=Kind.READY, facts=facts))

    def _read_prompts(self, connection: "_Connection") -> None:
        while True:
            self._asked.put((connection, frame_shard(receive(connection.socket))))

    def _read_weights(self, connection: "_Connection") -> None:
        coming: dict[tuple[str | int, ...], np.ndarray] = {}
        while True:
            frame = receive(connection.socket, memory=self._memory)
            if frame.kind is Kind.ARRAY:
                path, array = frame_weight(frame)
                coming[path] = array
                continue
            size = sum(array.nbytes for array in coming.values())
            if (len(coming), size) != (frame.facts["arrays"], frame.facts["bytes"]):
                raise EngineError(
                    f"version {frame.round} came as {len(coming)} arrays of {size} bytes instead "
                    f"of {frame.facts['arrays']} of {frame.facts['bytes']}"
                )
            with self._changed:
                if connection.session == self._session:
                    self._whole[frame.round] = coming
                self._changed.notify_all()
            connection.say(Frame(kind=Kind.READY, round=frame.round))
            coming = {}


class _Connection:
    """A trainer's connection."""

    def __init__(self, found: socket.socket) -> None:
        self.socket = found
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.session = ""
        self.gone = self.interrupted = False

    def say(self, frame: Frame) -> None:
        """Send; that the trainer is gone is noticed by the thread that reads."""
        with contextlib.suppress(LinkError):
            send(self.socket, frame)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _memory_of(array: np.ndarray) -> object:
    """What an array lies in."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base.obj if isinstance(base, memoryview) else base
