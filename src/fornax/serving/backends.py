"""Models of the repository that are not bundles: made before the start, run beside the others."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from fornax.config import FornaxError, ServingCode, ServingError
from fornax.serving.backend import Backend, BackendFactory, Tensor, stream_of
from fornax.serving.events import Events, StateChange
from fornax.serving.repository import scan
from fornax.serving.statistics import ModelStatistics
from fornax.serving.types import (
    IndexEntry,
    InferRequest,
    InferResult,
    ModelMetadata,
    State,
    TensorMetadata,
    Timing,
    as_serving_error,
)
from fornax.serving.v2.datatypes import refuse

__all__ = ["VERSION", "BackendModel", "Backends"]

VERSION = "1"
"""The only version of an backend."""


class BackendModel:
    """One backend, its state and its counters."""

    def __init__(self, backend: Backend):
        self.backend = backend
        self.state = State.LOADING  # or so it must seem until `start` says otherwise
        self.unready = ""
        """What its start came to, where it is not ready."""
        self._stream = stream_of(backend)
        self._counts = ModelStatistics(
            name=backend.name, version=VERSION, memory_bytes=backend.memory
        )

    def ready(self) -> bool:
        """Whether requests are taken now."""
        return self.state is State.READY and self.backend.ready()

    def reason(self) -> str:
        """Why they are not: what its start came to, before what it says itself."""
        if self.state is State.LOADING or self.ready():
            return ""
        return self.unready or self.backend.reason()

    def index_entry(self) -> IndexEntry:
        """Its line of the repository's index."""
        state = self.state
        if state is State.READY and not self.backend.ready():
            state = State.UNAVAILABLE
        return IndexEntry(self.backend.name, VERSION, state.value, self.reason())

    def metadata(self) -> ModelMetadata:
        """Its tensors."""
        return ModelMetadata(
            name=self.backend.name,
            versions=(VERSION,),
            platform=self.backend.platform,
            inputs=_tensors(self.backend.inputs()),
            outputs=_tensors(self.backend.outputs()),
        )

    def statistics(self) -> ModelStatistics:
        """What it has done by V2 requests; its own routes are counted by its own metrics."""
        return self._counts

    async def infer(self, request: InferRequest) -> InferResult:
        """Answer a request, in its time; what comes before the last piece goes to its `pieces`.

        Raises:
          ServingError: what became of it.
        """
        started = time.monotonic()
        self._counts.pending += 1
        try:
            self._check(request)
            async with asyncio.timeout(_seconds_left(request)):
                outputs = await self._outputs(request, started)
            result = self._result(request, outputs, started)
        except BaseException as error:
            known = _known(error)
            self._counts.failed(known.code, _since(request.received or started))
            if isinstance(error, asyncio.CancelledError):
                raise
            raise known from error
        finally:
            self._counts.pending -= 1
        self._answered(request, result, started)
        return result

    async def _outputs(self, request: InferRequest, started: float) -> Mapping[str, np.ndarray]:
        """The whole answer, or the last of its pieces."""
        if request.pieces is None or self._stream is None:
            return await self.backend.infer(request)
        async with contextlib.aclosing(self._stream(request)) as pieces:
            async for outputs, last in pieces:
                if last:
                    return outputs
                request.pieces(self._result(request, outputs, started))
        raise ServingError(ServingCode.INTERNAL, f"{request.model} ended without its last piece")

    def _check(self, request: InferRequest) -> None:
        """Refuse what is not a tensor of the backend's; its own meaning is the backend's to
        judge."""
        wanted = self.backend.inputs()
        for name in request.inputs:
            if name not in wanted:
                raise refuse(f"{request.model} has no input {name!r}; it has {', '.join(wanted)}")
        given = self.backend.outputs()
        for name in request.outputs:
            if name not in given:
                raise refuse(f"{request.model} has no output {name!r}; it has {', '.join(given)}")
        if request.function:
            raise refuse(f"{request.model} has no functions; leave {request.function!r} out")

    def _result(
        self, request: InferRequest, outputs: Mapping[str, np.ndarray], started: float
    ) -> InferResult:
        return InferResult(
            model=request.model,
            version=VERSION,
            function="",
            id=request.id,
            outputs={name: outputs[name] for name in request.outputs or outputs},
            timing=Timing(compute_infer=_since(started)),
        )

    def _answered(self, request: InferRequest, result: InferResult, started: float) -> None:
        counts = self._counts
        first = next(iter(request.inputs.values()), None)
        rows = first.shape[0] if first is not None and first.ndim else 1
        counts.answered(rows, result.timing, _since(request.received or started))
        counts.execution_count += 1
        counts.last_inference = time.time_ns() // 1_000_000


def _tensors(named: Mapping[str, Tensor]) -> tuple[TensorMetadata, ...]:
    return tuple(TensorMetadata(name, *tensor) for name, tensor in named.items())


def _seconds_left(request: InferRequest) -> float | None:
    return None if request.deadline is None else max(0.0, request.deadline - time.monotonic())


def _since(started: float) -> int:
    return round((time.monotonic() - started) * 1e9)


def _known(error: BaseException) -> ServingError:
    """What a client receives on a failure."""
    if isinstance(error, ServingError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return ServingError(ServingCode.CANCELLED, "the client went away")
    if isinstance(error, TimeoutError):
        return ServingError(ServingCode.DEADLINE_EXCEEDED, "the request took longer than it may")
    if isinstance(error, FornaxError):
        return refuse(str(error))
    return as_serving_error(error)


_log = logging.getLogger("fornax.serving")


class Backends:
    """The backends of a repository. One whose settings are wrong is listed with the reason.

    Raises:
      ServingError: the repository cannot be read.
    """

    def __init__(self, root: Path, factories: Mapping[str, BackendFactory], events: Events):
        self.backends: dict[str, Backend] = {}
        self.models: dict[str, BackendModel] = {}
        self._events = events
        self._broken: dict[str, str] = {}
        self._lock = asyncio.Lock()
        if not factories:
            return
        for name, folder in scan(root, frozenset(factories)).items():
            if folder.type in factories and not folder.problem:
                self._make(name, factories[folder.type], folder.path, folder.entry)

    def _make(
        self, name: str, factory: BackendFactory, path: Path, settings: Mapping[str, object]
    ) -> None:
        try:
            backend = factory(name, path, settings)
        except FornaxError as error:
            self._broken[name] = str(error)
            return
        self.backends[name], self.models[name] = backend, BackendModel(backend)

    def ready(self) -> bool:
        """Whether all of them take requests, those unloaded by request apart."""
        return not self._broken and all(
            each.backend.ready() or each.unready == _UNLOADED for each in self.models.values()
        )

    def index(self) -> list[IndexEntry]:
        """A line for each."""
        lines = [each.index_entry() for each in self.models.values()]
        for name, reason in self._broken.items():
            lines.append(IndexEntry(name, VERSION, State.UNAVAILABLE.value, reason))
        return sorted(lines, key=lambda line: line.name)

    async def start(self, wanted: Callable[[str], bool]) -> None:
        """Start those wanted, one after another; one that fails keeps no other from starting."""
        for name, model in self.models.items():
            if not wanted(name):
                model.state, model.unready = State.UNAVAILABLE, _UNLOADED
        for name, reason in self._broken.items():
            self._events.tell_state(StateChange(name, VERSION, State.UNAVAILABLE.value, reason))
        for name, model in self.models.items():
            if model.state is not State.LOADING:  # not wanted, or unloaded meanwhile
                continue
            try:
                await self.load(name)
            except FornaxError:
                continue  # its reason is in the index and the log

    async def load(self, name: str) -> None:
        """Start one.

        Raises:
          FornaxError: it cannot be served.
        """
        async with self._lock:
            if self.models[name].state is State.READY:
                return
            started = time.monotonic()
            self._enter(name, State.LOADING)
            try:
                await self.backends[name].start()
            except Exception as error:
                reason = str(error)
                if not isinstance(error, FornaxError):
                    reason = f"{type(error).__name__}: {error}"
                    _log.error("%s did not start", name, exc_info=error)
                self._enter(name, State.UNAVAILABLE, reason)
                raise ServingError(_code(error), reason) from error
            self._enter(name, State.READY, seconds=time.monotonic() - started)

    async def unload(self, name: str, drain_seconds: float = 60.0) -> None:
        """Stop one, once it has answered what runs."""
        async with self._lock:
            if self.models[name].state is State.READY:
                self._enter(name, State.UNLOADING)
                await self.backends[name].stop(drain_seconds)
            self._enter(name, State.UNAVAILABLE, _UNLOADED)

    async def stop(self, drain_seconds: float) -> None:
        """Stop all of them."""
        for name, model in self.models.items():
            if model.state is State.READY:
                await self.unload(name, drain_seconds)

    def submit(self, request: InferRequest) -> "asyncio.Future[InferResult]":
        """Have the backend that a request names answer it.

        Raises:
          ServingError: it is not ready, or has no such version.
        """
        model = self.models[request.model]
        if request.version not in ("", VERSION):
            raise ServingError(
                ServingCode.NOT_FOUND,
                f"{request.model} has no version {request.version!r}; it has {VERSION}",
            )
        if not model.ready():
            reason = model.reason() or "it is loading"
            raise ServingError(ServingCode.UNAVAILABLE, f"{request.model} is not ready: {reason}")
        answer = asyncio.ensure_future(model.infer(request))
        answer.add_done_callback(lambda done: self._tell(request, done))
        return answer

    def _tell(self, request: InferRequest, done: "asyncio.Future[InferResult]") -> None:
        if done.cancelled():
            outcome = ServingError(ServingCode.CANCELLED, "the client went away")
            self._events.tell_finished(request, outcome)
        else:
            self._events.tell_finished(request, done.exception() or done.result())

    def _enter(self, name: str, state: State, reason: str = "", seconds: float = 0.0) -> None:
        self.models[name].state, self.models[name].unready = state, reason
        self._events.tell_state(StateChange(name, VERSION, state.value, reason, seconds))


_UNLOADED = "it was unloaded by request; load it to serve it again"


def _code(error: Exception) -> ServingCode:
    return error.code if isinstance(error, ServingError) else ServingCode.FAILED_PRECONDITION
