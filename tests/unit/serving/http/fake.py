"""A host for tests of the protocols: models that are a line of numpy each."""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tests.unit.serving.talk import Talk

from fornax.config import ServingCode, ServingError
from fornax.serving.backends import BackendModel
from fornax.serving.events import Events
from fornax.serving.statistics import BatchCount, ModelStatistics
from fornax.serving.types import (
    IndexEntry,
    InferRequest,
    InferResult,
    ModelMetadata,
    TensorMetadata,
)

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Rollback:
    name: str
    version: str
    previous: str
    persistent: bool = True


class FakeHost:
    """`echo` gives every input back as `out_<name>`, `talk` answers in pieces; the others are for
    failures."""

    def __init__(self) -> None:
        self.events = Events()
        self.talk = Talk()
        self.backends = {"talk": self.talk}
        self.functions: dict[str, Callable[[Arrays], Arrays]] = {
            "echo": lambda inputs: {f"out_{name}": array for name, array in inputs.items()},
            "sum": lambda inputs: {"sum": inputs["x"].sum(axis=-1)},
            "bug": lambda inputs: {"bug": inputs["missing"]},
            "huge": lambda inputs: {"out": np.zeros(8_000_000, np.float32)},
        }
        self.reset()

    def reset(self) -> None:
        """Forget what happened."""
        self.slow: asyncio.Future[InferResult] | None = None
        self.requests: list[InferRequest] = []
        self.unloaded: set[str] = set()
        self.is_ready = True
        self.version = "1"
        """That answers; asked for is 1."""
        self.events.refusals.clear()

    def submit(self, request: InferRequest) -> "asyncio.Future[InferResult]":
        self.requests.append(request)
        if request.model == "talk":
            return asyncio.ensure_future(BackendModel(self.talk).infer(request))
        self._known(request.model, request.version)
        if request.model in self.unloaded:
            raise ServingError(ServingCode.UNAVAILABLE, f"model {request.model!r} is unloaded")
        if request.model == "full":
            raise ServingError(ServingCode.RESOURCE_EXHAUSTED, "the queue of 'full' is full")
        future = asyncio.get_running_loop().create_future()
        if request.model == "slow":
            self.slow = future
            return future
        outputs = self.functions[request.model](request.inputs)
        names = request.outputs or tuple(outputs)
        if not set(names) <= outputs.keys():
            raise ServingError(ServingCode.INVALID_ARGUMENT, f"no output among {names}")
        chosen = {name: outputs[name] for name in names}
        future.set_result(InferResult(request.model, self.version, "f", request.id, chosen))
        return future

    async def answer_slow(self) -> "asyncio.Future[InferResult]":
        """Answer the request that waits in `slow`."""
        assert self.slow is not None
        self.slow.set_result(InferResult("slow", "1", "f", "", {}))
        return self.slow

    def _known(self, name: str, version: str = "") -> None:
        if name.partition(":")[0] not in {*self.functions, "slow", "full"} or version not in (
            "",
            "1",
        ):
            raise ServingError(
                ServingCode.NOT_FOUND, f"model {name!r} version {version!r} is not here"
            )

    def live(self) -> bool:
        return True

    def ready(self) -> bool:
        return self.is_ready

    def model_ready(self, name: str, version: str = "") -> bool:
        return name in self.functions and name not in self.unloaded and version in ("", "1")

    def metadata(self, name: str, version: str = "") -> ModelMetadata:
        if name == "talk":
            return BackendModel(self.talk).metadata()
        self._known(name, version)
        tensor = TensorMetadata("x", "FP32", (-1, 4))
        return ModelMetadata(name, ("1",), "fornax_stablehlo", (tensor,), (tensor,))

    def config(self, name: str, version: str = "") -> dict[str, Any]:
        self._known(name, version)
        return {"name": name, "max_batch_size": 8}

    def index(self, ready_only: bool = False) -> list[IndexEntry]:
        backends = [
            IndexEntry(name, "1", "UNAVAILABLE" if name in self.unloaded else "READY")
            for name in self.functions
        ]
        return [each for each in backends if each.state == "READY" or not ready_only]

    async def load(self, name: str, version: str = "") -> None:
        self._known(name, version)
        self.unloaded.discard(name)

    async def unload(self, name: str, version: str = "") -> None:
        self._known(name, version)
        self.unloaded.add(name)

    async def rollback(self, name: str, version: str = "") -> Rollback:
        self._known(name)
        return Rollback(name, version or "1", "2")

    async def release(self, name: str) -> None:
        self._known(name)

    def shadow_report(self, name: str) -> dict[str, Any]:
        self._known(name)
        raise ServingError(ServingCode.FAILED_PRECONDITION, f"model {name!r} has no shadow")

    def statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        if name:
            self._known(name, version)
        stats = ModelStatistics(success=3, inference_count=5, name=name or "echo", version="1")
        stats.batches[8] = BatchCount(count=2, rows=5, compute_infer_ns=10)
        return [stats]
