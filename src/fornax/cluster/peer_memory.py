"""Snapshots in the memory of another host: an agent sends them there, a newcomer fetches them.

Each agent listens. In the background, outside the worker's step, it offers the newest whole
snapshot of its worker to the agent of the rank that the snapshot names, which keeps the two newest
of each rank. Bytes travel in pieces, each a frame with a checksum; a snapshot counts once all of
them are there and its header has the checksum that was offered. The parts have checksums of their
own, which the worker compares before it uses them.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from fornax.cluster.kept_memory import memory_files
from fornax.config.credentials import Credentials
from fornax.config.frames import Frame, Kind, LinkError, receive, send
from fornax.config.snapshot_file import FIRST, Snapshot, SnapshotFile

__all__ = ["PeerMemory"]

_PIECE = 8 << 20
_RETRY_SECONDS = 0.5
_CONNECT_SECONDS = 5.0
_SILENT_SECONDS = 60.0

Report = Callable[[dict[str, object]], None]


class PeerMemory:
    """What an agent sends, holds and fetches; its work is done by threads."""

    def __init__(
        self,
        rank: int,
        memory: Sequence[int],
        *,
        credentials: Credentials,
        report: Report,
        host: str = "127.0.0.1",
        former: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """Listen, and send nothing before `connect`.

        Args:
          rank: of this agent's worker.
          memory: descriptors of its two files, which may be closed before the threads end.
          credentials: what everybody who connects has to show.
          report: called from any thread with a message for the controller.
          host: address to listen on.
          former: descriptors of snapshots of ranks of a larger group, which become this object's.
        """
        self._rank, self._credentials, self._report = rank, credentials, report
        self._own = [SnapshotFile(os.dup(each)) for each in memory]
        self._replicas = {r: [SnapshotFile(each) for each in held] for r, held in former.items()}
        # Ranks of a group of another size, until the next has snapshots of its own.
        self._former = set(former)
        self._newest_then: Snapshot | None = None
        self._lock = threading.Lock()
        self._peers: dict[int, str] = {}
        self._hosts = 0
        self._closed = threading.Event()
        self._stirred = threading.Event()
        self._heads: list[bytes] = []
        self._fetching: threading.Thread | None = None
        self._sends: tuple[tuple[int, str], socket.socket] | None = None
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        """host:port."""
        for run in (self._accept, self._replicate):
            threading.Thread(target=run, name="peer-memory", daemon=True).start()

    def connect(self, peers: Mapping[int, str], hosts: int) -> None:
        """Know the addresses of the agents, by rank; with another number of hosts, what was held
        for them is useful only until the group has snapshots of its own."""
        newest = self._newest()
        with self._lock:
            if hosts != self._hosts:
                self._former |= set(self._replicas)
                self._newest_then = None if newest is None else newest[1]
                self._report({"kind": "holds", "ranks": []})
            self._peers, self._hosts = dict(peers), hosts
        sends = self._sends
        if sends is not None and sends[0] != self._target():  # it may wait for an answer for long
            with contextlib.suppress(OSError):
                sends[1].shutdown(socket.SHUT_RDWR)
        self._stirred.set()

    def look(self) -> None:
        """Notice a new snapshot of the worker's, which says nothing of it: to be called often."""
        heads = [file.head() for file in self._own]
        if heads != self._heads:
            self._heads = heads
            self._stirred.set()
            newest = self._newest()
            if self._former and newest is not None and newest[1] != self._newest_then:
                with self._lock:
                    self._forget(self._former)

    def replicas(self) -> list[int]:
        """Descriptors of what is held for others."""
        with self._lock:
            return [file.descriptor for pair in self._replicas.values() for file in pair]

    def held(self) -> dict[int, list[int]]:
        """Descriptors of all that is in this host's memory, by the rank whose it is; useful to the
        thread that calls `look` and `close`, which close some."""
        with self._lock:
            pairs = {self._rank: self._own, **self._replicas}
            return {rank: [file.descriptor for file in pair] for rank, pair in pairs.items()}

    def fetch(self, holders: Sequence[str], leaving: Mapping[int, str] | None = None) -> None:
        """Begin to fetch snapshots.

        Args:
          holders: the first of them that has any gives this rank's.
          leaving: addresses of agents of a larger group that leave it, by rank: each gives its own,
            which are held until the next group has snapshots.
        """
        newest = self._newest()
        with self._lock:
            self._newest_then = None if newest is None else newest[1]
        self._fetching = threading.Thread(
            target=self._fetch_all, args=(holders, leaving or {}), daemon=True
        )
        self._fetching.start()

    @property
    def fetching(self) -> bool:
        """Whether that is still in progress."""
        return self._fetching is not None and self._fetching.is_alive()

    def close(self) -> None:
        """Take and send no more, and give up what is held for others."""
        self._closed.set()
        self._stirred.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            self._forget(set(self._replicas))

    def __del__(self) -> None:
        """Close what the threads read, as none is left."""
        _close(self._own)

    def _forget(self, ranks: set[int]) -> None:
        for rank in ranks & set(self._replicas):
            _close(self._replicas.pop(rank))
        self._former -= ranks

    def _accept(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError):
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one agent, after the token."""
        connection.settimeout(_SILENT_SECONDS)
        with (
            contextlib.suppress(LinkError, KeyError, TypeError, ValueError, OSError),
            connection,
            self._credentials.accept(connection) as connection,
        ):
            first = receive(connection, longest=0)
            if first.kind is not Kind.JOIN or not self._credentials.admit(first.facts["token"]):
                return
            _prepare(connection)
            while not self._closed.is_set():
                connection.settimeout(None)
                frame = receive(connection, longest=0)
                connection.settimeout(_SILENT_SECONDS)
                if frame.kind is Kind.FETCH:
                    self._give(connection, frame.rank)
                elif frame.kind is Kind.OFFER:
                    with self._held_for(frame.rank) as pair:
                        new = _take(connection, pair, frame)
                    if new:
                        with self._lock:
                            self._former.discard(frame.rank)
                        self._report({"kind": "holds", "ranks": self._holds()})

    @contextlib.contextmanager
    def _held_for(self, rank: int) -> Iterator[list[SnapshotFile]]:
        """The files of a rank's replica; what replaces them meanwhile does not close them."""
        with self._lock:
            if rank not in self._replicas:
                names = memory_files(f"fornax-replica-of-{rank}")
                self._replicas[rank] = [SnapshotFile(each) for each in names]
            pair = [SnapshotFile(os.dup(each.descriptor)) for each in self._replicas[rank]]
        try:
            yield pair
        finally:
            _close(pair)

    def _holds(self) -> list[int]:
        with self._lock:
            held = {r: pair for r, pair in self._replicas.items() if r not in self._former}
            return sorted(r for r, pair in held.items() if any(x.found() for x in pair))

    def _give(self, connection: socket.socket, rank: int) -> None:
        """Send what is held of a rank, this agent's own too."""
        if rank == self._rank:
            _give_all(connection, self._own, rank)
        elif rank in self._holds():
            with self._held_for(rank) as pair:
                _give_all(connection, pair, rank)
        send(connection, Frame(kind=Kind.BYE))

    def _fetch_all(self, holders: Sequence[str], leaving: Mapping[int, str]) -> None:
        for address in holders:
            if self._fetch(self._rank, address, self._own):
                break
        for rank, address in leaving.items():
            with self._held_for(rank) as pair:
                self._fetch(rank, address, pair)
            with self._lock:
                self._former.add(rank)

    def _fetch(self, rank: int, address: str, files: Sequence[SnapshotFile]) -> bool:
        """Ask an agent for the snapshots of a rank; whether any is new in `files`."""
        began, found = time.monotonic(), []
        with (
            contextlib.suppress(LinkError, OSError, KeyError, TypeError, ValueError),
            self._connected(address) as connection,
        ):
            send(connection, Frame(kind=Kind.FETCH, rank=rank))
            while (frame := receive(connection, longest=0)).kind is Kind.OFFER:
                if _take(connection, files, frame):
                    found.append(frame.round)
        if found:
            whole = [each for file in files if (each := file.found()) is not None]
            seconds = round(time.monotonic() - began, 3)
            size = sum(each.size for each in whole if each.step in found)
            report = {"of": rank, "steps": sorted(found), "bytes": size, "seconds": seconds}
            self._report({"kind": "fetched", **report})
        return bool(found)

    def _connected(self, address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
        try:
            connection.settimeout(_SILENT_SECONDS)
            connection = self._credentials.dial(connection)
            _prepare(connection)
            facts = {"token": self._credentials.token}
            send(connection, Frame(kind=Kind.JOIN, rank=self._rank, facts=facts))
        except BaseException:
            connection.close()
            raise
        return connection

    def _replicate(self) -> None:
        """Send each new snapshot to its peer, until closed."""
        while self._is_stirred():
            target = self._target()
            if target is None:
                continue
            with contextlib.suppress(LinkError, OSError), self._connected(target[1]) as connection:
                self._sends = target, connection
                for file, found in self._whole():  # an agent that is new there has none of them
                    if found.peer == target[0] and self._target() == target:
                        _give_one(connection, file, found, self._rank)
                        file.set_replicated(found)
                while self._is_stirred() and self._target() == target:
                    self._send_newest(connection, target[0])
            self._sends = None
            self._closed.wait(_RETRY_SECONDS)
            self._stirred.set()

    def _is_stirred(self) -> bool:
        """Wait until there may be something to send; False once closed."""
        self._stirred.wait()
        self._stirred.clear()
        return not self._closed.is_set()

    def _target(self) -> tuple[int, str] | None:
        """The rank that the newest snapshot names, and where its agent listens."""
        newest = self._newest()
        rank = None if newest is None else newest[1].peer
        with self._lock:
            address = None if rank is None else self._peers.get(rank)
        return None if rank is None or address is None else (rank, address)

    def _whole(self) -> list[tuple[SnapshotFile, Snapshot]]:
        """Its worker's whole snapshots, the newest last."""
        whole = [(file, found) for file in self._own if (found := file.found()) is not None]
        return sorted(whole, key=lambda each: each[1].step)

    def _newest(self) -> tuple[SnapshotFile, Snapshot] | None:
        return next(reversed(self._whole()), None)

    def _send_newest(self, connection: socket.socket, peer: int) -> None:
        newest = self._newest()
        if newest is None or newest[1].peer != peer or newest[0].is_replicated(newest[1]):
            return
        _give_one(connection, *newest, self._rank)
        newest[0].set_replicated(newest[1])


def _close(files: Sequence[SnapshotFile]) -> None:
    for each in files:
        os.close(each.descriptor)


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _give_all(connection: socket.socket, files: Sequence[SnapshotFile], rank: int) -> None:
    for file in files:
        found = file.found()
        if found is not None:
            _give_one(connection, file, found, rank)


def _give_one(connection: socket.socket, file: SnapshotFile, found: Snapshot, rank: int) -> None:
    """Send a snapshot, if the other end lacks it; returns when it is whole there.

    Raises:
      LinkError: when the connection ends, or the worker wrote another snapshot meanwhile.
    """
    names = ("at", "length", "crc", "peer", "to_disk")
    facts = {name: getattr(found, name) for name in names}
    send(connection, Frame(kind=Kind.OFFER, rank=rank, round=found.step, facts=facts))
    if not _answer(connection):
        return
    room = memoryview(bytearray(min(_PIECE, found.size)))
    for offset in range(FIRST, found.size, _PIECE):
        count = os.preadv(file.descriptor, [room[: found.size - offset]], offset)
        if file.found() != found:
            raise LinkError("the snapshot was replaced while it was sent")
        send(connection, Frame(kind=Kind.PIECE, rank=rank, round=offset, body=room[:count]))
    _answer(connection)


def _answer(connection: socket.socket) -> bool:
    answer = receive(connection, longest=0)
    if answer.kind is not Kind.ANSWER:
        raise LinkError(f"the other agent said {answer.kind.name} out of turn")
    return bool(answer.facts["wanted"])


def _take(connection: socket.socket, files: Sequence[SnapshotFile], offer: Frame) -> bool:
    """Receive a snapshot that is offered in place of the older of the files; whether it is new.

    Raises:
      LinkError: when the connection ends before it is whole, or it is not what was offered.
      KeyError, TypeError, ValueError: for an offer that lacks something.
    """
    at, length, crc = (int(offer.facts[name]) for name in ("at", "length", "crc"))
    peer, to_disk = offer.facts["peer"], bool(offer.facts["to_disk"])
    offered = Snapshot(step=offer.round, at=at, length=length, crc=crc, peer=peer, to_disk=to_disk)
    held = [file.found() for file in files]
    if any(each is not None and (each.step, each.crc) == (offered.step, crc) for each in held):
        send(connection, Frame(kind=Kind.ANSWER, facts={"wanted": False}))
        return False
    steps = [
        -2 if each is None else -1 if each.step >= offered.step else each.step for each in held
    ]  # later ones are of steps that were given up
    file = files[steps.index(min(steps))]
    file.begin(offered.size)
    os.ftruncate(file.descriptor, offered.size)
    send(connection, Frame(kind=Kind.ANSWER, facts={"wanted": True}))
    missing, room = offered.size - FIRST, bytearray(min(_PIECE, offered.size))
    while missing > 0:
        piece = receive(
            connection,
            longest=_PIECE,
            memory=lambda size: room if size == len(room) else bytearray(size),
        )
        if piece.kind is not Kind.PIECE or piece.round + len(piece.body) > offered.size:
            raise LinkError("the other agent sent what is not a piece of the snapshot")
        os.pwrite(file.descriptor, piece.body, piece.round)
        missing -= len(piece.body)
    if file.header(offered) is None:
        raise LinkError("the snapshot that came has another checksum than was offered")
    file.commit(offered)
    send(connection, Frame(kind=Kind.ANSWER, facts={"wanted": False}))
    return True
