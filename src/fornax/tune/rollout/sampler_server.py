"""A sampler as a process of its own: draws what a trainer asks, under the version that it names.

Connections are read by threads: arrays of the next version come in while the engine draws with the
one before. A version counts once it is whole and every checksum was right; the engine takes it over
between two shards, when the first that names it is to be drawn.

A trainer on this machine comes to an abstract Unix socket with its versions, which it is notified
of, and passes memory on. It writes to that again once told that nothing older than a version is
used: `oldest` in the answers here.
"""

import contextlib
import mmap
import queue
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from fornax.config.credentials import Credentials, TlsError, tell_refusal
from fornax.config.errors import EngineError
from fornax.config.frames import Frame, Kind, LinkError, receive, send
from fornax.tune.rollout.sampler import SamplerStats, SampleSettings, Weights
from fornax.tune.rollout.segments import HostWeights
from fornax.tune.rollout.shards import (
    Shard,
    completions_frame,
    frame_mapped,
    frame_shard,
    frame_weight,
    nested,
)
from fornax.tune.rollout.types import Completion

__all__ = ["SamplerServer", "ShardSampler"]

_JOIN_SECONDS = 60.0
_TICK_SECONDS = 0.2

Change = Callable[[str, int], None]
"""(phase, version): what the process does now."""


class ShardSampler(Protocol):
    """What a server uses of a `PartSampler`."""

    def sample_part(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[SampleSettings],
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        """See `PartSampler`; one thread calls it."""

    def update(self, params: Weights, version: int) -> None:
        """See `Sampler`; it copies what it is given."""

    def stats(self) -> SamplerStats:
        """See `Sampler`."""

    def interrupt(self) -> None:
        """Make `sample_part` raise EngineError until the next `update`; from any thread."""


class SamplerServer:
    """Serves one trainer at a time; a newer one takes the place of the one before."""

    def __init__(
        self, listener: socket.socket, credentials: Credentials, *, share: bool = True
    ) -> None:
        """Serve nothing yet.

        Args:
          listener: a listening socket; connections wait in its backlog until `run`.
          credentials: what a connection must show first; of TLS what comes over the network.
          share: whether a trainer on this machine may pass weights on in memory.
        """
        self._credentials = credentials
        self._process = secrets.token_hex(8)
        self._local = f"fornax-sampler-{secrets.token_hex(16)}"
        self._listeners = [listener]
        if share and sys.platform == "linux":
            self._listeners.append(_listen_here(self._local))
        self._oldest, self._used = 0, False
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
        for listener in self._listeners:
            args = (listener,)
            threading.Thread(target=self._accept, args=args, name="sampler", daemon=True).start()
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
            if connection.interrupted:  # the engine needs an update before it draws again
                loaded = None
            del weights
            connection.say(self._finish(connection, shard.version, answer))
            change("idle", shard.version)

    def close(self) -> None:
        """End all connections, and `run`."""
        self._closed = True
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._changed:
            for connection in self._connections:
                connection.close()
            self._changed.notify_all()

    def _draw(self, sampler: ShardSampler, connection: "_Connection", shard: Shard) -> Frame:
        before = sampler.stats()
        with self._changed:
            if connection.gone:
                raise EngineError("the trainer is gone")
            self._drawing = connection
        try:
            drawn = sampler.sample_part(shard.prompts, shard.settings, shard.seeds)
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
                    self._used = True
                    return self._whole[version]
                self._changed.wait()
        return None

    def _finish(self, connection: "_Connection", version: int, answer: Frame) -> Frame:
        """The answer for a shard, with the oldest version that is still held."""
        with self._changed:
            self._used = False
            if connection.session == self._session:
                self._drop_before(version)
            return replace(answer, facts={**answer.facts, "oldest": self._oldest})

    def _drop_before(self, version: int) -> None:
        """Keep the memory of versions that no shard will name for the next ones."""
        self._oldest = max(self._oldest, version)
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

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                found, _ = listener.accept()
            except OSError:
                return
            if listener.family in (socket.AF_INET, socket.AF_INET6):
                try:
                    found = self._credentials.accept(found)
                except LinkError:
                    continue
            threading.Thread(target=self._serve, args=(_Connection(found),), daemon=True).start()

    def _serve(self, connection: "_Connection") -> None:
        """Read a connection to its end, the first frame a JOIN with the token."""
        try:
            with contextlib.suppress(LinkError):
                connection.socket.settimeout(_JOIN_SECONDS)
                try:
                    first = receive(connection.socket, longest=0)
                except TlsError as error:
                    tell_refusal(connection.socket, error)
                    raise
                known = self._credentials.admit(first.facts.get("token", ""))
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
                self._session, self._oldest = session, 0
                self._whole.clear()
                for other in self._connections:
                    other.close()
            connection.session = session
            self._connections.add(connection)
            facts: dict[str, object] = {"process": self._process, "versions": sorted(self._whole)}
            if len(self._listeners) > 1:
                facts["local"] = self._local
        connection.say(Frame(kind=Kind.READY, facts=facts))

    def _read_prompts(self, connection: "_Connection") -> None:
        while True:
            self._asked.put((connection, frame_shard(receive(connection.socket))))

    def _read_weights(self, connection: "_Connection") -> None:
        coming: dict[tuple[str | int, ...], np.ndarray] = {}
        mapped: dict[int, mmap.mmap] = {}
        while True:
            frame = receive(connection.socket, memory=self._memory)
            if frame.kind is Kind.ARRAY:
                path, array = frame_weight(frame)
                coming[path] = array
                continue
            if frame.kind is Kind.MAPPED:
                coming = frame_mapped(frame, connection.descriptor(), mapped)
            else:
                _check_whole(coming, frame)
            facts = self._take(connection, frame.round, coming, int(frame.facts["keep"]))
            connection.say(Frame(kind=Kind.READY, round=frame.round, facts=facts))
            coming = {}

    def _take(
        self,
        connection: "_Connection",
        version: int,
        weights: dict[tuple[str | int, ...], np.ndarray],
        keep: int,
    ) -> dict[str, object]:
        """Hold a version, and no longer those before `keep`, if no shard is drawn with one."""
        with self._changed:
            if connection.session == self._session:
                self._whole[version] = weights
                if not self._used:
                    self._drop_before(keep)
            self._changed.notify_all()
            return {"oldest": self._oldest}


class _Connection:
    """A trainer's connection."""

    def __init__(self, found: socket.socket) -> None:
        self.socket = found
        if found.family in (socket.AF_INET, socket.AF_INET6):
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.session = ""
        self.gone = self.interrupted = False

    def say(self, frame: Frame) -> None:
        """Send; that the trainer is gone is noticed by the thread that reads."""
        with contextlib.suppress(LinkError):
            send(self.socket, frame)

    def descriptor(self) -> int:
        """What comes with the next byte.

        Raises:
          LinkError: when nothing does.
        """
        try:
            _, found, *_ = socket.recv_fds(self.socket, 1, 1)
        except OSError as error:
            raise LinkError(f"the connection ended: {error}") from error
        if len(found) != 1:
            raise LinkError("memory was announced, and none came")
        return found[0]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _listen_here(name: str) -> socket.socket:
    """A socket that processes of this machine find by a name, which is in no folder."""
    made = socket.socket(socket.AF_UNIX)
    made.bind(f"\0{name}")
    made.listen()
    return made


def _check_whole(coming: HostWeights, frame: Frame) -> None:
    size = sum(array.nbytes for array in coming.values())
    if (len(coming), size) != (frame.facts["arrays"], frame.facts["bytes"]):
        raise EngineError(
            f"version {frame.round} came as {len(coming)} arrays of {size} bytes instead of "
            f"{frame.facts['arrays']} of {frame.facts['bytes']}"
        )


def _memory_of(array: np.ndarray) -> object:
    """What an array lies in."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base.obj if isinstance(base, memoryview) else base
