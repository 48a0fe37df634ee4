"""Requests on one connection, in pieces and several in a piece: each gets its own answer."""

import random
import socket

import numpy as np
import orjson
import pytest


def _body(value: float, name: str = "x") -> bytes:
    tensor = {"name": name, "datatype": "FP32", "shape": [2], "data": [value, value]}
    return orjson.dumps({"inputs": [tensor]})


def _request(body: bytes, model: str = "sum", more: str = "", last: str = "HTTP/1.1") -> bytes:
    head = f"POST /v2/models/{model}/infer {last}\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    return f"{head}{more}\r\n".encode() + body


def _chunked(body: bytes) -> bytes:
    head = b"POST /v2/models/sum/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


class _Client:
    def __init__(self, server):
        self.socket = socket.create_connection((server.address.host, server.address.port), 120)
        self._read = b""

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> tuple[int, object]:
        """Status and sum of the next answer."""
        while b"\r\n\r\n" not in self._read:
            self._more()
        head, _, rest = self._read.partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        while len(rest) < size:
            rest += self._more()
        self._read = rest[size:]
        status, document = int(head.split()[1]), orjson.loads(rest[:size])
        return status, document["outputs"][0]["data"][0] if status == 200 else None

    def _more(self) -> bytes:
        more = self.socket.recv(65536)
        assert more, "the server ended the connection"
        self._read += more
        return more

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def client(server):
    server.call(server.host.reset)
    client = _Client(server)
    yield client
    client.close()


def test_a_wrong_body_is_refused_and_the_next_is_answered(client):
    good, wrong = _body(3), _body(3, name="y")
    for body, status in ((good, 200), (good, 200), (wrong, 500), (b"{" * len(good), 400)):
        client.send(_request(body))
        assert client.answer()[0] == status
    client.send(_request(good))
    assert client.answer() == (200, 6.0)


def test_a_stream_cut_anywhere_gives_every_request_its_own_answer(client):
    """The kinds of requests that follow each other, in pieces and several in one piece."""
    draw = random.Random(5)
    for _ in range(40):
        expected, stream = [], b""
        for _ in range(draw.randint(2, 9)):
            value = draw.randint(1, 9)
            body = _body(value)
            kind = draw.choice(["same", "same", "same", "other", "chunked", "id", "line"])
            stream += {
                "same": _request(body),
                "other": _request(body, model="nope"),
                "chunked": _chunked(body),
                "id": _request(body, more=f"X-Request-Id: {draw.random()}\r\n"),
                "line": b"\r\n" + _request(body),  # a blank line before a request is allowed
            }[kind]
            expected.append((404, None) if kind == "other" else (200, 2.0 * value))
        at = 0
        while at < len(stream):
            step = draw.choice([len(_request(_body(1))), draw.randint(1, 400)])
            client.send(stream[at : at + step])
            at += step
        assert [client.answer() for _ in expected] == expected


@pytest.mark.parametrize("more", ["Connection: close\r\n", ""])
def test_the_last_request_after_others_ends_the_connection(client, more):
    for _ in range(3):
        client.send(_request(_body(1)))
        client.answer()
    client.send(_request(_body(2), more=more, last="HTTP/1.1" if more else "HTTP/1.0"))
    assert client.answer() == (200, 4.0)
    assert client.socket.recv(10) == b""


def test_a_request_does_not_wait_for_the_one_after_it(client):
    first, second = _request(_body(1)), _request(_body(2))
    client.send(first[:-5])  # so that it waits as a task of the application's
    client.send(first[-5:] + second + b"POST /v2/mod")
    assert client.answer() == (200, 2.0)
    assert client.answer() == (200, 4.0)


def _echo(array: np.ndarray, outputs: str = "", *, binary: bool) -> bytes:
    """A binary request to `echo`, whose outputs are wanted as the JSON `outputs` says."""
    tensor = {"name": "x", "datatype": "FP32", "shape": list(array.shape)}
    tensor["parameters"] = {"binary_data_size": array.nbytes}
    document = {"inputs": [tensor], "parameters": {"binary_data_output": binary}}
    text = orjson.dumps(document)[:-1] + outputs.encode() + b"}"
    more = f"Inference-Header-Content-Length: {len(text)}\r\n"
    return _request(text + array.tobytes(), "echo", more)


def _document(client: _Client) -> tuple[dict, bytes]:
    """The next answer's JSON, and what follows it."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += client.socket.recv(65536)
    head, data = received.split(b"\r\n\r\n")
    whole = int(head.lower().partition(b"\r\ncontent-length: ")[2].split(b"\r\n")[0])
    while len(data) < whole:
        data += client.socket.recv(65536)
    size = head.lower().partition(b"inference-header-content-length: ")[2].split(b"\r\n")[0]
    at = int(size) if size else len(data)
    return orjson.loads(data[:at]), data[at:]


def test_tensors_behind_the_same_text_are_each_answers_own(client):
    for value in range(5):
        array = np.full(3, value, np.float32)
        client.send(_echo(array, binary=True))
        document, data = _document(client)
        assert document["outputs"][0]["shape"] == [3]
        np.testing.assert_array_equal(np.frombuffer(data, "<f4"), array)
