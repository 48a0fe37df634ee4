"""Shadow traffic: copies of requests for a version that answers no one, and its differences."""

import asyncio
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from fornax.config import FornaxError
from fornax.serving.lifecycle.states import Instance
from fornax.serving.settings import Shadow
from fornax.serving.types import InferRequest, InferResult

__all__ = ["Difference", "OutputDifferences", "ShadowRequest", "Shadowing", "difference"]


@dataclasses.dataclass(frozen=True)
class Difference:
    """One output of one request: shadow against main."""

    max_absolute: float = 0.0
    """Largest |shadow - main|; infinite where only one of them is finite."""
    max_relative: float = 0.0
    """Largest |shadow - main| / |main|, where main is not 0."""
    differs: bool = False
    """Whether an element is beyond the tolerance, or shape or dtype are others."""
    rows: int = 0
    """Rows whose largest element was looked for; 0 where that says nothing."""
    argmax: int = 0
    """Rows in which it stands elsewhere."""
    problem: str = ""
    """What keeps the two from being compared."""


def difference(
    main: np.ndarray, shadow: np.ndarray, absolute: float, relative: float
) -> Difference:
    """Compare an output; integers, truth values and strings differ when they are not equal."""
    if main.shape != shadow.shape or main.dtype != shadow.dtype:
        return Difference(
            differs=True,
            problem=f"{shadow.dtype} {shadow.shape} where the main answer is {main.dtype} "
            f"{main.shape}",
        )
    if main.size == 0:
        return Difference()
    if main.dtype.kind in "OSUb":
        return Difference(differs=bool((main != shadow).any()))
    a, b = main.astype(np.float64), shadow.astype(np.float64)
    with np.errstate(all="ignore"):
        off, size = np.abs(b - a), np.abs(a)
        largest = float(off.max())
        if not math.isfinite(largest):
            # Equal infinities and a NaN in both are not a difference; in one of them they are all.
            off[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
            off[np.isnan(off)] = math.inf
            largest = float(off.max())
            size[~np.isfinite(size)] = 0.0
        relatives = np.divide(off, size, out=np.zeros_like(off), where=size > 0)
        if main.dtype.kind in "iu":
            differs = bool((main != shadow).any())
        else:
            differs = bool((off > absolute + relative * size).any())
    rows, argmax = _argmax(a, b)
    return Difference(
        max_absolute=largest,
        max_relative=float(relatives.max()),
        differs=differs,
        rows=rows,
        argmax=argmax,
    )


def _argmax(a: np.ndarray, b: np.ndarray) -> tuple[int, int]:
    """Rows along the last dimension, and those whose largest elements are at other places."""
    if a.ndim < 2 or a.shape[-1] < 2:
        return 0, 0
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    return len(a), int((a.argmax(-1) != b.argmax(-1)).sum())


@dataclasses.dataclass
class OutputDifferences:
    """One output over all requests compared."""

    compared: int = 0
    differing: int = 0
    max_absolute: float = 0.0
    max_relative: float = 0.0
    rows: int = 0
    argmax: int = 0
    problems: Counter[str] = dataclasses.field(default_factory=Counter)

    def add(self, one: Difference) -> None:
        """Take in one request's difference."""
        self.compared += 1
        self.differing += one.differs
        self.max_absolute = max(self.max_absolute, one.max_absolute)
        self.max_relative = max(self.max_relative, one.max_relative)
        self.rows += one.rows
        self.argmax += one.argmax
        if one.problem and (one.problem in self.problems or len(self.problems) < 8):
            self.problems[one.problem] += 1

    def report(self) -> dict[str, object]:
        """As JSON has it; infinity, which JSON lacks, as text."""
        return {
            "compared": self.compared,
            "differing": self.differing,
            "max_absolute": _number(self.max_absolute),
            "max_relative": _number(self.max_relative),
            "rows": self.rows,
            "argmax_disagreements": self.argmax,
            "problems": dict(self.problems),
        }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else "infinity"


class Percentiles:
    """Durations in buckets a tenth apart, so that percentiles cost no memory.

    The bounds of the histogram, few enough to be scraped, lie too far apart for that.
    """

    _BASE = math.log(1.1)

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._number = 0
        self._sum = 0

    def add(self, nanoseconds: int) -> None:
        """Take in one duration."""
        self._counts[int(math.log(max(nanoseconds, 1)) / self._BASE)] += 1
        self._number += 1
        self._sum += nanoseconds

    def quantile(self, share: float) -> float:
        """Microseconds under which this many of the durations are, within a tenth; 0 for none."""
        left = share * self._number
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                return math.exp((bucket + 1) * self._BASE) / 1000
        return 0.0

    def report(self) -> Mapping[str, float]:
        """Microseconds: mean, median, and the slowest hundredth's border."""
        mean = self._sum / self._number / 1000 if self._number else 0.0
        return {
            "mean_us": round(mean, 1),
            "p50_us": round(self.quantile(0.5), 1),
            "p99_us": round(self.quantile(0.99), 1),
        }


_INLINE_BYTES = 1 << 16
_WORST = 8


@dataclasses.dataclass(slots=True)
class ShadowRequest(InferRequest):
    """A copied request: who watches requests go by tells it by its class."""


class Shadowing:
    """A main version and its shadow, while both are ready.

    A request is copied after the main answer is out, and only while fewer copies than the limit
    are under way: the main answer does not wait here.
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
        self.counts: Counter[str] = Counter()
        """Requests by what became of them; `report` says what each name means."""
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
        self.counts["seen"] += 1
        self._due += self.settings.share
        if self._due < 1:
            return
        self._due -= 1
        if self._under_way >= self.settings.queue_limit:
            self.counts["dropped"] += 1
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
            request_id=request.request_id,
        )
        # By then the main answer's own callbacks have run: it is out before the copy goes in.
        loop = asyncio.get_running_loop()
        answer.add_done_callback(lambda done: loop.call_soon(self._send, copy, done))

    def _send(self, copy: InferRequest, main: "asyncio.Future[InferResult]") -> None:
        if main.cancelled() or main.exception() is not None or not self.running:
            self._under_way -= 1
            self.counts["without_main_answer"] += 1
            return
        copy.received = time.monotonic()
        try:
            answer = self.shadow.servable.submit(copy)
        except FornaxError as error:
            self._fail(error)
            return
        self.counts["copied"] += 1
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
        compared: Callable[[], Mapping[str, Difference]],
    ) -> None:
        try:
            found = compared()
        except Exception as error:
            self._fail(error)
        else:
            self._finish(copy, main, shadow, found)

    def _compare(self, main: InferResult, shadow: InferResult) -> Mapping[str, Difference]:
        absolute, relative = self.settings.absolute, self.settings.relative
        return {
            name: difference(array, shadow.outputs[name], absolute, relative)
            for name, array in main.outputs.items()
            if name in shadow.outputs
        }

    def _finish(
        self,
        copy: InferRequest,
        main: InferResult,
        shadow: InferResult,
        found: Mapping[str, Difference],
    ) -> None:
        self._under_way -= 1
        self.counts["compared"] += 1
        for name in main.outputs.keys() - found.keys():
            self._errors[f"the shadow has no output {name}"] += 1
        for name, one in found.items():
            key = f"{main.function}/{name}" if main.function else name
            self._outputs.setdefault(key, OutputDifferences()).add(one)
            if one.differs:
                self._worst.append((one.max_absolute, key, copy.id))
        self.counts["differing"] += any(one.differs for one in found.values())
        self._worst = sorted(self._worst, reverse=True)[:_WORST]
        for side, result in (("main", main), ("shadow", shadow)):
            timing = result.timing
            self._latencies[side].add(
                timing.queue + timing.compute_input + timing.compute_infer + timing.compute_output
            )

    def _fail(self, error: BaseException) -> None:
        self._under_way -= 1
        self.counts["failed"] += 1
        text = str(error) if isinstance(error, FornaxError) else type(error).__name__
        if text in self._errors or len(self._errors) < _WORST:
            self._errors[text] += 1

    def report(self) -> dict[str, object]:
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
            "requests": {name: self.counts[name] for name in names}
            | {"without_main_answer": self.counts["without_main_answer"]},
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
    base: object = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return array.copy()
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return array if base is None or isinstance(base, bytes) else array.copy()
