"""A host without models behind a real gRPC server, which runs in a thread of its own."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop
from tests.unit.serving.talk import Talk

from fornax.config import ServingCode, ServingError
from fornax.serving.access import Limits
from fornax.serving.backends import BackendModel
from fornax.serving.config import Address
from fornax.serving.events import Events, StateChange
from fornax.serving.grpc.server import GrpcServer
from fornax.serving.statistics import BatchCount, ModelStatistics
from fornax.serving.types import (
    IndexEntry,
    InferRequest,
    InferResult,
    ModelMetadata,
    TensorMetadata,
)
from fornax.serving.v2.shared_memory import SharedMemory

LIMITS = Limits(max_body_bytes=4 << 20, max_tensor_bytes=2 << 20, max_concurrent_requests=64)


class FakeHost:
    """`echo` answers its inputs, `slow` after parameter `seconds` or when `answer_slow` is called,
    `broken` never does, `talk` in pieces."""

    def __init__(self) -> None:
        self.events = Events()
        self.talk = Talk()
        self.backends = {"talk": self.talk}
        self.is_ready = True
        self.requests: list[InferRequest] = []
        self.futures: list[asyncio.Future[InferResult]] = []
        self.slow: list[Callable[[], None]] = []
        self.cancelled = 0
        self.loaded = {("echo", "1"), ("echo", "2"), ("slow", "1"), ("broken", "1")}

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return self.is_ready

    def model_ready(self, name: str, version: str = "") -> bool:
        return any(name == each and version in ("", of) for each, of in self.loaded)

    def _known(self, name: str, version: str) -> None:
        if not self.model_ready(name, version):
            raise ServingError(ServingCode.NOT_FOUND, f"no model {name!r} version {version!r}")

    def metadata(self, name: str, version: str = "") -> ModelMetadata:
        self._known(name, version)
        tensor = TensorMetadata("x", "FP32", (-1, 4))
        return ModelMetadata(name, ("1", "2"), "fornax", (tensor,), (tensor,))

    def config(self, name: str, version: str = "") -> dict[str, Any]:
        self._known(name, version)
        tensor = {"name": "x", "data_type": "TYPE_FP32", "dims": [4]}
        return {
            "name": name,
            "platform": "fornax",
            "backend": "fornax",
            "max_batch_size": 8,
            "input": [tensor],
            "output": [tensor],
            "dynamic_batching": {"preferred_batch_size": [8], "max_queue_delay_microseconds": 50},
            "version_policy": {"latest": {"num_versions": 2}},
        }

    def index(self, ready_only: bool = False) -> list[IndexEntry]:
        lines = [IndexEntry(name, version, "READY") for name, version in sorted(self.loaded)]
        gone = IndexEntry("gone", "1", "UNAVAILABLE", "unloaded")
        return lines if ready_only else [*lines, gone]

    def _change(self, name: str, version: str, state: str) -> None:
        self.events.tell_state(StateChange(name, version, state))

    async def load(self, name: str, version: str = "") -> None:
        if name == "missing":
            raise ServingError(ServingCode.NOT_FOUND, "no folder of that name")
        self.loaded.add((name, version or "1"))
        self._change(name, version or "1", "READY")

    async def unload(self, name: str, version: str = "") -> None:
        self.loaded -= {each for each in self.loaded if each[0] == name}
        self._change(name, version, "UNAVAILABLE")

    def statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        batches = {8: BatchCount(count=2, rows=9, compute_infer_ns=7000)}
        return [
            ModelStatistics(name="echo", version="1", success=3, request_ns=9000, batches=batches)
        ]

    def submit(self, request: InferRequest) -> "asyncio.Future[InferResult]":
        if request.model == "talk":
            return asyncio.ensure_future(BackendModel(self.talk).infer(request))
        self._known(request.model, request.version)
        if request.outputs and not set(request.outputs) <= set(request.inputs):
            raise ServingError(ServingCode.INVALID_ARGUMENT, f"no output {request.outputs}")
        self.requests.append(request)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[InferResult] = loop.create_future()
        self.futures.append(future)
        outputs = {name: request.inputs[name] for name in request.outputs or request.inputs}
        result = InferResult(request.model, "1", request.function, request.id, outputs)
        future.add_done_callback(self._count)
        if request.model == "broken":
            future.set_exception(RuntimeError("a secret of the server's"))
        elif request.model == "slow":
            self.slow.append(lambda: _answer(future, result))
            loop.call_later(float(request.parameters["seconds"]), _answer, future, result)
        else:
            future.set_result(result)
        return future

    def answer_slow(self) -> None:
        """Answer the requests that wait in `slow`."""
        while self.slow:
            self.slow.pop()()

    def _count(self, future: "asyncio.Future[InferResult]") -> None:
        self.cancelled += future.cancelled()


def _answer(future: "asyncio.Future[InferResult]", result: InferResult) -> None:
    if not future.done():
        future.set_result(result)


class Served:
    """A gRPC server on an event loop in a thread."""

    def __init__(self, **options: Any):
        self.host = FakeHost()
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        options = {"limits": LIMITS, "shared_memory": SharedMemory(), **options}
        self.server = GrpcServer(self.host, Address("127.0.0.1", 0), **options)
        self.address = str(self.run(self.server.start()))

    def run(self, coroutine: Any) -> Any:
        """The result of a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(300)

    def close(self) -> None:
        """Stop the server and its thread."""
        self.run(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture(scope="session")
def serve() -> Iterator[Callable[..., Served]]:
    """Start servers with options of GrpcServer's; they are closed at the end."""
    started: list[Served] = []

    def start(**options: Any) -> Served:
        started.append(Served(**options))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture(scope="session")
def served(serve: Callable[..., Served]) -> Served:
    """The server that most tests share."""
    return serve()
