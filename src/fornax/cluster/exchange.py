"""Where slices of a DiLoCo run meet: who takes part in which round, and everybody's bytes to all.

It adds up nothing and keeps no parameters: slices hold the same common ones and compute each outer
step by themselves. One thread decides; each connection has one that reads and one that writes.

A slice is `joining` until all its ranks are there, `joined` until it is known which checkpoint to
begin at, `placed` while it loads that, `ready`, then a `member` of every round. When the others
train already it is `late` while it loads, `waiting` until a round ends, and `fed` with a member's
state.
"""

import contextlib
import hmac
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fornax.config.errors import ClusterError
from fornax.config.frames import Frame, Kind, LinkError, receive, send

__all__ = ["Exchange"]

_Phase = Literal["joining", "joined", "placed", "ready", "member", "late", "waiting", "fed"]
_TICK_SECONDS = 0.5
_JOIN_SECONDS = 60.0
_SEND_TIMEOUT = struct.pack("ll", 300, 0)

Announce = Callable[..., None]


class Exchange:
    """A server on a thread of its own, from `start` to `close`."""

    def __init__(
        self,
        *,
        slices: int,
        token: str,
        announce: Announce,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """Listen.

        Args:
          slices: how many there are.
          token: what each rank has to show.
          announce: called with a text and facts when a slice joins, leaves or is lost.
          host: address to listen on.
          port: its port; 0 for any.

        Raises:
          ClusterError: when the address cannot be listened on.
        """
        self._count, self._token = slices, token
        self._timeout = self._join_timeout = _JOIN_SECONDS  # until a slice says otherwise
        self._announce = announce
        self._events: queue.Queue[tuple[_Peer | None, Frame | None]] = queue.Queue()
        self._slices: dict[int, _Slice] = {}
        self._finished: set[int] = set()
        self._round: _Round | None = None
        self._donor: int | None = None
        self._joined_at: float | None = None
        self._same: Mapping[str, str] | None = None
        self._stopping = self._closed = False
        self.rounds = 0
        """Rounds that ended."""
        self.bytes = 0
        """Bytes of contributions and state that were taken in and given out."""
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise ClusterError(
                f"the exchange of the slices cannot listen on {host}:{port}: {error.strerror}"
            ) from error
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        """host:port."""

    def start(self) -> None:
        """Serve in the background."""
        for run in (self._accept, self._decide):
            threading.Thread(target=run, name="exchange", daemon=True).start()

    def stop_slices(self) -> None:
        """Have all slices stop after their next round, at the same step."""
        self._stopping = True

    def close(self) -> None:
        """End all connections."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._events.put((None, None))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            peer = _Peer(connection)
            threading.Thread(target=self._read, args=(peer,), daemon=True).start()

    def _read(self, peer: "_Peer") -> None:
        """Frames of one connection, the first a JOIN with the token."""
        with contextlib.suppress(LinkError):
            peer.socket.settimeout(_JOIN_SECONDS)
            first = receive(peer.socket, longest=0)
            given = str(first.facts.get("token", ""))
            known = hmac.compare_digest(given.encode(), self._token.encode())
            if first.kind is Kind.JOIN and known:
                peer.socket.settimeout(None)
                peer.start()
                peer.slice, peer.rank = first.slice, first.rank
                self._events.put((peer, first))
                while True:
                    self._events.put((peer, receive(peer.socket)))
        peer.close()
        if peer.slice >= 0:
            self._events.put((peer, None))

    def _decide(self) -> None:
        try:
            while not self._closed:
                with contextlib.suppress(queue.Empty):
                    peer, frame = self._events.get(timeout=_TICK_SECONDS)
                    if peer is not None:
                        self._take(peer, frame)
                self._check_time()
        finally:  # after a mistake of this code too: slices must not wait for an answer
            for each in self._slices.values():
                each.close()

    def _take(self, peer: "_Peer", frame: Frame | None) -> None:
        """Do what a frame says; one that lacks something costs its sender the connection."""
        try:
            self._hear(peer, frame)
        except (KeyError, TypeError, ValueError) as error:
            self._announce(f"a rank of slice {peer.slice} said what makes no sense: {error!r}")
            peer.close()

    def _hear(self, peer: "_Peer", frame: Frame | None) -> None:
        found = self._slices.get(peer.slice)
        if frame is not None and frame.kind is Kind.JOIN:
            self._join(peer, frame)
        elif found is None or found.peers.get(peer.rank) is not peer:
            return  # of a slice that was dropped
        elif frame is None:
            self._lose(found, "is gone")
        elif frame.kind is Kind.READY and found.phase in ("placed", "late"):
            self._ready(found, peer.rank, frame)
        elif frame.kind is Kind.CONTRIBUTION and found.phase == "member":
            self._contribute(found, peer.rank, frame)
        elif frame.kind is Kind.STATE and found.number == self._donor:
            self._hand_over(found, peer.rank, frame)
        elif frame.kind is Kind.BYE:
            if frame.facts.get("done"):
                self._finished.add(found.number)
            self._lose(found, "is done" if frame.facts.get("done") else "leaves")
        else:
            self._lose(found, f"said {frame.kind.name} while it was {found.phase}")

    def _join(self, peer: "_Peer", frame: Frame) -> None:
        ranks, number = int(frame.facts["ranks"]), frame.slice
        known = self._slices.get(number)
        if known is not None and (known.phase != "joining" or frame.rank in known.peers):
            self._lose(known, "starts from scratch")
        self._finished.discard(number)
        if number >= self._count or frame.facts["slices"] != self._count:
            peer.say(
                _refused(f"slice {number} of {frame.facts['slices']}: there are {self._count}")
            )
            return
        self._same = self._same if self._slices else None
        if why := _differences(self._same, frame.facts["same"]):
            peer.say(_refused(f"slice {number} differs from those that are there: {why}"))
            return
        self._same = frame.facts["same"]
        self._timeout = float(frame.facts["timeout"])
        self._join_timeout = float(frame.facts["join_timeout"])
        each = self._slices.setdefault(number, _Slice(number, ranks))
        each.peers[frame.rank] = peer
        each.steps = {*map(int, frame.facts["steps"])}
        if len(each.peers) < ranks:
            return
        each.phase = "joined"
        self._joined_at = self._joined_at or time.monotonic()
        self._place()

    def _place(self) -> None:
        """Give the slices that have joined a checkpoint, once it is known who begins."""
        joined = self._in("joined")
        if self._in("member"):
            for each in joined:
                each.phase = "late"
                each.say(Frame(kind=Kind.PLACE, facts={"step": None}))
            return
        if not joined or self._in("placed", "ready"):
            return
        late = time.monotonic() - (self._joined_at or 0.0) > self._join_timeout
        if len(joined) + len(self._finished) < self._count and not late:
            return
        step = max(set.intersection(*(each.steps for each in joined)))
        for each in joined:
            each.phase = "placed"
            each.say(Frame(kind=Kind.PLACE, facts={"step": step}))
        self._joined_at = None

    def _ready(self, each: "_Slice", rank: int, frame: Frame) -> None:
        each.digests[rank] = str(frame.facts["digest"])
        if len(each.digests) < each.ranks:
            return
        each.phase = "ready" if each.phase == "placed" else "waiting"
        if each.phase == "waiting":
            self._announce(f"slice {each.number} is back, and waits for the next exchange")
        self._go()

    def _go(self) -> None:
        """Let those that are ready train, once all of them are."""
        ready = self._in("ready")
        if not ready or self._in("placed"):
            return
        first = ready[0]
        for each in ready:
            if each.digests != first.digests:
                why = (
                    f"slice {each.number} begins with other parameters than slice {first.number}; "
                    "give all slices the same config and code, and their own run directories"
                )
                each.say(_refused(why))
                self._lose(each, "begins with other parameters")
                return
        for each in ready:
            each.phase = "member"
            each.say(Frame(kind=Kind.GO))
        names = ", ".join(str(each.number) for each in ready)
        self._announce(f"slices {names} train", members=[each.number for each in ready])
        self._place()

    def _contribute(self, each: "_Slice", rank: int, frame: Frame) -> None:
        if self._round is None:
            self._round = _Round(frame.round, time.monotonic())
        if frame.round != self._round.number:
            self._lose(each, f"is in round {frame.round} and the others in {self._round.number}")
            return
        self._round.given[each.number, rank] = frame.body
        self.bytes += len(frame.body)
        self._end_round()

    def _end_round(self) -> None:
        """Give everybody's changes to all, once all members have given theirs."""
        members = self._in("member")
        if self._round is None or not all(self._has_given(each) for each in members):
            return
        given, number = self._round.given, self._round.number
        self._round = None
        if not members:
            return
        self.rounds += 1
        if self._donor is None and self._in("waiting"):
            self._donor = members[0].number
            for each in self._in("waiting"):
                each.phase = "fed"
        facts = {
            "members": [each.number for each in members],
            "donor": self._donor,
            "stop": self._stopping,
        }
        for rank in range(members[0].ranks):
            body = b"".join(given[each.number, rank] for each in members)
            for each in members:
                self.bytes += len(body)
                each.peers[rank].say(Frame(kind=Kind.RESULT, round=number, facts=facts, body=body))

    def _has_given(self, each: "_Slice") -> bool:
        assert self._round is not None
        return all((each.number, rank) in self._round.given for rank in range(each.ranks))

    def _hand_over(self, donor: "_Slice", rank: int, frame: Frame) -> None:
        """A rank's part of a member's state, to the same rank of those that wait."""
        for each in self._in("fed"):
            self.bytes += 2 * len(frame.body)
            each.peers[rank].say(Frame(kind=Kind.STATE, facts=frame.facts, body=frame.body))
            each.fed.add(rank)
            if len(each.fed) == each.ranks:
                each.phase = "member"
                step = frame.facts["step"]
                self._announce(
                    f"slice {each.number} resumes at step {step}, from the state of slice "
                    f"{donor.number}",
                    slice=each.number,
                    step=step,
                )
        if not self._in("fed"):
            self._donor = None

    def _lose(self, each: "_Slice", why: str) -> None:
        """Continue without a slice."""
        del self._slices[each.number]
        each.close()
        left = ", ".join(str(other.number) for other in self._in("member")) or "no slice"
        self._announce(f"slice {each.number} {why}; {left} continues", slice=each.number, lost=why)
        if each.number == self._donor:
            self._donor = None
            for other in self._in("fed"):
                if other.fed:  # some of its ranks have the state, and the others never will
                    self._lose(other, "was given half a state")
                other.phase = "waiting"
        if self._round is not None:
            self._round.forget(each.number)
        if not self._in("member"):
            self._round = None
            for other in self._in(
                "late", "waiting", "fed"
            ):  # nobody to catch up with: start from scratch
                del self._slices[other.number]
                other.close()
        if not self._slices:
            self._joined_at = None
        self._end_round()
        self._go()
        self._place()

    def _check_time(self) -> None:
        if self._joined_at is not None:
            self._place()
        if self._round is None or time.monotonic() - self._round.began < self._timeout:
            return
        slow = [each for each in self._in("member") if not self._has_given(each)]
        if len(slow) == len(self._in("member")):  # parts of slices only: their launchers see to it
            self._round.began = time.monotonic()
            return
        for each in slow:
            self._lose(each, f"did not exchange within {self._timeout:g} s")

    def _in(self, *phases: _Phase) -> list["_Slice"]:
        return [self._slices[n] for n in sorted(self._slices) if self._slices[n].phase in phases]


class _Peer:
    """A connection, written to by a thread of its own, so that a slow one holds up nobody."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
        self.slice = self.rank = -1
        self._queue: queue.Queue[Frame | None] = queue.Queue()
        self._started = False

    def start(self) -> None:
        self._started = True
        threading.Thread(target=self._write, daemon=True).start()

    def say(self, frame: Frame) -> None:
        self._queue.put(frame)

    def close(self) -> None:
        """Once what was said is sent."""
        self._queue.put(None)
        if not self._started:
            self.socket.close()

    def _write(self) -> None:
        with contextlib.suppress(LinkError):
            while (frame := self._queue.get()) is not None:
                send(self.socket, frame)
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


@dataclass
class _Slice:
    """A slice that is there, or on its way."""

    number: int
    ranks: int
    phase: _Phase = "joining"
    peers: dict[int, _Peer] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    digests: dict[int, str] = field(default_factory=dict)
    fed: set[int] = field(default_factory=set)
    """Ranks that were given another slice's state."""

    def say(self, frame: Frame) -> None:
        for peer in self.peers.values():
            peer.say(frame)

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()


@dataclass
class _Round:
    """Contributions so far."""

    number: int
    began: float
    given: dict[tuple[int, int], Any] = field(default_factory=dict)

    def forget(self, number: int) -> None:
        self.given = {key: body for key, body in self.given.items() if key[0] != number}


def _refused(why: str) -> Frame:
    return Frame(kind=Kind.REFUSED, facts={"why": why})


def _differences(first: Mapping[str, str] | None, other: Mapping[str, str]) -> str:
    """What must be the same and is not, in words."""
    if first is None:
        return ""
    keys = sorted({*first, *other})
    return "; ".join(
        f"{key} is {other.get(key, 'missing')} and {first.get(key, 'missing')}"
        for key in keys
        if first.get(key) != other.get(key)
    )
