"""The families of metrics that the models' counters become, and their text."""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fornax.serving.execution.counters import ModelStatistics
from fornax.serving.latencies import BOUNDS, Latencies

__all__ = ["Family", "batches", "device_memory", "latencies", "machine", "shadows", "triton"]

_DURATIONS = {
    "nv_inference_request_duration_us": ("request_ns", "Whole requests"),
    "nv_inference_queue_duration_us": ("queue_ns", "Requests waiting for a batch and a device"),
    "nv_inference_compute_input_duration_us": ("compute_input_ns", "Inputs padded and moved"),
    "nv_inference_compute_infer_duration_us": ("compute_infer_ns", "Programs executed"),
    "nv_inference_compute_output_duration_us": ("compute_output_ns", "Outputs fetched and cut"),
}
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


def triton(models: Sequence[ModelStatistics]) -> Iterator[Family]:
    """What Triton's metrics say of models."""
    yield Family(
        "nv_inference_request_success",
        "counter",
        "Requests answered.",
        [(_of(each), each.success) for each in models],
    )
    yield Family(
        "nv_inference_request_failure",
        "counter",
        "Requests that got an error, by reason.",
        [
            ({**_of(each), "reason": reason}, count)
            for each in models
            for reason, count in _reasons(each).items()
        ],
    )
    yield Family(
        "nv_inference_count",
        "counter",
        "Rows answered.",
        [(_of(each), each.inference_count) for each in models],
    )
    yield Family(
        "nv_inference_exec_count",
        "counter",
        "Batches executed.",
        [(_of(each), each.execution_count) for each in models],
    )
    for name, (field, what) in _DURATIONS.items():
        yield Family(
            name,
            "counter",
            f"{what}, in microseconds summed over requests answered.",
            [(_of(each), getattr(each, field) // 1000) for each in models],
        )
    yield Family(
        "nv_inference_pending_request_count",
        "gauge",
        "Requests that wait for a device.",
        [(_of(each), each.queued) for each in models],
    )


def _reasons(model: ModelStatistics) -> dict[str, int]:
    counts = {"REJECTED": 0, "CANCELED": model.cancel, "BACKEND": 0, "OTHER": 0}
    for code, count in model.reject.items():
        counts[_REASONS.get(code, "OTHER")] += count
    return counts


def latencies(seen: Latencies) -> Iterator[str]:
    """The lines of the histogram."""
    name = "fornax_request_duration_seconds"
    yield f"# HELP {name} Requests answered, from their last byte in to their answer."
    yield f"# TYPE {name} histogram"
    for model, version, counts, total in seen:
        inner = f'model="{_escaped(model)}",version="{_escaped(version)}"'
        running = 0
        for bound, count in zip([*BOUNDS, float("inf")], counts, strict=True):
            running += count
            end = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f'{name}_bucket{{{inner},le="{end}"}} {running}'
        yield f"{name}_sum{{{inner}}} {total!r}"
        yield f"{name}_count{{{inner}}} {running}"


def batches(models: Sequence[ModelStatistics]) -> Iterator[Family]:
    """Of each function: padding, batches, errors, queues."""
    functions = [
        ({**_of(each), "function": name}, stats)
        for each in models
        for name, stats in each.functions.items()
    ]
    counted = (
        ("fornax_rows_computed_total", "bucket_rows", "Rows computed, padding included."),
        ("fornax_rows_padding_total", "padded_rows", "Rows computed that nobody asked for."),
        ("fornax_elements_computed_total", "bucket_elements", "Elements of inputs computed."),
        (
            "fornax_elements_padding_total",
            "padded_elements",
            "Elements of inputs computed that nobody asked for: rows and ragged tails.",
        ),
    )
    for name, field, what in counted:
        samples = [(labels, getattr(stats, field)) for labels, stats in functions]
        yield Family(name, "counter", what, samples)
    buckets = [
        ({**labels, "rows": str(rows)}, batch)
        for labels, stats in functions
        for rows, batch in sorted(stats.batches.items())
    ]
    yield Family(
        "fornax_batches_total",
        "counter",
        "Batches executed, by the rows of their bucket.",
        [(labels, batch.count) for labels, batch in buckets],
    )
    yield Family(
        "fornax_batch_rows_total",
        "counter",
        "Rows of requests in them: divided by rows times batches, how full batches are.",
        [(labels, batch.rows) for labels, batch in buckets],
    )
    yield Family(
        "fornax_errors_total",
        "counter",
        "Requests that got an error, by code.",
        [
            ({**labels, "code": code}, count)
            for labels, stats in functions
            for code, count in sorted(stats.reject.items())
        ],
    )
    yield Family(
        "fornax_requests_running",
        "gauge",
        "Requests accepted and not answered yet.",
        [(labels, stats.pending) for labels, stats in functions],
    )
    yield Family(
        "fornax_queue_depth",
        "gauge",
        "Requests that wait for a device.",
        [(labels, stats.queued) for labels, stats in functions],
    )
    yield Family(
        "fornax_model_memory_bytes",
        "gauge",
        "Device memory set aside for a version.",
        [(_of(each), each.memory_bytes) for each in models],
    )


def shadows(reports: Sequence[Mapping[str, Any]]) -> Iterator[Family]:
    """What shadow traffic has shown."""
    for field, what in (
        ("copied", "Requests copied to a shadow version."),
        ("compared", "Answers of it compared with those of the serving version."),
        ("differing", "Compared answers that differ by more than the tolerance."),
        ("failed", "Requests that the shadow version alone could not answer."),
        ("dropped", "Requests not copied, as too many copies were under way."),
    ):
        samples: list[Sample] = [
            (
                {"model": report["name"], "version": report["shadow_version"]},
                report["requests"][field],
            )
            for report in reports
        ]
        yield Family(f"fornax_shadow_{field}_total", "counter", what, samples)


def device_memory(memory: Any) -> Iterator[Family]:
    """Of each device what its models may take, and what is set aside."""
    limits: Mapping[str, int] = memory.limits
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
