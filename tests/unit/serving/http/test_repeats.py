"""Requests with the head of the one before, which are not parsed again, and all that may lie
between them: each gets its own answer."""

import random
import socket

import numpy as np
import orjson
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


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
        self.socket = socket.create_connection((server.address.host, server.address.port), 5)
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


def test_a_head_that_comes_again_is_parsed_once(client, monkeypatch):
    parsed = []
    begin = HttpToolsProtocol.on_message_begin
    monkeypatch.setattr(
        HttpToolsProtocol, "on_message_begin", lambda self: (parsed.append(1), begin(self))[1]
    )
    for value in range(1, 8):
        client.send(_request(_body(value)))
        assert client.answer() == (200, 2.0 * value)
    assert len(parsed) == 1
    client.send(_request(_body(10)))  # another length, so another head
    assert client.answer() == (200, 20.0)
    assert len(parsed) == 2


def test_a_wrong_body_behind_a_known_head_is_refused_and_the_next_is_answered(client):
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
def test_the_last_request_after_known_ones_ends_the_connection(client, more):
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


def test_a_request_is_alone_if_no_other_connection_asked_since(client, server):
    other = _Client(server)
    for each in (client, client, client, other, client, client):
        each.send(_request(_body(1)))
        each.answer()
    other.close()
    asked = [request.lone for request in server.host.requests]
    assert asked[1:] == [True, True, False, False, True]


def test_a_request_beside_one_that_waits_is_not_alone(client, server):
    waiting = _Client(server)
    client.send(_request(_body(1)))
    client.answer()
    waiting.send(_request(_body(1), model="slow"))
    while server.host.slow is None:
        pass
    client.send(_request(_body(1)))
    client.answer()
    client.send(_request(_body(1)))
    client.answer()
    waiting.close()
    assert [request.lone for request in server.host.requests][-2:] == [False, False]


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
    head, data = client.socket.recv(65536).split(b"\r\n\r\n")
    size = head.lower().partition(b"inference-header-content-length: ")[2].split(b"\r\n")[0]
    at = int(size) if size else len(data)
    return orjson.loads(data[:at]), data[at:]


def test_tensors_behind_a_text_that_is_known_are_each_answers_own(client):
    for value in range(5):
        array = np.full(3, value, np.float32)
        client.send(_echo(array, binary=True))
        document, data = _document(client)
        assert document["outputs"][0]["shape"] == [3]
        np.testing.assert_array_equal(np.frombuffer(data, "<f4"), array)


def test_an_answers_text_follows_its_version_dtype_and_shape(client, server, monkeypatch):
    array = np.arange(4, dtype=np.float32)
    makes = [np.copy, np.copy, lambda x: x.astype(np.int16), lambda x: x.reshape(2, 2), np.copy]
    for number, make in enumerate(makes):
        monkeypatch.setattr(server.host, "version", "2" if number else "1")
        function = lambda inputs, make=make: {"y": make(inputs["x"])}  # noqa: E731
        monkeypatch.setitem(server.host.functions, "echo", function)
        client.send(_echo(array, binary=True))
        document, data = _document(client)
        made = make(array)
        (output,) = document["outputs"]
        assert document["model_version"] == ("2" if number else "1")
        assert output["shape"] == list(made.shape)
        assert output["datatype"] == {"f": "FP32", "i": "INT16"}[made.dtype.kind]
        assert output["parameters"] == {"binary_data_size": made.nbytes}
        assert data == made.tobytes()


def test_an_answers_parameters_are_its_own(client, server, monkeypatch):
    submit = server.host.submit
    given = [{"a": 1}, {}, {}, {"b": 2}, {}]

    def with_parameters(request):
        future = submit(request)
        future.result().parameters = given[len(server.host.requests) - 1]
        return future

    monkeypatch.setattr(server.host, "submit", with_parameters)
    for expected in given:
        client.send(_echo(np.zeros(3, np.float32), binary=True))
        assert _document(client)[0].get("parameters", {}) == expected


@pytest.mark.parametrize(
    ("outputs", "binary"),
    [
        ("", False),
        (',"outputs":[{"name":"out_x","parameters":{"classification":2}}]', True),
        (',"outputs":[{"name":"out_x","parameters":{"binary_data":false}}]', True),
    ],
)
def test_answers_that_are_more_than_tensors_are_made_anew(client, outputs, binary):
    for value in (1, 2, 3):
        client.send(_echo(np.full(3, value, np.float32), outputs, binary=binary))
        document, data = _document(client)
        (output,) = document["outputs"]
        if "classification" in outputs:
            assert output["datatype"] == "BYTES"
            assert data[4:].startswith(f"{value}.0".encode())
        else:
            assert output["data"] == [value] * 3


def test_strings_of_one_shape_may_be_longer_each_time(client, server, monkeypatch):
    for value in (1, 2, 3):
        made = np.array([b"a" * value, b""], object)
        monkeypatch.setitem(server.host.functions, "echo", lambda inputs, made=made: {"y": made})
        client.send(_echo(np.zeros(3, np.float32), binary=True))
        document, data = _document(client)
        assert document["outputs"][0]["parameters"] == {"binary_data_size": 8 + value}
        assert data == bytes([value, 0, 0, 0]) + b"a" * value + bytes(4)
