"""A V2 server over HTTP that answers everything with the same bytes, in a thread."""

import asyncio
import contextlib
import json
import threading

import uvicorn

METADATA = {
    "name": "ranker",
    "versions": ["3"],
    "platform": "fornax",
    "inputs": [
        {"name": "ids", "datatype": "INT32", "shape": [-1, -1]},
        {"name": "text", "datatype": "BYTES", "shape": [-1]},
        {"name": "weight", "datatype": "BF16", "shape": [-1, 2]},
    ],
    "outputs": [{"name": "score", "datatype": "FP32", "shape": [-1]}],
}


class FakeV2:
    """Counts what it is asked; `refuse` of each `every` requests get 429, some no answer."""

    def __init__(self):
        self.infers = 0
        self.bodies = set()
        self.heads = []
        self.refuse_every = 0
        self.hang_up_every = 0
        self.hang_every = 0

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.heads.append(dict(scope["headers"]))
        await self._answer(scope["path"], body, send)

    async def _answer(self, path, body, send):
        if path.endswith("/infer"):
            self.infers += 1
            self.bodies.add(body)
            if self.hang_every and self.infers % self.hang_every == 0:
                await asyncio.sleep(0.4)
            if self.hang_up_every and self.infers % self.hang_up_every == 0:
                raise RuntimeError("hang up")
            if self.refuse_every and self.infers % self.refuse_every == 0:
                await _send(send, 429, {"error": "the queue is full"})
            else:
                await _send(send, 200, {"outputs": []})
        elif path == "/v2/models/ranker":
            await _send(send, 200, METADATA)
        elif path == "/v2/models/ranker/stats":
            duration = {"count": self.infers, "ns": self.infers * 4000}
            parts = ("success", "queue", "compute_input", "compute_infer", "compute_output")
            stats = {
                "inference_count": 3 * self.infers,
                "execution_count": self.infers,
                "inference_stats": dict.fromkeys(parts, duration),
            }
            await _send(send, 200, {"model_stats": [stats]})
        else:
            await _send(send, 404, {"error": "there is no such model"})


async def _send(send, status, content):
    body = json.dumps(content).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def running(app):
    """Serve an ASGI app from a thread; yields host:port."""
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
