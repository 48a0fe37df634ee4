"""An entry among the models: its metadata, its answers and its counters in the server's terms."""

import asyncio
import contextlib
import time
from collections.abc import Mapping

import numpy as np

from fornax.config import FornaxError, ServingCode, ServingError
from fornax.serving.entry import Entry, Tensor, stream_of
from fornax.serving.execution.counters import ModelStatistics
from fornax.serving.failures import as_serving_error
from fornax.serving.types import InferRequest, InferResult, ModelMetadata, TensorMetadata, Timing

__all__ = ["VERSION", "EntryModel"]

VERSION = "1"
"""The only version of an entry."""


class EntryModel:
    """One entry."""

    def __init__(self, entry: Entry):
        self.entry = entry
        self._stream = stream_of(entry)
        self._counts = ModelStatistics(name=entry.name, version=VERSION, memory_bytes=entry.memory)

    def metadata(self) -> ModelMetadata:
        """Its tensors."""
        return ModelMetadata(
            name=self.entry.name,
            versions=(VERSION,),
            platform=self.entry.platform,
            inputs=_tensors(self.entry.inputs()),
            outputs=_tensors(self.entry.outputs()),
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
            return await self.entry.infer(request)
        async with contextlib.aclosing(self._stream(request)) as pieces:
            async for outputs, last in pieces:
                if last:
                    return outputs
                request.pieces(self._result(request, outputs, started))
        raise ServingError(ServingCode.INTERNAL, f"{request.model} ended without its last piece")

    def _check(self, request: InferRequest) -> None:
        """Refuse what is no tensor of the entry's; its own meaning is the entry's to judge."""
        wanted = self.entry.inputs()
        for name in request.inputs:
            if name not in wanted:
                raise _refuse(f"{request.model} has no input {name!r}; it has {', '.join(wanted)}")
        given = self.entry.outputs()
        for name in request.outputs:
            if name not in given:
                raise _refuse(f"{request.model} has no output {name!r}; it has {', '.join(given)}")
        if request.function:
            raise _refuse(f"{request.model} has no functions; leave {request.function!r} out")

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
        counts.success += 1
        counts.execution_count += 1
        counts.inference_count += first.shape[0] if first is not None and first.ndim else 1
        counts.request_ns += _since(request.received or started)
        counts.compute_infer_ns += result.timing.compute_infer
        counts.last_inference = time.time_ns() // 1_000_000


def _tensors(named: Mapping[str, Tensor]) -> tuple[TensorMetadata, ...]:
    return tuple(TensorMetadata(name, *tensor) for name, tensor in named.items())


def _seconds_left(request: InferRequest) -> float | None:
    return None if request.deadline is None else max(0.0, request.deadline - time.monotonic())


def _since(started: float) -> int:
    return round((time.monotonic() - started) * 1e9)


def _refuse(message: str) -> ServingError:
    return ServingError(ServingCode.INVALID_ARGUMENT, message)


def _known(error: BaseException) -> ServingError:
    """What a client is told of a failure."""
    if isinstance(error, ServingError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return ServingError(ServingCode.CANCELLED, "the client went away")
    if isinstance(error, TimeoutError):
        return ServingError(ServingCode.DEADLINE_EXCEEDED, "the request took longer than it may")
    if isinstance(error, FornaxError):
        return ServingError(ServingCode.INVALID_ARGUMENT, str(error))
    return as_serving_error(error)
