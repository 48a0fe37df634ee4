"""What a model has done, in Triton's terms: requests, rows, batches, and where their time went.

Kept by the event loop's thread alone, so that counting costs additions and no locks.
"""

import dataclasses
import time

from fornax.config.errors import ServingCode
from fornax.serving.types import Timing

__all__ = ["BatchCount", "Counters", "ModelStatistics"]


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
        """A request of so many rows was answered so long after it came."""
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
