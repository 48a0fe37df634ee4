"""A client of the V2 protocol over HTTP on bare sockets, so that it can misbehave."""

import asyncio
import contextlib
import json
import random
import socket
import struct
from typing import Any

import numpy as np

_TYPES = {"int32": "INT32", "float32": "FP32", "object": "BYTES"}
_DTYPES = {"INT32": np.int32, "FP32": np.float32}


def path_of(model: str, version: str, function: str) -> str:
    """Where a function is asked."""
    between = f"/versions/{version}" if version else ""
    return f"/v2/models/{model}:{function}{between}/infer"


def encode(path: str, inputs: dict[str, np.ndarray], id_: str, *, binary: bool) -> bytes:
    """A whole request."""
    tensors, tail = [], b""
    for name, array in inputs.items():
        entry: dict[str, Any] = {"name": name, "datatype": _TYPES[array.dtype.name]}
        entry["shape"] = list(array.shape)
        flat = array.ravel().tolist()
        if not binary:
            entry["data"] = [v.decode() if isinstance(v, bytes) else v for v in flat]
        else:
            data = array.tobytes()
            if array.dtype == object:
                data = b"".join(struct.pack("<I", len(v)) + v for v in flat)
            entry["parameters"] = {"binary_data_size": len(data)}
            tail += data
        tensors.append(entry)
    body = {"id": id_, "inputs": tensors, "parameters": {"binary_data_output": binary}}
    text = json.dumps(body).encode()
    headers = {"Inference-Header-Content-Length": len(text)} if binary else {}
    return request("POST", path, text + tail, headers)


def request(method: str, path: str, body: bytes = b"", headers: Any = None) -> bytes:
    """A whole request of any kind."""
    lines = [f"{method} {path} HTTP/1.1", "Host: storm", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def decode(headers: dict[str, str], body: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """An answer's document and arrays."""
    size = int(headers.get("inference-header-content-length", len(body)))
    document = json.loads(body[:size])
    arrays, at = {}, size
    for each in document["outputs"]:
        dtype = _DTYPES[each["datatype"]]
        if "data" in each:
            array = np.array(each["data"], dtype)
        else:
            length = each["parameters"]["binary_data_size"]
            array = np.frombuffer(body[at : at + length], dtype)
            at += length
        arrays[each["name"]] = array.reshape(each["shape"])
    assert at == len(body) or "data" in document["outputs"][0], "bytes beyond the answer"
    return document, arrays


class Connection:
    """One connection, kept for several requests."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self.writer = reader, writer

    @classmethod
    async def open(cls, address: str, *, receive: int = 0) -> "Connection":
        """Connect; `receive` bounds the bytes that the kernel takes ahead of the reader."""
        host, _, port = address.rpartition(":")
        sock = socket.socket()
        if receive:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        except BaseException:
            sock.close()
            raise
        limit = receive or 2**16
        return cls(*await asyncio.open_connection(sock=sock, limit=limit))

    async def send(self, data: bytes, *, pieces: int = 1, pause: float = 0.0) -> None:
        """Write, in pieces with a pause between them."""
        step = -(-len(data) // pieces)
        for at in range(0, len(data), step):
            self.writer.write(data[at : at + step])
            await self.writer.drain()
            if pause:
                await asyncio.sleep(pause)

    async def receive(self, *, pause: float = 0.0) -> tuple[int, dict[str, str], bytes]:
        """Read an answer: status, headers, body; with a pause after every 64 KiB."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        body = bytearray()
        while len(body) < int(headers["content-length"]):
            left = int(headers["content-length"]) - len(body)
            body += await self._reader.readexactly(min(left, 2**16) if pause else left)
            await asyncio.sleep(pause)
        return int(first.split()[1]), headers, bytes(body)

    async def receive_some(self, count: int) -> bytes:
        """Read the beginning of an answer."""
        return await self._reader.readexactly(count)

    async def ask(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        """Send a request and read its answer."""
        self.writer.write(data)
        return await self.receive()

    def reset(self) -> None:
        """Vanish: the server's next write finds nobody."""
        sock = self.writer.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            linger = struct.pack("ii", 1, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()

    async def close(self) -> None:
        """Leave politely."""
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


def nonsense(rng: random.Random) -> bytes:
    """A request that is refused with 4xx, whatever serves."""
    path = path_of("rank", "", "predict")
    ids = {"name": "ids", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]}
    weight = {"name": "weight", "datatype": "FP32", "shape": [1], "data": [1.0]}

    def body(*inputs: Any, **more: Any) -> bytes:
        return json.dumps({"inputs": list(inputs), **more}).encode()

    bodies = [
        b"",
        b"{",
        rng.randbytes(100),
        b"[" * 50_000,
        b'{"inputs": ' * 300,
        body(),
        body(ids),
        body(ids, ids),
        body(ids, weight, {**weight, "name": "more"}),
        body({**ids, "datatype": "FP64"}, weight),
        body({**ids, "datatype": "NONE"}, weight),
        body({**ids, "shape": [1, 3]}, weight),
        body({**ids, "shape": [-1, -2]}, weight),
        body({**ids, "shape": [2**62, 2**62]}, weight),
        body({**ids, "shape": [1, 17], "data": [1] * 17}, weight),
        body({**ids, "data": [2**40, 1]}, weight),
        body({**ids, "data": ["x", None]}, weight),
        body(ids, {**weight, "shape": [2], "data": [1, 1]}),
        body(ids, weight, outputs=[{"name": "nothing"}]),
        body(ids, weight, parameters={"surprise": 1}),
        body(ids, weight, parameters={"priority": 99}),
        body({**ids, "data": [], "parameters": {"binary_data_size": 2**60}}, weight),
        body({**ids, "parameters": {"shared_memory_region": "../../etc/passwd"}}, weight),
    ]
    chosen = rng.choice(bodies)
    headers = {}
    if rng.random() < 0.2:
        headers["Inference-Header-Content-Length"] = rng.choice(["-1", "9" * 30, "5", "x", "1e3"])
        chosen = bodies[1]
    if rng.random() < 0.1:
        path = path_of(rng.choice(["..%2f..%2fetc", "%00", "x" * 5000, "nope"]), "", "predict")
    return request("POST", path, chosen, headers)
