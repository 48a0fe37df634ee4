"""Where the time of one small request goes: the MLP, one row, one client, as JSON.

    python benchmarks/_model_server_stages.py DIRECTORY

Three servers are asked with the same bytes: one that only writes bytes on the socket, uvicorn with
an application that only writes bytes, and Fornax. What lies between them is divided by Fornax's own
statistics and by timing its decoder and encoder alone.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import _model_server_contestants as contestants
import _model_server_load as load
import _model_server_models as models
import _model_server_wire as wires

MODEL = models.MODELS["mlp"]
FORNAX = next(c for c in contestants.CONTESTANTS if c.name == "fornax")
ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\n"
    b"inference-header-content-length: 140\r\ncontent-length: 180\r\n\r\n" + 180 * b"x"
)
ROUNDS, SECONDS = 5, 0.4


class _Answers(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(ANSWER)


async def _application(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    headers = [
        (b"content-type", b"application/octet-stream"),
        (b"inference-header-content-length", b"140"),
        (b"content-length", b"180"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": 180 * b"x"})


def serve_socket(port: int) -> None:
    """Answer whatever comes with the same bytes."""
    import uvloop

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(_Answers, "127.0.0.1", port)
        await server.serve_forever()

    uvloop.run(serve())


def serve_http(port: int) -> None:
    """Answer every request with the same bytes, through uvicorn."""
    import uvicorn

    uvicorn.run(
        _application, port=port, loop="uvloop", http="httptools", lifespan="off", log_level="error"
    )


def measure(folder: Path) -> dict[str, Any]:
    """Return microseconds by stage, and the floor."""
    ports = {name: contestants.free_port() for name in ("socket", "http", "fornax")}
    commands = {
        name: [sys.executable, __file__, str(folder), "--serve", name, "--port", str(ports[name])]
        for name in ("socket", "http")
    }
    commands["fornax"] = contestants.fornax_command(folder / "repository", ports["fornax"])
    servers = [
        contestants.start(command, {}, ports[name], folder / f"stages-{name}.log")
        for name, command in commands.items()
    ]
    try:
        contestants.wait_for_answers(servers[-1], FORNAX, {"mlp": folder / "mlp.npy"}, 120)
        found: dict[str, list[float]] = {name: [] for name in ports}
        before = _statistics(ports["fornax"])
        for _ in range(ROUNDS):
            for name, port in ports.items():
                found[name].append(_median_us(port))
        after = _statistics(ports["fornax"])
    finally:
        for server in servers:
            server.stop()
    whole = {name: statistics.median(values) for name, values in found.items()}
    count = after["success"]["count"] - before["success"]["count"]
    inside = {name: (after[name]["ns"] - before[name]["ns"]) / count / 1e3 for name in after}
    decode, encode = _codec()
    return _table(whole, inside, decode, encode, _bare(folder))


def _table(
    whole: dict[str, float],
    inside: dict[str, float],
    decode: float,
    encode: float,
    bare: dict[str, float],
) -> dict[str, Any]:
    compute = inside["compute_input"] + inside["compute_infer"] + inside["compute_output"]
    us = {
        "clients and kernel: a round trip on the socket": whole["socket"],
        "HTTP: uvicorn parses, calls an application, writes": whole["http"] - whole["socket"],
        "V2: decode": decode,
        "host and queue: check, route, schedule, answer": inside["success"] - compute,
        "assemble the batch, transfer": inside["compute_input"],
        "execute": inside["compute_infer"],
        "fetch, cut": inside["compute_output"],
        "V2: encode": encode,
    }
    us["not accounted for: limits, routing, tasks of the event loop"] = whole["fornax"] - sum(
        us.values()
    )
    us["**whole request, p50**"] = whole["fornax"]
    us |= {f"floor: {name}": value for name, value in bare.items()}
    return {
        "about": "The MLP, one row of 64 features, one client. Times inside the server are means "
        "of its own statistics; the rest are medians.",
        "us": us,
    }


def _median_us(port: int) -> float:
    path = FORNAX.path.format(model=MODEL.name)
    requests = [
        wires.request(FORNAX.wire, MODEL, inputs, path) for inputs in MODEL.requests(load.DISTINCT)
    ]
    connection = load.Connection(port)
    try:
        latencies, _ = load.drive([connection], requests, 0.1, SECONDS, 0)
    finally:
        connection.socket.close()
    return 1e6 * statistics.median(latencies)


def _statistics(port: int) -> dict[str, Any]:
    asked = b"GET /v2/models/mlp/stats HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    _, _, body = load.ask(port, asked)
    (model,) = json.loads(body)["model_stats"]
    return model["inference_stats"]


def _best_us(call: Callable[[], Any], count: int = 2000) -> float:
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return 1e6 * statistics.median(taken[count // 4 :])


def _codec() -> tuple[float, float]:
    """Return microseconds to decode the request's body and to encode an answer."""
    from fornax.serving.access import Limits
    from fornax.serving.types import InferResult
    from fornax.serving.v2.request import Decoder
    from fornax.serving.v2.response import encode
    from fornax.serving.v2.shared_memory import SharedMemory

    data = wires.request(FORNAX.wire, MODEL, MODEL.requests(1)[0], "/")
    head, body = data.split(b"\r\n\r\n", 1)
    size = int(head.lower().split(b"inference-header-content-length: ")[1].split(b"\r\n")[0])
    decoder = Decoder(Limits(), SharedMemory(enabled=False))
    _, wanted = decoder.decode(body, size, "mlp")
    result = InferResult("mlp", "1", "predict", "", {MODEL.output: np.zeros((1, 10), np.float32)})
    return _best_us(lambda: decoder.decode(body, size, "mlp")), _best_us(
        lambda: encode(result, wanted)
    )


def _bare(folder: Path) -> dict[str, float]:
    import jax

    from fornax import export

    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as the server does
    bundle = export.open_bundle(folder / "repository" / "mlp" / "1")
    program = bundle.compile("predict", {"b": 1}, bundle.load_weights())
    inputs = MODEL.requests(1)[0]
    placed = program.put(inputs)
    return {
        "put, execute, fetch": _best_us(lambda: np.asarray(program(inputs)[MODEL.output])),
        "bare PJRT call alone": _best_us(lambda: program.run(placed)[0].block_until_ready()),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--serve", choices=("socket", "http"))
    parser.add_argument("--port", type=int)
    args = parser.parse_args()
    if args.serve:
        {"socket": serve_socket, "http": serve_http}[args.serve](args.port)
    else:
        print(json.dumps(measure(args.folder)))
