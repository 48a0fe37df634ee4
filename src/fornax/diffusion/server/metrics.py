"""What `/metrics` shows of a server of images; the engine's observer."""

import time
from collections.abc import Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
)
from prometheus_client.exposition import choose_encoder

from fornax.diffusion.server.engine import Observer
from fornax.llm.server.middleware import RequestContext

__all__ = ["Metrics"]

_SECONDS = [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0]
_STEP = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]
_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


class Metrics(Observer):
    """Metrics of the engine and of HTTP, in a registry of their own."""

    def __init__(self, model: str) -> None:
        """`model` is the label `model_name`."""
        self._registry = CollectorRegistry()
        self._model = model
        self._waiting = self._gauge("fornax:num_requests_waiting", "Requests without a slot.")
        self._running = self._gauge("fornax:num_images_running", "Images in slots.")
        self._steps = self._counter("fornax:steps", "Steps of the denoiser.")
        self._rows = self._counter("fornax:step_rows", "Rows of those steps that drew an image.")
        self._padding = self._counter("fornax:step_padding_rows", "Rows of those that drew none.")
        self._requests = Counter(
            "fornax:requests",
            "Requests by how they ended.",
            ["model_name", "outcome"],
            registry=self._registry,
        )
        self._step_seconds = self._histogram("fornax:step_seconds", "Time of a step.", _STEP)
        self._seconds = self._histogram("fornax:request_seconds", "Arrival to end.", _SECONDS)
        self._queued = self._histogram("fornax:queue_seconds", "Arrival to a slot.", _SECONDS)
        self._http_requests = Counter(
            "http_requests", "Requests.", ["handler", "method", "status"], registry=self._registry
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "Time of a request.",
            ["handler", "method"],
            registry=self._registry,
        )
        ProcessCollector(registry=self._registry)
        self._before: dict[str, float] = {}

    def step(self, rows: int, width: int, seconds: float) -> None:
        """A step of the engine."""
        self._steps.inc()
        self._rows.inc(rows)
        self._padding.inc(width - rows)
        self._step_seconds.observe(seconds)

    def waiting(self, requests: int, rows: int) -> None:
        """What waits and what runs."""
        self._waiting.set(requests)
        self._running.set(rows)

    def finished(self, outcome: str, seconds: float, queued: float) -> None:
        """A request ended."""
        self._requests.labels(self._model, outcome).inc()
        self._seconds.observe(seconds)
        self._queued.observe(queued)

    def idle(self) -> None:
        """Nothing runs or waits."""
        self.waiting(0, 0)

    def request(self, context: RequestContext) -> None:
        """An HTTP request ended."""
        method = context.method if context.method in _METHODS else "other"
        status = f"{context.status // 100}xx"
        self._http_requests.labels(context.handler, method, status).inc()
        seconds = time.monotonic() - context.started
        self._http_seconds.labels(context.handler, method).observe(seconds)

    def exposition(self) -> tuple[bytes, str]:
        """The text and its content type."""
        encode, kind = choose_encoder("")
        return encode(self._registry), kind

    def row(self, seconds: float) -> Mapping[str, object]:
        """What `server.jsonl` has of the seconds since the last call."""
        now = {
            sample.name: sample.value
            for family in self._registry.collect()
            for sample in family.samples
            if sample.labels.keys() == {"model_name"}
        }
        spent = {name: value - self._before.get(name, 0.0) for name, value in now.items()}
        self._before = now
        ended = spent["fornax:request_seconds_count"]
        rows, padding = spent["fornax:step_rows_total"], spent["fornax:step_padding_rows_total"]
        return {
            "running": now["fornax:num_images_running"],
            "waiting": now["fornax:num_requests_waiting"],
            "requests": now["fornax:request_seconds_count"],
            "requests_per_second": round(ended / max(seconds, 1e-3), 3),
            "steps_per_second": round(spent["fornax:steps_total"] / max(seconds, 1e-3), 3),
            "batch_fill": round(rows / (rows + padding), 4) if rows + padding else None,
            "request_seconds": _mean(spent["fornax:request_seconds_sum"], ended),
            "queue_seconds": _mean(spent["fornax:queue_seconds_sum"], ended),
        }

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["model_name"], registry=self._registry).labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, text: str, bounds: list[float]) -> Histogram:
        made = Histogram(name, text, ["model_name"], buckets=bounds, registry=self._registry)
        return made.labels(self._model)


def _mean(total: float, count: float) -> float | None:
    return round(total / count, 6) if count else None
