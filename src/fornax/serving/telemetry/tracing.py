"""Spans of a model server's requests: its wait, and its computation in parts."""

import time
from typing import TYPE_CHECKING

from fornax.config.tracing import Span, Spans, parse_traceparent
from fornax.serving.events import Outcome
from fornax.serving.types import InferRequest, InferResult, Timing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["Tracer"]

_PARTS = ("queue", "compute_input", "compute_infer", "compute_output")


class Tracer:
    """Makes spans and sends them; `finished` is a listener of `Events`."""

    def __init__(
        self, *, endpoint: str = "", sample_rate: float, exporter: "SpanExporter | None" = None
    ):
        """See `fornax.config.tracing.Spans`. Raises ConfigError without OpenTelemetry."""
        self._spans = Spans(
            "fornax.serving", endpoint=endpoint, sample_rate=sample_rate, exporter=exporter
        )

    def finished(self, request: InferRequest, outcome: Outcome) -> None:
        """Make the spans of a request, if its caller samples it, or chance does."""
        parent = parse_traceparent(request.trace) if request.trace else None
        if not self._spans.samples(parent):
            return
        now = time.time_ns()
        took = round((time.monotonic() - request.received) * 1e9) if request.received else 0
        answered = isinstance(outcome, InferResult)
        source = outcome if isinstance(outcome, InferResult) else request
        span = Span(
            name=f"infer {request.model}",
            start=now - took,
            end=now,
            attributes={
                "fornax.model": request.model,
                "fornax.version": source.version,
                "fornax.function": source.function,
                "fornax.id": request.id,
                "fornax.request_id": request.request_id,
            },
            children=(
                _parts(outcome.timing, now - took) if isinstance(outcome, InferResult) else ()
            ),
            error="" if answered else str(outcome) or type(outcome).__name__,
        )
        self._spans.add(span, parent)

    def close(self) -> None:
        """Send what waits."""
        self._spans.close()


def _parts(timing: Timing, start: int) -> list[Span]:
    parts = []
    for name in _PARTS:
        end = start + getattr(timing, name)
        parts.append(Span(name=name, start=start, end=end))
        start = end
    return parts
