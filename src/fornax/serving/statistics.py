"""What a model has done, in Triton's terms: requests, rows, batches, and where their time went.

Kept by the event loop's thread alone, so that counting costs additions and no locks.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

from fornax.config.errors import ServingCode
from fornax.serving.types import Timing

__all__ = ["BatchCount", "Counters", "ModelStatistics", "ServerRows"]


@dataclasses.dataclass(slots=True)
class BatchCount:
    """Batches that ran in one bucket. Times in nanoseconds, summed over batches."""

    count: int = 0
    rows: int = 0
    """Rows of requests in them."""
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0


@dataclasses.dataclass(slots=True)
class Counters:
    """What one function of one version has done. Times in nanoseconds, summed over requests."""

    success: int = 0
    """Requests answered."""
    failure: int = 0
    """Requests accepted or refused that got an error."""
    cancel: int = 0
    """Requests whose client left before they were computed."""
    reject: dict[str, int] = dataclasses.field(default_factory=dict)
    """Failures by code."""
    inference_count: int = 0
    """Rows of requests answered."""
    execution_count: int = 0
    """Batches computed."""
    request_ns: int = 0
    """From a request's arrival to its answer, over those answered."""
    fail_ns: int = 0
    """The same over those that got an error."""
    queue_ns: int = 0
    compute_input_ns: int = 0
    compute_infer_ns: int = 0
    compute_output_ns: int = 0
    padded_rows: int = 0
    """Rows computed that no request asked for."""
    bucket_rows: int = 0
    """Rows computed."""
    padded_elements: int = 0
    """Elements of inputs computed that no request asked for, rows and ragged tails."""
    bucket_elements: int = 0
    """Elements of inputs computed."""
    batches: dict[int, BatchCount] = dataclasses.field(default_factory=dict)
    """By the bucket's rows."""
    last_inference: int = 0
    """Milliseconds since 1970, of the last batch; 0: none yet."""

    def answered(self, rows: int, timing: Timing, nanoseconds: int) -> None:
        """A request of this many rows was answered this long after it came."""
        self.success += 1
        self.inference_count += rows
        self.request_ns += nanoseconds
        self.queue_ns += timing.queue
        self.compute_input_ns += timing.compute_input
        self.compute_infer_ns += timing.compute_infer
        self.compute_output_ns += timing.compute_output

    def failed(self, code: ServingCode, nanoseconds: int) -> None:
        """A request got an error."""
        if code is ServingCode.CANCELLED:
            self.cancel += 1
            return
        self.failure += 1
        self.reject[code.name] = self.reject.get(code.name, 0) + 1
        self.fail_ns += nanoseconds

    def executed(
        self, bucket: int, rows: int, real: int, elements: int, times: tuple[int, int, int]
    ) -> None:
        """A batch ran; `real` of its inputs' `elements` were requests' own."""
        entry = self.batches.get(bucket)
        if entry is None:
            entry = self.batches[bucket] = BatchCount()
        entry.count += 1
        entry.rows += rows
        entry.compute_input_ns += times[0]
        entry.compute_infer_ns += times[1]
        entry.compute_output_ns += times[2]
        self.execution_count += 1
        self.bucket_rows += bucket
        self.padded_rows += bucket - rows
        self.bucket_elements += elements
        self.padded_elements += elements - real
        self.last_inference = time.time_ns() // 1_000_000


@dataclasses.dataclass(slots=True)
class ModelStatistics(Counters):
    """What one version of a model has done since it was loaded, over all its functions."""

    name: str = ""
    version: str = ""
    pending: int = 0
    """Requests accepted and not answered."""
    queued: int = 0
    """Those of them that wait for a device."""
    compilations_after_ready: int = 0
    """Programs compiled while requests waited for them; more than 0 is a defect."""
    memory_bytes: int = 0
    """Device memory reserved."""
    functions: dict[str, "ModelStatistics"] = dataclasses.field(default_factory=dict)

    def add(self, other: "ModelStatistics") -> None:
        """Take one function's figures into the sum."""
        self.functions[other.name] = other
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for code, count in other.reject.items():
            self.reject[code] = self.reject.get(code, 0) + count
        for rows, entry in other.batches.items():
            mine = self.batches.setdefault(rows, BatchCount())
            for each in dataclasses.fields(BatchCount):
                setattr(mine, each.name, getattr(mine, each.name) + getattr(entry, each.name))
        self.last_inference = max(self.last_inference, other.last_inference)


_SUMS = [
    each.name
    for each in dataclasses.fields(Counters)
    if each.name not in ("batches", "reject", "last_inference")
] + ["pending", "queued", "compilations_after_ready"]


class ServerRows:
    """What `server.jsonl` has of the models: totals of all, and of each by its name."""

    def __init__(self, statistics: Callable[[], Sequence[ModelStatistics]]) -> None:
        """`statistics` gives the counters of the versions in memory."""
        self._statistics = statistics
        self._before: dict[str, float] = {}

    def row(self, seconds: float) -> dict[str, object]:
        """Of the `seconds` since the last call: what waits now, rates, and means of what was
        answered meanwhile (None where nothing was)."""
        found = self._statistics()
        now = {name: float(sum(getattr(each, name) for each in found)) for name in _SUMS}
        spent = {name: value - self._before.get(name, 0.0) for name, value in now.items()}
        self._before = now

        def mean(total: str, count: str, unit: float = 1.0) -> float | None:
            # Of a model that was unloaded meanwhile the counts are gone.
            counted = max(0.0, spent[count])
            return round(max(0.0, spent[total]) / unit / counted, 6) if counted else None

        computed = mean("padded_rows", "bucket_rows")
        return {
            "pending": now["pending"],
            "queued": now["queued"],
            "requests": now["success"],
            "requests_per_second": round(max(0.0, spent["success"]) / max(seconds, 1e-3), 3),
            "failures": now["failure"],
            "rows_per_second": round(max(0.0, spent["inference_count"]) / max(seconds, 1e-3), 3),
            "batch_rows": mean("inference_count", "execution_count"),
            "batch_fill": None if computed is None else round(1 - computed, 4),
            "request_seconds": mean("request_ns", "success", 1e9),
            "queue_seconds": mean("queue_ns", "success", 1e9),
            "compute_seconds": mean("compute_infer_ns", "success", 1e9),
            "memory_bytes": sum(each.memory_bytes for each in found),
            "models": {
                f"{each.name} {each.version}".strip(): {
                    "requests": each.success,
                    "failures": each.failure,
                    "rows": each.inference_count,
                    "batches": each.execution_count,
                    "pending": each.pending,
                    "memory_bytes": each.memory_bytes,
                }
                for each in found
            },
        }
