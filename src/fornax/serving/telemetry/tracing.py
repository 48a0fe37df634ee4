"""OpenTelemetry spans of requests, made when a request is over from the times it took.

Nothing is done while a request runs: the protocols keep the caller's `traceparent` header with the
request. Who is not sampled costs one comparison; for others a thread makes the spans, which takes
a fifth of a millisecond a request. Needs the extra `otel`.
"""

import dataclasses
import random
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fornax import __version__
from fornax.config import ConfigError
from fornax.serving.events import BackgroundQueue, Outcome
from fornax.serving.types import InferRequest, InferResult, Timing

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["Tracer", "parse_traceparent"]

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_PARTS = ("queue", "compute_input", "compute_infer", "compute_output")
_SEND_SECONDS = 3
"""How long a collector may take, retries included; at the end no longer is waited for it."""


def parse_traceparent(text: object) -> tuple[int, int, bool] | None:
    """Trace, span and whether the caller samples, of a W3C `traceparent`; None for anything else.

    See https://www.w3.org/TR/trace-context/.
    """
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    match = _PARENT.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace, span = int(match[2], 16), int(match[3], 16)
    return (trace, span, bool(int(match[4], 16) & 1)) if trace and span else None


@dataclasses.dataclass(slots=True)
class _Request:
    """What the spans of a request are made of. Times in nanoseconds."""

    name: str
    parent: tuple[int, int, bool] | None
    start: int
    end: int
    attributes: dict[str, str]
    timing: Timing | None
    error: str


class Tracer:
    """Makes spans and sends them; `finished` is a listener of `Events`."""

    def __init__(
        self, *, endpoint: str = "", sample_rate: float, exporter: "SpanExporter | None" = None
    ):
        """Send to the OTLP collector at `endpoint`, or to an exporter of OpenTelemetry's.

        Raises ConfigError where OpenTelemetry is not installed.
        """
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_SEND_SECONDS)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{error.name} is not installed; traces need pip install 'fornax-ai[otel]'"
            ) from error
        resource = Resource.create({"service.name": "fornax", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("fornax.serving", __version__)
        self._rate = sample_rate
        self._queue = BackgroundQueue(self._make_all, "fornax-traces")

    def finished(self, request: InferRequest, outcome: Outcome) -> None:
        """Make the spans of a request, if its caller samples it, or chance does."""
        parent = parse_traceparent(request.trace) if request.trace else None
        sampled = parent[2] if parent else random.random() < self._rate
        if not sampled:
            return
        now = time.time_ns()
        took = round((time.monotonic() - request.received) * 1e9) if request.received else 0
        answered = isinstance(outcome, InferResult)
        source = outcome if isinstance(outcome, InferResult) else request
        self._queue.add(
            _Request(
                name=f"infer {request.model}",
                parent=parent,
                start=now - took,
                end=now,
                attributes={
                    "fornax.model": request.model,
                    "fornax.version": source.version,
                    "fornax.function": source.function,
                    "fornax.request_id": request.id,
                },
                timing=outcome.timing if isinstance(outcome, InferResult) else None,
                error="" if answered else str(outcome) or type(outcome).__name__,
            )
        )

    def close(self) -> None:
        """Send what waits."""
        self._queue.close()
        self._provider.shutdown()

    def _make_all(self, requests: Sequence[_Request]) -> None:
        for request in requests:
            self._make(request)

    def _make(self, request: _Request) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        span = self._tracer.start_span(
            request.name,
            context=_context(request.parent),
            kind=SpanKind.SERVER,
            start_time=request.start,
            attributes={name: value for name, value in request.attributes.items() if value},
        )
        if request.timing is not None:
            at, inside = request.start, set_span_in_context(span)
            for part in _PARTS:
                nanoseconds = getattr(request.timing, part)
                child = self._tracer.start_span(part, context=inside, start_time=at)
                at += nanoseconds
                child.end(at)
        else:
            span.set_status(Status(StatusCode.ERROR, request.error))
        span.end(request.end)


def _context(parent: tuple[int, int, bool] | None) -> "Context":
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        set_span_in_context,
    )

    if parent is None:
        return Context()
    trace, span, _ = parent
    caller = SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(caller), Context())
