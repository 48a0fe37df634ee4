"""Spans of a router's requests, which the spans of the replicas stand inside."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fornax.config.tracing import Span, Spans, TraceContext, parse_traceparent

__all__ = ["HEADER", "RequestTrace", "begin_trace"]

HEADER = "traceparent"


@dataclass(slots=True, kw_only=True)
class RequestTrace:
    """A request from its arrival on. Of one that is not sampled no span is made, and the replica,
    told by the header, makes none either: the decision is made once."""

    spans: Spans
    context: TraceContext
    started: int = field(default_factory=time.time_ns)

    def end(
        self,
        request_id: str,
        replica: int | None,
        attributes: Mapping[str, str | int],
        error: str,
    ) -> None:
        """Make its span.

        Args:
          replica: the one whose response it got.
          attributes: of its protocol.
          error: why it failed; empty: it did not.
        """
        if not self.context.sampled:
            return
        known = {} if replica is None else {"fornax.replica": str(replica)}
        span = Span(
            name="route",
            start=self.started,
            end=time.time_ns(),
            attributes={**attributes, **known, "fornax.request_id": request_id},
            error=error,
        )
        self.spans.add(span, self.context)


def begin_trace(spans: Spans, headers: Iterable[tuple[str, str | bytes]]) -> RequestTrace:
    """Begin the trace of a request with these headers or metadata: its caller's, or a new one."""
    given = next((value for name, value in headers if name == HEADER), None)
    return RequestTrace(spans=spans, context=spans.begin(parse_traceparent(given)))
