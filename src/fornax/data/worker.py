"""A data worker: a process that reads and transforms the records that readers ask for.

It has no information about the run: each connection says what to open, after it has shown the run's
credentials.
"""

import contextlib
import functools
import json
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from fornax.config import from_mapping, worker_record
from fornax.config.credentials import Credentials, TlsError, tell_refusal
from fornax.config.errors import DataError, FornaxError
from fornax.config.frames import Frame, Kind, LinkError, receive, send
from fornax.config.worker_process import receive as hear
from fornax.config.worker_process import send as tell
from fornax.data.config import DataConfig
from fornax.data.pipeline import Pipeline, open_pipeline
from fornax.data.remote import opened_for, pack_tokens

__all__ = ["DataServer", "run"]

_JOIN_SECONDS = 60.0
_OPENED = 8


def run(parent: Connection) -> None:
    """The process: serves until its parent is gone.

    It is given `credentials`, and `listener`, the number of a listening socket's descriptor that it
    inherited: connections that came before it are served too. It says `ready`.
    """
    order = hear(parent)
    record = worker_record.current()
    change = (lambda phase, count: None) if record is None else record.change
    listener = socket.socket(fileno=order["listener"])
    server = DataServer(listener, Credentials(**order["credentials"]), change)
    threading.Thread(target=server.run, name="data server", daemon=True).start()
    with contextlib.suppress(EOFError):
        tell(parent, "ready")
        hear(parent)  # nothing more is said


class DataServer:
    """Serves any number of readers; records are read for one of them at a time."""

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials,
        change: Callable[[str, int], None] = lambda phase, count: None,
    ) -> None:
        """Serve nothing yet.

        Args:
          listener: a listening socket.
          credentials: what a connection must show first.
          change: told what is done, `idle` or `read`, and of how many records so far.
        """
        self._listener, self._credentials, self._change = listener, credentials, change
        self._reading = threading.Lock()
        self._records = 0
        self._open = functools.lru_cache(_OPENED)(_open)

    def run(self) -> None:
        """Accept readers until `close`."""
        self._change("idle", 0)
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Accept no more readers."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        with (
            contextlib.suppress(LinkError),
            connection,
            self._credentials.accept(connection) as connection,
        ):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(_JOIN_SECONDS)
            try:
                first = receive(connection, longest=0)
            except TlsError as error:
                tell_refusal(connection, error)
                raise
            known = self._credentials.admit(first.facts.get("token", ""))
            if first.kind is not Kind.JOIN or not known:
                return
            connection.settimeout(None)
            try:
                with self._reading:
                    pipeline, identity = self._open(opened_for(first.facts))
            except (FornaxError, KeyError, TypeError) as error:
                send(connection, Frame(kind=Kind.REFUSED, facts={"why": str(error)}))
                return
            send(connection, Frame(kind=Kind.READY, facts={"identity": identity}))
            while True:
                send(connection, self._answer(pipeline, receive(connection, longest=0)))

    def _answer(self, pipeline: Pipeline, asked: Frame) -> Frame:
        try:
            shard, start, count = (int(asked.facts[k]) for k in ("shard", "start", "count"))
        except (KeyError, TypeError, ValueError) as error:
            raise LinkError(f"what was asked makes no sense: {error!r}") from error
        with self._reading:
            self._change("read", self._records)
            try:
                tokens = pipeline.stream(shard).read(start, count)
            except DataError as error:
                return Frame(kind=Kind.REFUSED, round=asked.round, facts={"why": str(error)})
            finally:
                self._records += count
                self._change("idle", self._records)
        arrays, body = pack_tokens(tokens)
        return Frame(kind=Kind.TOKENS, round=asked.round, facts={"arrays": arrays}, body=body)


def _open(key: str) -> tuple[Pipeline, dict[str, Any]]:
    facts = json.loads(key)
    config = from_mapping(DataConfig, facts["config"])
    pipeline = open_pipeline(
        config,
        batch_size=facts["batch_size"],
        seq_len=facts["seq_len"],
        split=facts["split"],
    )
    return pipeline, pipeline.identity()
