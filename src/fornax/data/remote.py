"""Records read and transformed by other processes: the reader's side, and what both sides say.

Only reading and transforms are elsewhere. The order of records, packing and the position stay
here, so batches, and what a checkpoint holds, are the same with any number of workers. A span of
a shard's positions is asked for, and its tokens come back:

    JOIN    token, config (a DataConfig), split, batch_size, seq_len; answered by
    READY   identity of the opened pipeline, or REFUSED with the reason
    READ    round: number of the request; shard, start, count; answered by
    TOKENS  the same round; arrays, for each record its dtype and length or null; body: their bytes
    REFUSED the same round; why: the message of the DataError

What a worker does not answer, because it is gone or held, another one does, or this process.
"""

import contextlib
import json
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fornax.config import environment, to_mapping
from fornax.config.addresses import read_addresses
from fornax.config.credentials import Credentials, TlsError, of_run
from fornax.config.errors import ConfigError, DataError
from fornax.config.frames import Frame, Kind, LinkError, connect, receive, send
from fornax.data.pipeline import Pipeline
from fornax.data.stream import ShardStream, Tokens

__all__ = ["DataWorkers", "RemoteReader", "find_workers", "pack_tokens", "unpack_tokens"]

_CONNECTIONS = 2
"""To each worker: while one request is answered the next is on its way."""
_CONNECT_SECONDS = 5.0
_OPEN_SECONDS = 120.0
_RETRY_SECONDS = 0.5
_TICK_SECONDS = 0.1
_PATIENCE_SECONDS = 10.0
_TIMES_SLOWER = 4
"""Than the slowest answer so far: after this long a worker is taken for one that is held."""
_ALONE_SECONDS = 3.0


@dataclass(frozen=True)
class DataWorkers:
    """Processes that read and transform records."""

    addresses: Sequence[str]
    """host:port of each; looked up again for each connection."""
    credentials: Credentials
    """What they ask for."""


def find_workers() -> DataWorkers | None:
    """The data workers that the environment names, if any.

    Raises:
      ConfigError: for addresses that are none, or a process that has not what they ask for.
    """
    text, credentials = environment.data_workers(), of_run()
    if not text:
        return None
    addresses = read_addresses(text)
    if (
        credentials is None
        or not addresses
        or not all(each.rpartition(":")[2].isdigit() for each in addresses)
    ):
        raise ConfigError(
            f"FORNAX_DATA_WORKERS={text} must be host:port with commas between, or @FILE, and "
            "this process must have the token that they ask for, which fornax launch "
            "--data-workers gives to the processes that it starts: run the command by it"
        )
    return DataWorkers(addresses, credentials)


def pack_tokens(tokens: Sequence[np.ndarray | None]) -> tuple[list[list[Any] | None], bytes]:
    """Tokens of records as JSON that describes them, and their bytes."""
    arrays = [None if each is None else [each.dtype.str, len(each)] for each in tokens]
    return arrays, b"".join(np.ascontiguousarray(x).tobytes() for x in tokens if x is not None)


def unpack_tokens(arrays: Sequence[Sequence[Any] | None], body: bytes | bytearray) -> Tokens:
    """The tokens of `pack_tokens`; they share the memory of `body`.

    Raises:
      ValueError: when the two do not belong together.
    """
    found: Tokens = []
    at = 0
    for described in arrays:
        if described is None:
            found.append(None)
            continue
        dtype, length = np.dtype(described[0]), int(described[1])
        if dtype.kind not in "iu":
            raise ValueError(f"tokens of {dtype}")
        found.append(np.frombuffer(body, dtype, length, at))
        at += length * dtype.itemsize
    if at != len(body):
        raise ValueError(f"{len(body)} bytes for {at}")
    return found


@dataclass
class _Job:
    """A span that is asked for; the first to have its tokens settles it."""

    stream: ShardStream
    start: int
    count: int
    done: threading.Event = field(default_factory=threading.Event)
    sent_at: float | None = None
    """When a worker was given it."""
    tokens: Tokens | None = None
    error: Exception | None = None

    def settle(self, tokens: Tokens | None, error: Exception | None = None) -> None:
        if not self.done.is_set():
            self.tokens, self.error = tokens, error
            self.done.set()


class RemoteReader:
    """Reads the spans of a pipeline by data workers."""

    def __init__(self, workers: DataWorkers, pipeline: Pipeline, split: str) -> None:
        """Connect in the background; `close` ends it.

        Args:
          workers: who reads.
          pipeline: what they open too.
          split: of it.
        """
        config = pipeline.config
        self._join = {
            "token": workers.credentials.token,
            "config": to_mapping(config),
            "split": split,
            "batch_size": pipeline.batch_size,
            "seq_len": pipeline.seq_len,
        }
        self._identity = json.loads(json.dumps(pipeline.identity()))
        self.ahead = 1 + -(-len(workers.addresses) * _CONNECTIONS // config.virtual_shards)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._again: deque[_Job] = deque()
        self._connected: set[socket.socket] = set()
        self._refused: DataError | None = None
        self._slowest = 0.0
        self._alone_since = time.monotonic()
        self._closed = False
        self._addresses, self._credentials = workers.addresses, workers.credentials
        for number in range(len(workers.addresses)):
            for _ in range(_CONNECTIONS):
                threading.Thread(
                    target=self._serve, args=(number,), name="data worker", daemon=True
                ).start()

    def ask(self, stream: ShardStream, start: int, count: int) -> Callable[[], Tokens]:
        """See `SpanReader`."""
        job = _Job(stream, start, count)
        self._jobs.put(job)
        return lambda: self._wait(job)

    def close(self) -> None:
        """End the connections; a reader that waits for tokens reads them by itself."""
        self._closed = True
        for each in list(self._connected):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _wait(self, job: _Job) -> Tokens:
        while not self._closed and self._refused is None and not self._in_vain(job):
            if job.done.wait(_TICK_SECONDS):
                break
        if self._refused is not None:
            raise self._refused
        if not job.done.is_set():
            job.settle(job.stream.read(job.start, job.count))
        if job.error is not None:
            raise job.error
        assert job.tokens is not None
        return job.tokens

    def _in_vain(self, job: _Job) -> bool:
        """Whether to wait for a span no longer: there is no worker, or the one that has it says
        nothing for longer than any answer took."""
        now, sent_at = time.monotonic(), job.sent_at
        if not self._connected and now - self._alone_since > _ALONE_SECONDS:
            return True
        patience = max(_PATIENCE_SECONDS, _TIMES_SLOWER * self._slowest)
        return sent_at is not None and now - sent_at > patience

    def _next(self) -> _Job | None:
        """The next span to be read; None after a while without one."""
        with contextlib.suppress(IndexError):
            return self._again.popleft()
        with contextlib.suppress(queue.Empty):
            return self._jobs.get(timeout=_RETRY_SECONDS)
        return None

    def _serve(self, number: int) -> None:
        """Keep one connection to a worker, and have it read what is asked for."""
        while not self._closed and self._refused is None:
            try:
                found = connect(self._addresses[number], _CONNECT_SECONDS)
                connection = self._credentials.dial(found)
            except LinkError:
                time.sleep(_RETRY_SECONDS)
                continue
            with connection:
                try:
                    self._introduce(connection)
                    self._connected.add(connection)
                    self._read_by(connection)
                except TlsError as error:
                    where = self._addresses[number]
                    self._refused = DataError(f"the data worker at {where}: {error}")
                except LinkError:
                    time.sleep(_RETRY_SECONDS / 10)
                finally:
                    if connection in self._connected:
                        self._connected.discard(connection)
                        self._alone_since = time.monotonic()

    def _introduce(self, connection: socket.socket) -> None:
        connection.settimeout(_OPEN_SECONDS)
        send(connection, Frame(kind=Kind.JOIN, facts=self._join))
        answer = receive(connection)
        connection.settimeout(None)
        theirs = answer.facts.get("identity")
        if answer.kind is Kind.REFUSED:
            self._refused = DataError(f"a data worker refuses: {answer.facts.get('why')}")
        elif answer.kind is not Kind.READY or theirs != self._identity:
            self._refused = DataError(
                f"a data worker reads other data than this process: its pipeline is {theirs} and "
                f"this one's {self._identity}; give both the same files"
            )

    def _read_by(self, connection: socket.socket) -> None:
        number = 0
        while not self._closed and self._refused is None:
            job = self._next()
            if job is None or job.done.is_set():
                continue
            number += 1
            facts = {"shard": job.stream.shard, "start": job.start, "count": job.count}
            began = job.sent_at = time.monotonic()
            try:
                send(connection, Frame(kind=Kind.READ, round=number, facts=facts))
                answer = receive(connection)
                self._slowest = max(self._slowest, time.monotonic() - began)
                if answer.round != number:
                    raise LinkError("the answer is to another request")
                job.settle(*_outcome(answer, job.count))
            except LinkError:
                job.sent_at = None
                self._again.append(job)
                raise


def _outcome(answer: Frame, count: int) -> tuple[Tokens | None, Exception | None]:
    if answer.kind is Kind.REFUSED:
        return None, DataError(str(answer.facts.get("why")))
    try:
        tokens = unpack_tokens(answer.facts["arrays"], bytes(answer.body))
    except (KeyError, TypeError, ValueError) as error:
        raise LinkError(f"a data worker's tokens cannot be read: {error}") from error
    if answer.kind is not Kind.TOKENS or len(tokens) != count:
        raise LinkError(f"a data worker gives {len(tokens)} records for {count}")
    return tokens, None


def opened_for(facts: Mapping[str, Any]) -> str:
    """What a JOIN asks to be opened, as a key."""
    return json.dumps({k: facts[k] for k in ("config", "split", "batch_size", "seq_len")})
