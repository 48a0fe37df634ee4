"""Plain values as bytes between two processes that do not trust each other. Standard library only.

A value is None, a bool, int, float, complex, str, bytes, list, tuple, dict, set or frozenset of
exactly that type, or a reference to an object that stays where it is. Decoding builds nothing else
and calls nothing that the bytes name. A frame is a length (4 bytes, big-endian) and a value.
"""

from __future__ import annotations

import os
import struct

TYPE_CHECKING = False  # importing typing takes longer than judging
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["MOST_BYTES", "MalformedError", "decode", "encode", "receive", "send"]

MOST_BYTES = 8 << 20
_MOST_DEPTH = 128
_TOO_LARGE = "a value of over 8 MiB or 128 levels cannot cross"
_SEQUENCES = {list: b"l", tuple: b"t", set: b"e", frozenset: b"z"}
_MADE = {ord(tag): kind for kind, tag in _SEQUENCES.items()}
_CONSTANTS = {None: b"N", True: b"T", False: b"F"}
_NAMED = {tag[0]: constant for constant, tag in _CONSTANTS.items()}


class MalformedError(ValueError):
    """Bytes that are not a value, or a value that is too large or too deep to be sent."""


def encode(value: object, refer: Callable[[object], int]) -> bytes:
    """A value as bytes.

    Args:
      value: anything.
      refer: gives the number under which an object that is not a plain value is referred to.

    Raises:
      MalformedError: over `MOST_BYTES`, or nested more than 128 deep.
    """
    out = bytearray()
    _put(value, refer, out, 0)
    if len(out) > MOST_BYTES:
        raise MalformedError(_TOO_LARGE)
    return bytes(out)


def _put(value: Any, refer: Callable[[Any], int], out: bytearray, depth: int) -> None:
    if depth > _MOST_DEPTH or len(out) > MOST_BYTES:
        raise MalformedError(_TOO_LARGE)
    kind = type(value)
    if value is None or kind is bool:
        out += _CONSTANTS[value]
    elif kind is int:
        _put_bytes(b"i", value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True), out)
    elif kind is float:
        out += b"f" + struct.pack(">d", value)
    elif kind is complex:
        out += b"c" + struct.pack(">dd", value.real, value.imag)
    elif kind is str:
        _put_bytes(b"s", value.encode("utf-8", "surrogatepass"), out)
    elif kind is bytes:
        _put_bytes(b"b", value, out)
    elif kind in _SEQUENCES:
        out += _SEQUENCES[kind] + len(value).to_bytes(4, "big")
        for item in value:
            _put(item, refer, out, depth + 1)
    elif kind is dict:
        out += b"d" + len(value).to_bytes(4, "big")
        for key, item in value.items():
            _put(key, refer, out, depth + 1)
            _put(item, refer, out, depth + 1)
    else:
        out += b"o" + refer(value).to_bytes(4, "big")


def _put_bytes(tag: bytes, data: bytes, out: bytearray) -> None:
    out += tag + len(data).to_bytes(4, "big") + data


def decode(data: bytes, resolve: Callable[[int], object]) -> Any:
    """The value that bytes stand for.

    Args:
      data: what `encode` made, or anything that an enemy sent.
      resolve: the object that a reference stands for.

    Raises:
      MalformedError: the bytes are not a value. Time and memory are linear in their number.
    """
    reader = _Reader(data, resolve)
    try:
        value = reader.value(0)
    except MalformedError:
        raise
    except Exception as error:  # an unhashable key, bad UTF-8, an unknown reference
        raise MalformedError(f"no value: {type(error).__name__}") from None
    if reader.place != len(data):
        raise MalformedError("bytes after the value")
    return value


class _Reader:
    def __init__(self, data: bytes, resolve: Callable[[int], object]) -> None:
        self._data = data
        self._resolve = resolve
        self.place = 0

    def value(self, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise MalformedError("too deep")
        tag = self._take(1)[0]
        if tag in _NAMED:
            return _NAMED[tag]
        if tag == 0x69:  # i
            return int.from_bytes(self._counted(), "big", signed=True)
        if tag == 0x66:  # f
            return struct.unpack(">d", self._take(8))[0]
        if tag == 0x63:  # c
            return complex(*struct.unpack(">dd", self._take(16)))
        if tag == 0x73:  # s
            return self._counted().decode("utf-8", "surrogatepass")
        if tag == 0x62:  # b
            return self._counted()
        if tag in _MADE:
            return _MADE[tag]([self.value(depth + 1) for _ in range(self._number())])
        if tag == 0x64:  # d
            pairs = range(self._number())
            return {self.value(depth + 1): self.value(depth + 1) for _ in pairs}
        if tag == 0x6F:  # o
            return self._resolve(self._number())
        raise MalformedError("unknown tag")

    def _take(self, count: int) -> bytes:
        self.place += count
        if self.place > len(self._data):
            raise MalformedError("cut short")
        return self._data[self.place - count : self.place]

    def _number(self) -> int:
        return int.from_bytes(self._take(4), "big")

    def _counted(self) -> bytes:
        return self._take(self._number())


def send(descriptor: int, data: bytes) -> None:
    """Write one frame; raises OSError when the other end is gone."""
    left = memoryview(len(data).to_bytes(4, "big") + data)
    while left:
        left = left[os.write(descriptor, left) :]


def receive(descriptor: int) -> bytes:
    """Read one frame.

    Raises:
      EOFError: the other end is gone.
      MalformedError: a frame over `MOST_BYTES`.
    """
    size = int.from_bytes(_exactly(descriptor, 4), "big")
    if size > MOST_BYTES:
        raise MalformedError("a frame is too large")
    return _exactly(descriptor, size)


def _exactly(descriptor: int, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        piece = os.read(descriptor, min(count - len(found), 1 << 20))
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)
