"""Frames between processes: a fixed header, JSON for the facts, bytes for arrays.

Slices and their exchange send them, a trainer and its samplers, and agents.

    magic "FXO1" | kind u8 | 0 u8 | slice u16 | rank u16 | 0 u16 | round u64
    bytes of JSON u32 | bytes of body u64 | CRC-32 u32

in network byte order, then the JSON and the body. The checksum covers header, JSON and body. What
comes from the network is neither unpickled nor run.
"""

import json
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from isal.isal_zlib import crc32

__all__ = ["LONGEST_BODY", "Frame", "Kind", "LinkError", "connect", "receive", "send"]

_HEAD = struct.Struct("!4sBxHHxxQIQ")
_SUM = struct.Struct("!I")
_MAGIC = b"FXO1"
_LONGEST_JSON = 1 << 24
_CHUNK = 1 << 26
_KEEP_ALIVE = {
    "TCP_KEEPIDLE": 4,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 60_000,  # milliseconds that what was sent may wait to be taken
}

LONGEST_BODY = 1 << 40
"""Bytes that a frame may announce; memory is taken as they come."""


class LinkError(ConnectionError):
    """The connection ended, or carried what is not a frame."""


class Kind(IntEnum):
    """What a frame says."""

    JOIN = 1
    """To the exchange: a rank of a slice is there, with these checkpoints."""
    PLACE = 2
    """From it: begin together at a checkpoint that all have, or catch up."""
    READY = 3
    """To it: the state is loaded. From a sampler: it is there, or has a version whole."""
    GO = 4
    """From it: train."""
    STATE = 5
    """The whole state of a slice, from one that trains to one that catches up."""
    CONTRIBUTION = 6
    """To it: the change of a fragment."""
    RESULT = 7
    """From it: the changes of all that took part."""
    BYE = 8
    """To it: this slice leaves."""
    REFUSED = 9
    """From it: why the slice may not join. From a sampler: why prompts cannot be answered."""
    ARRAY = 10
    """To a sampler: one array of a version of the weights."""
    WEIGHTS = 11
    """To a sampler: how many arrays that version has, and their bytes."""
    MAPPED = 22
    """To a sampler on this machine: a version in memory, whose descriptor comes with the next
    byte."""
    PROMPTS = 12
    """To a sampler: prompts to complete under a version."""
    COMPLETIONS = 13
    """From a sampler: what it drew."""
    ROUND = 14
    """From the trainer's process 0 to the others: a round of rollouts."""
    OFFER = 15
    """Between agents: a snapshot in memory, which the other may have already."""
    PIECE = 16
    """Bytes of it."""
    ANSWER = 17
    """Whether it is wanted; then that it is whole there."""
    FETCH = 18
    """To an agent: the snapshots of a rank that it holds."""
    READ = 19
    """To a data worker: records to read and transform."""
    TOKENS = 20
    """From it: the tokens of each."""
    STEP = 21
    """Of an engine over several processes, from the one that schedules: an operation, with its
    arrays one after the other."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One message."""

    kind: Kind
    slice: int = 0
    rank: int = 0
    round: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    body: bytes | bytearray | memoryview = b""


def connect(address: str, seconds: float) -> socket.socket:
    """A connection that notices that the other machine is gone: when nothing is under way within
    ten seconds, else a minute.

    Args:
      address: host:port.
      seconds: how long to wait for it.

    Raises:
      LinkError: when nobody is there.
    """
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), seconds)
    except OSError as error:
        raise LinkError(f"{address} cannot be reached: {error}") from error
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def send(to: socket.socket, frame: Frame) -> None:
    """Send a frame.

    Raises:
      LinkError: when the other end is gone.
    """
    facts = json.dumps(frame.facts).encode()
    head = _HEAD.pack(
        _MAGIC, frame.kind, frame.slice, frame.rank, frame.round, len(facts), len(frame.body)
    )
    checksum = crc32(frame.body, crc32(facts, crc32(head)))
    try:
        to.sendall(head + _SUM.pack(checksum) + facts)
        if frame.body:
            to.sendall(frame.body)
    except LinkError:
        raise
    except OSError as error:
        raise LinkError(f"the other end cannot be reached: {error}") from error


def receive(
    source: socket.socket,
    *,
    longest: int = LONGEST_BODY,
    memory: Callable[[int], bytearray] | None = None,
) -> Frame:
    """The next frame; blocks.

    Args:
      source: a connection.
      longest: bytes of a body, at most.
      memory: gives memory for a body of this many bytes, which may have been used before: memory
        that the system has to hand out again takes longer than the transfer. None: it is taken as
        the bytes come.

    Raises:
      LinkError: at the end of the connection, for a frame with a wrong checksum, for one that
        announces a body of more than `longest` bytes, or for anything else.
    """
    head = _exactly(source, _HEAD.size + _SUM.size, bytearray())
    magic, kind, slice_, rank, round_, size, length = _HEAD.unpack_from(head)
    if magic != _MAGIC or size > _LONGEST_JSON or length > longest:
        raise LinkError("what came is not a frame, or is longer than allowed")
    facts = _exactly(source, size, bytearray())
    body = _exactly(source, length, bytearray() if memory is None else memory(length))
    (expected,) = _SUM.unpack_from(head, _HEAD.size)
    if crc32(body, crc32(facts, crc32(head[: _HEAD.size]))) != expected:
        raise LinkError("a frame has a wrong checksum")
    try:
        named, said = Kind(kind), json.loads(facts)
    except ValueError as error:
        raise LinkError(f"a frame cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise LinkError("the facts of a frame are an object")
    return Frame(kind=named, slice=slice_, rank=rank, round=round_, facts=said, body=body)


def _exactly(source: socket.socket, size: int, found: bytearray) -> bytearray:
    """Fill `found`, which is as long as `size` or grows to it."""
    have = 0
    try:
        while have < size:
            if have == len(found):
                found.extend(bytes(min(_CHUNK, size - have)))
            got = source.recv_into(memoryview(found)[have:])
            if not got:
                break
            have += got
    except LinkError:
        raise
    except OSError as error:
        raise LinkError(f"the connection ended: {error}") from error
    if have < size:
        raise LinkError("the connection ended")
    return found
