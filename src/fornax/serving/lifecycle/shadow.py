"""Shadow traffic: copies of requests for a version that answers no one, and what it answers."""

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fornax.config import FornaxError
from fornax.serving.latencies import Percentiles
from fornax.serving.lifecycle.compare import OutputDifferences, difference
from fornax.serving.lifecycle.states import Instance
from fornax.serving.settings import Shadow
from fornax.serving.types import InferRequest, InferResult

__all__ = ["ShadowRequest", "Shadowing"]

_INLINE_BYTES = 1 << 16
_WORST = 8


@dataclasses.dataclass(slots=True)
class ShadowRequest(InferRequest):
    """A copied request: who watches requests go by tells it by its class."""


class Shadowing:
    """A main version and its shadow, while both are ready.

    A request is copied after the main answer is out, and only while fewer copies than the limit
    are under way: the main answer waits for nothing here.
    """

    def __init__(self, name: str, main: Instance, shadow: Instance, settings: Shadow):
        self.name = name
        self.main = main
        self.shadow = shadow
        self.settings = settings
        self.running = True
        self._due = 0.0
        self._under_way = 0
        self._since = time.time()
        self._counts: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._outputs: dict[str, OutputDifferences] = {}
        self._latencies = {"main": Percentiles(), "shadow": Percentiles()}
        self._worst: list[tuple[float, str, str]] = []

    def compares(self, main: Instance, shadow: Instance, settings: Shadow) -> bool:
        """Whether this is the comparison of these."""
        return (
            self.running
            and main is self.main
            and shadow is self.shadow
            and settings == self.settings
        )

    def stop(self) -> None:
        """Copy nothing more; the report stays."""
        self.running = False

    def watch(self, request: InferRequest, answer: "asyncio.Future[InferResult]") -> None:
        """See a request that the main version has just accepted."""
        self._counts["seen"] += 1
        self._due += self.settings.share
        if self._due < 1:
            return
        self._due -= 1
        if self._under_way >= self.settings.queue_limit:
            self._counts["dropped"] += 1
            return
        self._under_way += 1
        copy = ShadowRequest(
            model=request.model,
            inputs={name: _own(array) for name, array in request.inputs.items()},
            version=str(self.shadow.version),
            function=request.function,
            id=request.id,
            outputs=request.outputs,
            parameters=request.parameters,
        )
        # By then the main answer's own callbacks have run: it is out before the copy goes in.
        loop = asyncio.get_running_loop()
        answer.add_done_callback(lambda done: loop.call_soon(self._send, copy, done))

    def _send(self, copy: InferRequest, main: "asyncio.Future[InferResult]") -> None:
        if main.cancelled() or main.exception() is not None or not self.running:
            self._under_way -= 1
            self._counts["without_main_answer"] += 1
            return
        copy.received = time.monotonic()
        try:
            answer = self.shadow.servable.submit(copy)
        except FornaxError as error:
            self._fail(error)
            return
        self._counts["copied"] += 1
        answer.add_done_callback(lambda done: self._receive(copy, main.result(), done))

    def _receive(
        self, copy: InferRequest, main: InferResult, done: "asyncio.Future[InferResult]"
    ) -> None:
        if done.cancelled():
            self._under_way -= 1
            return
        error = done.exception()
        if error is not None:
            self._fail(error)
            return
        shadow = done.result()
        if sum(array.nbytes for array in main.outputs.values()) <= _INLINE_BYTES:
            self._take(copy, main, shadow, lambda: self._compare(main, shadow))
            return
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(None, self._compare, main, shadow)
        work.add_done_callback(lambda found: self._take(copy, main, shadow, found.result))

    def _take(
        self,
        copy: InferRequest,
        main: InferResult,
        shadow: InferResult,
        compared: Callable[[], Mapping[str, Any]],
    ) -> None:
        try:
            found = compared()
        except Exception as error:
            self._fail(error)
        else:
            self._finish(copy, main, shadow, found)

    def _compare(self, main: InferResult, shadow: InferResult) -> Mapping[str, Any]:
        absolute, relative = self.settings.absolute, self.settings.relative
        return {
            name: difference(array, shadow.outputs[name], absolute, relative)
            for name, array in main.outputs.items()
            if name in shadow.outputs
        }

    def _finish(
        self, copy: InferRequest, main: InferResult, shadow: InferResult, found: Mapping[str, Any]
    ) -> None:
        self._under_way -= 1
        self._counts["compared"] += 1
        for name in main.outputs.keys() - found.keys():
            self._errors[f"the shadow has no output {name}"] += 1
        for name, one in found.items():
            key = f"{main.function}/{name}" if main.function else name
            self._outputs.setdefault(key, OutputDifferences()).add(one)
            if one.differs:
                self._worst.append((one.max_absolute, key, copy.id))
        self._counts["differing"] += any(one.differs for one in found.values())
        self._worst = sorted(self._worst, reverse=True)[:_WORST]
        for side, result in (("main", main), ("shadow", shadow)):
            timing = result.timing
            self._latencies[side].add(
                timing.queue + timing.compute_input + timing.compute_infer + timing.compute_output
            )

    def _fail(self, error: BaseException) -> None:
        self._under_way -= 1
        self._counts["failed"] += 1
        text = str(error) if isinstance(error, FornaxError) else type(error).__name__
        if text in self._errors or len(self._errors) < _WORST:
            self._errors[text] += 1

    def report(self) -> dict[str, Any]:
        """What was seen so far, as JSON has it.

        `seen` requests were accepted by the main version, `copied` went to the shadow, `dropped`
        found too many copies under way, `failed` got an error from the shadow alone.
        """
        names = ("seen", "copied", "compared", "differing", "failed", "dropped")
        return {
            "name": self.name,
            "running": self.running,
            "main_version": str(self.main.version),
            "shadow_version": str(self.shadow.version),
            "share": self.settings.share,
            "tolerance": {
                "absolute": self.settings.absolute,
                "relative": self.settings.relative,
            },
            "since": round(self._since, 3),
            "requests": {name: self._counts[name] for name in names}
            | {"without_main_answer": self._counts["without_main_answer"]},
            "errors": dict(self._errors),
            "outputs": {name: each.report() for name, each in sorted(self._outputs.items())},
            "worst": [
                {"max_absolute": off if np.isfinite(off) else "infinity", "output": key, "id": id_}
                for off, key, id_ in self._worst
            ],
            "latency": {side: each.report() for side, each in self._latencies.items()},
        }


def _own(array: np.ndarray) -> np.ndarray:
    """The array, copied if what it views may change under it, as shared memory does."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return array.copy()
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return array if base is None or isinstance(base, bytes) else array.copy()
