"""The clients of the model-server benchmark: N connections, each waiting for its answer.

Run as a script it serves orders, a line of JSON each, so that no order pays for starting it:

    told  {"port": 8000, "wire": "v2-binary", "path": "/v2/models/mlp/infer", "model": "mlp",
           "concurrency": 8, "seconds": 1.5, "samples": 32, "reference": "mlp.npy"}
    says  {"answers": 12345, "seconds": 1.5, "latencies_us": [...], "worst": 1e-7}
    or    {"error": "what went wrong"}

Requests are made beforehand, sockets are raw and polled, so that the clients take little of the
machine that they share with the server. Every answer is checked for its status; a sample of them
for their values.
"""

import json
import random
import selectors
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import _model_server_models as models
import _model_server_wire as wires

DISTINCT = 64
"""Different requests, sent in turn."""
TOLERANCE = 1e-4


class WrongAnswerError(Exception):
    """An answer that is an error, or whose values are not the model's."""


class Connection:
    """One client: a socket, what it has sent last and when, and what came back so far."""

    __slots__ = ("got", "needed", "request", "sent", "socket")

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.got, self.needed = b"", 0
        self.request, self.sent = 0, 0.0

    def send(self, number: int, data: bytes) -> None:
        self.got, self.needed, self.request = b"", 0, number
        self.sent = time.perf_counter()
        self.socket.sendall(data)

    def receive(self) -> bool:
        """Read what is there; whether the answer is whole."""
        data = self.socket.recv(1 << 18)
        if not data:
            raise WrongAnswerError("the server closed the connection")
        self.got = self.got + data if self.got else data
        if not self.needed:
            head = self.got.find(b"\r\n\r\n")
            if head < 0:
                return False
            self.needed = head + 4 + _length(self.got, head)
        return len(self.got) >= self.needed


def _length(got: bytes, head: int) -> int:
    at = got.find(b"ontent-", 0, head)
    while at >= 0:
        if got[at : at + 14].lower() == b"ontent-length:":
            return int(got[at + 14 : got.find(b"\r\n", at)])
        at = got.find(b"ontent-", at + 7, head)
    raise WrongAnswerError(f"an answer without a length: {got[:head]!r}")


def split(got: bytes) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers by their names in lower case, and body of a whole answer."""
    head, body = got.split(b"\r\n\r\n", 1)
    status, *lines = head.decode("latin1").split("\r\n")
    pairs = (line.split(":", 1) for line in lines)
    return int(status.split()[1]), {k.strip().lower(): v.strip() for k, v in pairs}, body


def ask(port: int, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send one request on a connection of its own."""
    connection = Connection(port)
    with connection.socket:
        connection.send(0, data)
        while not connection.receive():
            pass
    return split(connection.got)


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Keep `concurrency` requests on their way for `seconds`; return latencies and a verdict."""
    model = models.MODELS[order["model"]]
    requests = [
        wires.request(order["wire"], model, inputs, order["path"])
        for inputs in model.requests(DISTINCT)
    ]
    connections = [Connection(order["port"]) for _ in range(order["concurrency"])]
    try:
        latencies, samples = drive(
            connections, requests, order["warmup"], order["seconds"], order["samples"]
        )
    finally:
        for connection in connections:
            connection.socket.close()
    worst = check(order["wire"], model, samples, np.load(order["reference"]))
    return {
        "answers": len(latencies),
        "seconds": order["seconds"],
        "latencies_us": [round(1e6 * latency, 1) for latency in latencies],
        "worst": worst,
    }


def drive(
    connections: list[Connection],
    requests: list[bytes],
    warmup: float,
    seconds: float,
    samples: int,
) -> tuple[list[float], list[tuple[int, bytes]]]:
    """Return the latencies of answers in the `seconds` after the warm-up, and some answers."""
    latencies: list[float] = []
    kept: list[tuple[int, bytes]] = []
    draw, clock = random.Random(0).random, time.perf_counter
    with selectors.EpollSelector() as poll:
        for connection in connections:
            poll.register(connection.socket, selectors.EVENT_READ, connection)
        begin = clock() + warmup
        end = begin + seconds
        number, waiting = 0, len(connections)
        for connection in connections:
            connection.send(number % DISTINCT, requests[number % DISTINCT])
            number += 1
        while waiting:
            for key, _ in poll.select(60) or _nothing():
                connection = key.data
                if not connection.receive():
                    continue
                now = clock()
                if connection.got[9:12] != b"200":
                    raise WrongAnswerError(connection.got[:600].decode("latin1"))
                if begin <= now < end:
                    latencies.append(now - connection.sent)
                    if len(kept) < samples or draw() < 0.001:
                        kept.append((connection.request, connection.got))
                if now < end:
                    connection.send(number % DISTINCT, requests[number % DISTINCT])
                    number += 1
                else:
                    waiting -= 1
    return latencies, kept


def _nothing() -> Iterator[Any]:
    raise WrongAnswerError("no answer for a minute")


def check(
    wire: str, model: models.Model, samples: list[tuple[int, bytes]], reference: np.ndarray
) -> float:
    """Return the largest difference of the sampled answers; WrongAnswerError past the tolerance."""
    worst = 0.0
    for number, got in samples:
        _, headers, body = split(got)
        array = wires.answer(wire, model, headers, body)
        expected = reference[number].reshape(model.rows, -1)
        difference = float(np.abs(array - expected).max())
        if array.shape != expected.shape or not difference <= TOLERANCE:
            raise WrongAnswerError(f"{model.name}: an answer is off by {difference}")
        worst = max(worst, difference)
    return worst


def main() -> None:
    """Carry out orders until standard input ends."""
    for line in sys.stdin:
        try:
            said = run(json.loads(line))
        except (OSError, WrongAnswerError) as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
