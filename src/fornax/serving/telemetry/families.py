"""The families of metrics that the models' counters become, and their text."""

import dataclasses
import os
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fornax.serving.events import Outcome, StateChange
from fornax.serving.lifecycle.shadow import Shadowing
from fornax.serving.statistics import ModelStatistics
from fornax.serving.types import InferRequest, InferResult

if TYPE_CHECKING:
    from fornax.serving.execution.devices import Memory

__all__ = [
    "Family",
    "Latencies",
    "device_memory",
    "functions",
    "latencies",
    "machine",
    "models",
    "shadows",
]

_BOUNDS = tuple(step * 10.0**scale for scale in range(-4, 2) for step in (1, 2.5, 5))[:-2]
"""Upper ends in seconds: 0.1 ms to 10 s."""

_OF_MODELS = (
    ("nv_inference_request_success", "counter", "success", "Requests answered."),
    ("nv_inference_count", "counter", "inference_count", "Rows answered."),
    ("nv_inference_exec_count", "counter", "execution_count", "Batches executed."),
    ("nv_inference_pending_request_count", "gauge", "queued", "Requests that wait for a device."),
    (
        "fornax_model_memory_bytes",
        "gauge",
        "memory_bytes",
        "Device memory set aside for a version.",
    ),
)
"""Name, kind, field of the statistics, and help."""
_DURATIONS = {
    "nv_inference_request_duration_us": ("request_ns", "Whole requests"),
    "nv_inference_queue_duration_us": ("queue_ns", "Requests waiting for a batch and a device"),
    "nv_inference_compute_input_duration_us": ("compute_input_ns", "Inputs padded and moved"),
    "nv_inference_compute_infer_duration_us": ("compute_infer_ns", "Programs executed"),
    "nv_inference_compute_output_duration_us": ("compute_output_ns", "Outputs fetched and cut"),
}
_OF_FUNCTIONS = (
    ("fornax_rows_computed_total", "counter", "bucket_rows", "Rows computed, padding included."),
    ("fornax_rows_padding_total", "counter", "padded_rows", "Rows of padding computed."),
    (
        "fornax_elements_computed_total",
        "counter",
        "bucket_elements",
        "Elements of inputs computed.",
    ),
    (
        "fornax_elements_padding_total",
        "counter",
        "padded_elements",
        "Elements of padding computed: rows and ragged tails.",
    ),
    ("fornax_requests_running", "gauge", "pending", "Requests accepted and not answered yet."),
    ("fornax_queue_depth", "gauge", "queued", "Requests that wait for a device."),
)
_OF_BUCKETS = (
    ("fornax_batches_total", "count", "Batches executed, by the rows of their bucket."),
    (
        "fornax_batch_rows_total",
        "rows",
        "Rows of requests in them: divided by rows times batches, how full batches are.",
    ),
)
_REASONS = {
    "RESOURCE_EXHAUSTED": "REJECTED",
    "UNAVAILABLE": "REJECTED",
    "DEADLINE_EXCEEDED": "REJECTED",
    "INTERNAL": "BACKEND",
}
"""Triton's reasons by our codes; the rest is OTHER."""

Labels = Mapping[str, str]
Sample = tuple[Labels, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A metric with its samples."""

    name: str
    kind: str
    help: str
    samples: Sequence[Sample]

    def lines(self) -> Iterator[str]:
        """As Prometheus reads it."""
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} {self.kind}"
        for labels, value in self.samples:
            inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            yield f"{self.name}{{{inner}}} {_number(value)}" if inner else f"{self.name} {value}"


def models(seen: Sequence[ModelStatistics]) -> Iterator[Family]:
    """What Triton's metrics say of models, and the memory of each."""
    for name, kind, field, what in _OF_MODELS:
        yield Family(name, kind, what, [(_of(each), getattr(each, field)) for each in seen])
    yield Family(
        "nv_inference_request_failure",
        "counter",
        "Requests that got an error, by reason.",
        [
            ({**_of(each), "reason": reason}, count)
            for each in seen
            for reason, count in _reasons(each).items()
        ],
    )
    for name, (field, what) in _DURATIONS.items():
        what = f"{what}, in microseconds summed over requests answered."
        samples = [(_of(each), getattr(each, field) // 1000) for each in seen]
        yield Family(name, "counter", what, samples)


def _reasons(model: ModelStatistics) -> dict[str, int]:
    counts = {"REJECTED": 0, "CANCELED": model.cancel, "BACKEND": 0, "OTHER": 0}
    for code, count in model.reject.items():
        counts[_REASONS.get(code, "OTHER")] += count
    return counts


class Latencies:
    """Counts requests answered by their time; `finished` and `changed` are listeners."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._sums: dict[tuple[str, str], float] = {}

    def finished(self, request: InferRequest, outcome: Outcome) -> None:
        """A request has its answer or its error."""
        if not isinstance(outcome, InferResult) or not request.received:
            return
        seconds = time.monotonic() - request.received
        key = (request.model, outcome.version)
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = [0] * (len(_BOUNDS) + 1)
            self._sums[key] = 0.0
        counts[bisect_left(_BOUNDS, seconds)] += 1
        self._sums[key] += seconds

    def changed(self, change: StateChange) -> None:
        """A version that is gone is forgotten, as its other counters are."""
        if change.state == "UNAVAILABLE":
            self._counts.pop((change.name, change.version), None)
            self._sums.pop((change.name, change.version), None)

    def __iter__(self) -> Iterator[tuple[str, str, list[int], float]]:
        """Model, version, counts by bucket, seconds summed."""
        for (model, version), counts in list(self._counts.items()):
            yield model, version, counts, self._sums[model, version]


def latencies(seen: Latencies) -> Iterator[str]:
    """The lines of the histogram."""
    name = "fornax_request_duration_seconds"
    yield f"# HELP {name} Requests answered, from their last byte in to their answer."
    yield f"# TYPE {name} histogram"
    for model, version, counts, total in seen:
        inner = f'model="{_escaped(model)}",version="{_escaped(version)}"'
        running = 0
        for bound, count in zip([*_BOUNDS, float("inf")], counts, strict=True):
            running += count
            end = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'{name}_bucket{{{inner},le="{end}"}} {running}'
        yield f"{name}_sum{{{inner}}} {total!r}"
        yield f"{name}_count{{{inner}}} {running}"


def functions(seen: Sequence[ModelStatistics]) -> Iterator[Family]:
    """Of each function: padding, batches, errors, queues."""
    each_function = [
        ({**_of(model), "function": name}, stats)
        for model in seen
        for name, stats in model.functions.items()
    ]
    for name, kind, field, what in _OF_FUNCTIONS:
        samples = [(labels, getattr(stats, field)) for labels, stats in each_function]
        yield Family(name, kind, what, samples)
    buckets = [
        ({**labels, "rows": str(rows)}, batch)
        for labels, stats in each_function
        for rows, batch in sorted(stats.batches.items())
    ]
    for name, field, what in _OF_BUCKETS:
        samples = [(labels, getattr(batch, field)) for labels, batch in buckets]
        yield Family(name, "counter", what, samples)
    yield Family(
        "fornax_errors_total",
        "counter",
        "Requests that got an error, by code.",
        [
            ({**labels, "code": code}, count)
            for labels, stats in each_function
            for code, count in sorted(stats.reject.items())
        ],
    )


def shadows(seen: Sequence[Shadowing]) -> Iterator[Family]:
    """What shadow traffic has shown."""
    for field, what in (
        ("copied", "Requests copied to a shadow version."),
        ("compared", "Answers of it compared with those of the serving version."),
        ("differing", "Compared answers that differ by more than the tolerance."),
        ("failed", "Requests that the shadow version alone could not answer."),
        ("dropped", "Requests not copied, as too many copies were under way."),
    ):
        samples: list[Sample] = [
            ({"model": each.name, "version": str(each.shadow.version)}, each.counts[field])
            for each in seen
        ]
        yield Family(f"fornax_shadow_{field}_total", "counter", what, samples)


def device_memory(memory: "Memory") -> Iterator[Family]:
    """Of each device what its models may take, and what is set aside."""
    limits = memory.limits
    yield Family(
        "fornax_device_memory_limit_bytes",
        "gauge",
        "Memory that models may take.",
        [({"device": account}, limit) for account, limit in limits.items()],
    )
    yield Family(
        "fornax_device_memory_used_bytes",
        "gauge",
        "Memory set aside for models.",
        [({"device": account}, memory.used(account)) for account in limits],
    )


def machine() -> Iterator[Family]:
    """The machine's memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = (page * os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    yield Family("nv_cpu_memory_total_bytes", "gauge", "Memory of the machine.", [({}, total)])
    used = total - free
    yield Family("nv_cpu_memory_used_bytes", "gauge", "Memory in use on it.", [({}, used)])


def _of(model: ModelStatistics) -> dict[str, str]:
    return {"model": model.name, "version": model.version}


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
