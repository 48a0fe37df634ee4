"""OpenTelemetry spans of requests, made when a request is over from the times it took.

Nothing is done while a request runs: servers keep the caller's `traceparent` header with the
request. Who is not sampled costs one comparison; for others a thread makes the spans, which takes
a fifth of a millisecond a request. Needs the extra `otel`.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from fornax import __version__
from fornax.config.background import BackgroundQueue
from fornax.config.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import IdGenerator
    from opentelemetry.sdk.trace.export import SpanExporter

__all__ = ["Parent", "Span", "Spans", "TraceContext", "parse_traceparent"]

Parent = tuple[int, int, bool]
"""The caller's trace and span, and whether it samples."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SEND_SECONDS = 3
"""How long a collector may take, retries included; at the end no longer is waited for it."""


def parse_traceparent(text: object) -> Parent | None:
    """Trace, span and whether the caller samples, of a W3C `traceparent`; None for anything else.

    See https://www.w3.org/TR/trace-context/.
    """
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    match = _TRACEPARENT.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace, span = int(match[2], 16), int(match[3], 16)
    return (trace, span, bool(int(match[4], 16) & 1)) if trace and span else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """The ids of a span that is made later, for servers whose spans stand inside it."""

    trace: int
    span: int
    sampled: bool
    parent: Parent | None
    """The caller's, as `parse_traceparent` reads it."""

    @property
    def traceparent(self) -> str:
        """The W3C header that tells another server of this span."""
        return f"00-{self.trace:032x}-{self.span:016x}-{self.sampled:02x}"


@dataclass(slots=True, kw_only=True)
class Span:
    """A part of a request's time. Times are nanoseconds since 1970."""

    name: str
    start: int
    end: int
    attributes: Mapping[str, str | int] = field(default_factory=dict)
    """Those that are empty or 0 are left out."""
    children: Sequence["Span"] = ()
    error: str = ""
    """Why it failed; empty: it did not."""


class Spans:
    """Makes spans and sends them."""

    def __init__(
        self,
        scope: str,
        *,
        endpoint: str = "",
        sample_rate: float,
        exporter: "SpanExporter | None" = None,
    ):
        """Send to the OTLP collector at `endpoint`, or to an exporter of OpenTelemetry's.

        Args:
          scope: what makes the spans, such as `fornax.serving`.
          endpoint: a collector's address over HTTP.
          sample_rate: share of the requests without a caller that decides.
          exporter: instead of `endpoint`.

        Raises:
          ConfigError: where OpenTelemetry is not installed.
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
        self._ids = _Ids()
        ids = cast("IdGenerator", self._ids)
        self._provider = TracerProvider(resource=resource, id_generator=ids)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(scope, __version__)
        self._rate = sample_rate
        self._queue = BackgroundQueue(self._make_all, "fornax-traces")

    def samples(self, parent: Parent | None) -> bool:
        """Whether to trace a request: as its caller says, or else by chance."""
        return parent[2] if parent else random.random() < self._rate

    def begin(self, parent: Parent | None) -> TraceContext:
        """The ids of a request's span, and whether it is traced, to be passed on before it ends."""
        return TraceContext(
            trace=parent[0] if parent else random.randrange(1, 1 << 128),
            span=random.randrange(1, 1 << 64),
            sampled=self.samples(parent),
            parent=parent,
        )

    def add(self, span: Span, context: Parent | TraceContext | None) -> None:
        """Send a request's span and those inside it, soon; its ids are those of `begin`, or new
        ones below a caller's."""
        self._queue.add((span, context))

    def close(self) -> None:
        """Send what waits."""
        self._queue.close()
        self._provider.shutdown()

    def _make_all(self, spans: Sequence[tuple[Span, Parent | TraceContext | None]]) -> None:
        for span, context in spans:
            if isinstance(context, TraceContext):
                self._ids.begun, context = context, context.parent
            self._make(span, _context(context), root=True)

    def _make(self, span: Span, context: "Context", *, root: bool = False) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        made = self._tracer.start_span(
            span.name,
            context=context,
            kind=SpanKind.SERVER if root else SpanKind.INTERNAL,
            start_time=span.start,
            attributes={name: value for name, value in span.attributes.items() if value},
        )
        if span.children:
            inside = set_span_in_context(made)
            for child in span.children:
                self._make(child, inside)
        if span.error:
            made.set_status(Status(StatusCode.ERROR, span.error))
        made.end(span.end)


class _Ids:
    """OpenTelemetry's `IdGenerator`: the ids of the span that `begin` gave, then random ones."""

    def __init__(self) -> None:
        self.begun: TraceContext | None = None

    def generate_trace_id(self) -> int:
        """Of a span without a parent, asked for before `generate_span_id`."""
        return self.begun.trace if self.begun else random.randrange(1, 1 << 128)

    def generate_span_id(self) -> int:
        """The span's, then those of the spans inside it."""
        begun, self.begun = self.begun, None
        return begun.span if begun else random.randrange(1, 1 << 64)

    def is_trace_id_random(self) -> bool:
        """So that samplers behind may count on it."""
        return True


def _context(parent: Parent | None) -> "Context":
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
