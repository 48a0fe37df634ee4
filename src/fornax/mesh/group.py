"""Several processes that run the same programs: process 0 tells operations, the others follow.

All processes hold their part of the same arrays and run the same programs in the same order. What a
program needs of the host, an operation's name and its arrays, goes from process 0 to the others
over TCP, as frames (`fornax.config.frames`): a secret first, then operations; nothing is unpickled.
In a launch between machines that is TLS with the run's certificate.
"""

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from fornax import __version__
from fornax.config import frames
from fornax.config.credentials import Credentials, of_run
from fornax.config.errors import ClusterError
from fornax.config.frames import Frame, Kind, LinkError
from fornax.mesh.hosts import decide, gather
from fornax.mesh.startup import find_processes

__all__ = ["Leader", "Member", "Operation", "join_group"]

_JOIN_SECONDS = 60.0
_LONGEST = 1 << 34
_KINDS = "biufcV"
"""Kinds of numpy's types that go to other processes; V has those of `ml_dtypes`."""


class Operation(NamedTuple):
    """What process 0 has the others do."""

    name: str
    arrays: list[np.ndarray]
    facts: Mapping[str, Any]


class Leader:
    """Process 0's connections to the others. Methods may be called in any thread."""

    def __init__(self, listener: socket.socket, token: str, count: int, credentials: Credentials):
        """Take the connections of the others, of which each brings the token.

        Args:
          credentials: of TLS, where they have a certificate.

        Raises:
          ClusterError: one does not come.
        """
        self._peers: list[socket.socket] = []
        self._sending = threading.Lock()
        self._heard = threading.Condition()
        self._done: Counter[str] = Counter()
        self._refused: dict[str, str] = {}
        self._lost: LinkError | None = None
        self._on_loss: Callable[[LinkError], None] | None = None
        self._closed = False
        until = time.monotonic() + _JOIN_SECONDS
        while len(self._peers) < count:
            listener.settimeout(max(0.01, until - time.monotonic()))
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                self._close_all()
                raise ClusterError(
                    f"{count - len(self._peers)} of {count} processes did not connect to process 0 "
                    f"within {_JOIN_SECONDS:g} s; see what they printed"
                ) from None
            with contextlib.suppress(LinkError):
                peer = credentials.accept(peer)
                if _is_member(peer, token):
                    self._peers.append(peer)
                    continue
            peer.close()

    def watch(self, lost: Callable[[LinkError], None]) -> None:
        """Listen to the others in threads; `lost` is called in one, once, when a process ends."""
        self._on_loss = lost
        for number, peer in enumerate(self._peers, 1):
            threading.Thread(
                target=self._listen, args=(number, peer), name="fornax-group", daemon=True
            ).start()

    def _listen(self, number: int, peer: socket.socket) -> None:
        try:
            while True:
                frame = frames.receive(peer, longest=0)
                what = str(frame.facts.get("what", ""))
                with self._heard:
                    self._done[what] += 1
                    if frame.kind is not Kind.READY:
                        why = frame.facts.get("why", frame.kind.name)
                        self._refused.setdefault(what, f"process {number}: {why}")
                    self._heard.notify_all()
        except LinkError as error:
            self.lose(error)

    def lose(self, error: Exception) -> LinkError:
        """A process ended, or did not do as the others: no process can be reached any more."""
        with self._heard:
            first = self._lost is None and not self._closed
            if self._lost is None:
                why = str(error).partition("\n")[0]
                self._lost = LinkError(f"a process of this group ended: {why}")
            self._heard.notify_all()
        if first and self._on_loss is not None:
            self._on_loss(self._lost)
        return self._lost

    def done(self, what: str = "") -> bool:
        """Whether all others have reported `what` done."""
        return self._lost is not None or self._done[what] == len(self._peers)

    def wait(self, what: str = "", seconds: float | None = None) -> None:
        """Return when all others have reported `what` done.

        Raises:
          LinkError: one of them ended.
          ClusterError: one of them could not do it.
          TimeoutError: not all have after this many seconds.
        """
        with self._heard:
            if not self._heard.wait_for(lambda: self.done(what), seconds):
                raise TimeoutError
            refused = self._refused.get(what)
        if self._lost is not None:
            raise self._lost
        if refused is not None:
            raise ClusterError(refused)

    def tell(self, operation: str, *arrays: np.ndarray | np.generic, **facts: object) -> None:
        """Have the others carry out an operation, with JSON-able facts.

        Raises:
          LinkError: one of them ended.
        """
        parts = [np.ascontiguousarray(each).reshape(np.shape(each)) for each in arrays]
        frame = Frame(
            kind=Kind.STEP,
            facts={
                **facts,
                "operation": operation,
                "arrays": [[_name(each.dtype), list(each.shape)] for each in parts],
            },
            body=b"".join(each.tobytes() for each in parts),
        )
        with self._sending:
            if self._lost is not None:
                raise self._lost
            for peer in self._peers:
                frames.send(peer, frame)

    def close(self) -> None:
        """Let the others end."""
        self._closed = True
        with self._sending:
            for peer in self._peers:
                with contextlib.suppress(LinkError):
                    frames.send(peer, Frame(kind=Kind.BYE))
            self._close_all()

    def _close_all(self) -> None:
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)  # frees the thread that listens to it
            peer.close()


class Member:
    """Another process's connection to process 0."""

    def __init__(self, connection: socket.socket):
        """`connection` is this one's own from here on."""
        self._connection = connection
        self._sending = threading.Lock()

    def report(self, what: str = "", refused: str | None = None) -> None:
        """Say that something is done, or why it cannot be; from any thread.

        Raises:
          LinkError: process 0 is gone.
        """
        kind = Kind.READY if refused is None else Kind.REFUSED
        facts = {"what": what} if refused is None else {"what": what, "why": refused}
        with self._sending:
            frames.send(self._connection, Frame(kind=kind, facts=facts))

    def operations(self) -> Iterator[Operation]:
        """What process 0 tells, until it ends the group; the connection is closed then.

        Raises:
          LinkError: process 0 is gone.
        """
        with self._connection:
            while True:
                frame = frames.receive(self._connection, longest=_LONGEST)
                if frame.kind is Kind.BYE:
                    return
                if frame.kind is not Kind.STEP:
                    raise LinkError(
                        f"{frame.kind.name} is not a message that a process receives here"
                    )
                yield Operation(str(frame.facts.get("operation")), _arrays(frame), frame.facts)


def join_group(facts: Mapping[str, object]) -> Leader | Member:
    """Connect the processes of a run; all of them call this once, from the main thread.

    Args:
      facts: what must be the same in all, by its name; compared by what `repr` says.

    Returns:
      In process 0 its connections to the others, in these the one to process 0.

    Raises:
      ClusterError: versions, devices or facts differ between processes, or one did not come.
    """
    mine = {"version": __version__, "devices": str(jax.local_device_count())}
    _agree(gather({**mine, **{name: repr(value) for name, value in facts.items()}}))
    listener: socket.socket | None = None

    def listen() -> tuple[str, int, str]:
        nonlocal listener
        host = str(find_processes(None).coordinator).rpartition(":")[0]
        listener = socket.create_server((host, 0))
        host, port = listener.getsockname()[:2]
        return host, port, secrets.token_hex(32)

    host, port, token = decide(listen)
    credentials = of_run() or Credentials(token="")  # of this meeting is the token above
    if listener is not None:
        with listener:
            return Leader(listener, token, jax.process_count() - 1, credentials)
    connection = socket.create_connection((host, port), timeout=_JOIN_SECONDS)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = credentials.dial(connection)
    frames.send(connection, Frame(kind=Kind.JOIN, facts={"token": token}))
    return Member(connection)


def _is_member(peer: socket.socket, token: str) -> bool:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.settimeout(_JOIN_SECONDS / 4)
    given = str(frames.receive(peer, longest=0).facts.get("token", ""))
    peer.settimeout(None)
    return hmac.compare_digest(given.encode(), token.encode())


def _agree(said: list[dict[str, str]]) -> None:
    first = said[0]
    for number, other in enumerate(said):
        for name in first:
            if other.get(name) != first[name]:
                raise ClusterError(
                    f"process {number} has {name}={other.get(name)} and process 0 has "
                    f"{first[name]}; start all with the same command, files and devices"
                )


def _name(dtype: np.dtype) -> str:
    return dtype.name if dtype.kind == "V" else dtype.str


def _arrays(frame: Frame) -> list[np.ndarray]:
    """The arrays of a frame; LinkError for what is none."""
    found, at = [], 0
    for name, shape in frame.facts["arrays"]:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if dtype.kind not in _KINDS or not 0 <= size <= len(frame.body) - at:
            raise LinkError(f"an array of {name} and shape {shape} is not in its frame")
        found.append(np.frombuffer(frame.body, dtype, size // dtype.itemsize, at).reshape(shape))
        at += size
    return found
