"""Clients that allow the server no data, by bare HTTP/2 frames."""

import contextlib
import os
import socket
import struct
import time

import numpy as np
import pytest

from fornax.serving.access import Limits
from fornax.serving.grpc import send_timeout
from fornax.serving.grpc.client import Client, infer_message
from fornax.serving.grpc.methods import METHODS

_DATA, _HEADERS, _SETTINGS, _PING, _WINDOW = 0, 1, 4, 6, 8
_MOST = 16384
"""Bytes of a frame."""
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1


def _frame(kind, flags, stream, payload=b""):
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )


class _Caller:
    """One ModelInfer whose answer may come as the test allows."""

    def __init__(self, address, window):
        host, port = address.split(":")
        self._socket = socket.create_connection((host, int(port)))
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": METHODS["ModelInfer"].path,
            ":authority": address,
            "te": "trailers",
            "content-type": "application/grpc",
        }
        head = b"".join(
            b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
            for name, value in fields.items()
        )
        message = infer_message("echo", {"x": np.zeros(55_000, np.int8)}).SerializeToString()
        self._socket.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + _frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, window))
            + _frame(_HEADERS, _END_HEADERS, 1, head)
        )
        data = b"\0" + struct.pack(">I", len(message)) + message
        for at in range(0, len(data), _MOST):
            last = _END_STREAM if at + _MOST >= len(data) else 0
            self._socket.sendall(_frame(_DATA, last, 1, data[at : at + _MOST]))
        self._rest = b""
        self.taken = 0

    def close(self):
        self._socket.close()

    def allow(self, size):
        self._socket.sendall(_frame(_WINDOW, 0, 1, struct.pack(">I", size)))

    def read(self, seconds):
        """Take what comes; `ended`, `closed`, or None when nothing more came."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(65536)
            except TimeoutError:
                return None
            if not data:
                return "closed"
            self._rest += data
            while len(self._rest) >= 9 and len(self._rest) >= 9 + (size := self._size()):
                kind, flags = self._rest[3:5]
                payload, self._rest = self._rest[9 : 9 + size], self._rest[9 + size :]
                if kind == _PING and not flags & _ACK:
                    self._socket.sendall(_frame(_PING, _ACK, 0, payload))
                self.taken += len(payload) * (kind == _DATA)
                if kind == _HEADERS and flags & _END_STREAM:
                    return "ended"
        return None

    def _size(self):
        return int.from_bytes(self._rest[:3], "big")


def test_a_client_that_takes_nothing_loses_its_connection(serve):
    address = serve(limits=Limits(send_timeout=1.0)).address
    start = time.monotonic()
    with contextlib.closing(_Caller(address, window=0)) as caller:
        assert caller.read(120) == "closed"
    assert time.monotonic() - start > 0.9
    assert caller.taken == 0
    with Client(address) as client:
        assert client.ready()


@pytest.mark.slow
def test_a_client_that_takes_little_by_little_gets_everything(serve):
    address = serve(limits=Limits(send_timeout=2.0)).address
    with contextlib.closing(_Caller(address, window=0)) as caller:
        for _ in range(5):
            caller.allow(10_000)
            assert caller.read(0.5) is None
        caller.allow(10_000)
        assert caller.read(120) == "ended"
    assert caller.taken > 55_000


def test_looking_for_a_connection_leaves_no_descriptor_open():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as caller,
        listener.accept()[0],
        open(__file__, "rb"),
    ):
        host, port = caller.getsockname()
        wanted = f"ipv4:{host}:{port}"
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):  # others may open some of their own meanwhile
            with send_timeout._connections({wanted, "unix:/x", "ipv4:127.0.0.1:1"}) as found:
                assert {peer: each.getpeername() for peer, each in found.items()} == {
                    wanted: caller.getsockname()
                }
        assert len(os.listdir("/proc/self/fd")) < before + 20
