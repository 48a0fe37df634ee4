"""A small model server: V2 binary tensors on raw ASGI under uvicorn, batches of whatever waits.

The front end for runtimes that bring none. It does what a hand-written service would do and no
more: no versions, no checks, no metrics. Requests read in one turn of the event loop, or while a
batch runs, make the next batch; small batches run in the loop itself, larger ones in a thread.
"""

import argparse
import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Mapping

import numpy as np
import orjson
import uvicorn

import _model_server_models as models

Run = Callable[[dict[str, np.ndarray]], np.ndarray]
"""Inputs of several requests, joined as the runtime requires, to rows of the output."""
Join = Callable[[models.Model, list[dict[str, np.ndarray]]], dict[str, np.ndarray]]
DTYPES = {"FP32": np.dtype(np.float32), "INT32": np.dtype(np.int32)}
INLINE_S = 300e-6
"""A batch expected to take less runs in the event loop: a thread would cost more than it gives."""


class Queue:
    """The requests that wait for one model, and what runs them."""

    def __init__(self, model: models.Model, run: Run, join: Join, most: int) -> None:
        self._model, self._run, self._join, self._most = model, run, join, most
        self._waiting: list[tuple[dict[str, np.ndarray], asyncio.Future[np.ndarray]]] = []
        self._busy = False
        self._seconds: dict[int, float] = {}
        self._thread = concurrent.futures.ThreadPoolExecutor(1)

    def ask(self, inputs: dict[str, np.ndarray]) -> "asyncio.Future[np.ndarray]":
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.append((inputs, future))
        if not self._busy:
            self._busy = True
            loop.call_soon(self._next, loop)
        return future

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
        if not batch:
            self._busy = False
            return
        if self._seconds.get(len(batch), 1.0) < INLINE_S:
            self._answer(batch, self._timed([inputs for inputs, _ in batch]))
            loop.call_soon(self._next, loop)
            return
        done = loop.run_in_executor(self._thread, self._timed, [inputs for inputs, _ in batch])
        done.add_done_callback(lambda done: (self._answer(batch, done.result()), self._next(loop)))

    def _timed(self, requests: list[dict[str, np.ndarray]]) -> np.ndarray:
        start = time.perf_counter()
        output = self._run(self._join(self._model, requests))
        self._seconds[len(requests)] = time.perf_counter() - start
        return output

    def _answer(self, batch: list, output: np.ndarray) -> None:
        rows = self._model.rows
        for number, (_, future) in enumerate(batch):
            if not future.done():
                future.set_result(output[number * rows : (number + 1) * rows])


def application(queues: Mapping[str, Queue]):
    """Return the ASGI application for `/v2/models/NAME/infer`."""
    ends = {f"/v2/models/{name}/infer": (name, queue) for name, queue in queues.items()}

    async def app(scope, receive, send) -> None:
        name, queue = ends[scope["path"]]
        message = await receive()
        body = message["body"]
        while message.get("more_body"):
            message = await receive()
            body += message["body"]
        size = next(v for k, v in scope["headers"] if k == b"inference-header-content-length")
        output = await queue.ask(decode(body, int(size)))
        head, data = encode(name, models.MODELS[name].output, output)
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"inference-header-content-length", b"%d" % len(head)),
            (b"content-length", b"%d" % (len(head) + len(data))),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": head + data})

    return app


def decode(body: bytes, size: int) -> dict[str, np.ndarray]:
    """Return the tensors of a V2 request whose JSON takes `size` bytes."""
    inputs, at = {}, size
    for tensor in orjson.loads(body[:size])["inputs"]:
        array = np.frombuffer(
            body, DTYPES[tensor["datatype"]], int(np.prod(tensor["shape"])), at
        ).reshape(tensor["shape"])
        inputs[tensor["name"]] = array
        at += array.nbytes
    return inputs


def encode(model: str, name: str, output: np.ndarray) -> tuple[bytes, bytes]:
    """Return the JSON and the bytes of a V2 answer."""
    data = output.tobytes()
    described = {
        "name": name,
        "datatype": "FP32",
        "shape": output.shape,
        "parameters": {"binary_data_size": len(data)},
    }
    return orjson.dumps({"model_name": model, "model_version": "1", "outputs": [described]}), data


def serve(runtimes: Callable[[list[str]], dict[str, Run]], join: Join) -> None:
    """Be a server of the models named on the command line, until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--models", required=True)
    args = parser.parse_args()
    queues = {}
    for name, run in runtimes(args.models.split(",")).items():
        model = models.MODELS[name]
        queues[name] = Queue(model, run, join, max(model.buckets["b"]) // model.rows)
    uvicorn.run(
        application(queues),
        host="127.0.0.1",
        port=args.port,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        timeout_keep_alive=75,
        access_log=False,
        log_level="warning",
    )
