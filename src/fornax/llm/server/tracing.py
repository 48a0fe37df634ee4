"""Spans of a language model's requests: each generation's wait, prefill and decoding."""

import time
from collections.abc import Iterator

from fornax.config.tracing import Span, Spans, parse_traceparent
from fornax.llm.server.middleware import RequestContext
from fornax.llm.stats import RequestStats

__all__ = ["RequestTracer"]


class RequestTracer:
    """Joins what the engine says of generations with the HTTP requests that asked for them."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._open: dict[str, RequestContext] = {}
        """By the engine's id of a generation, until it ends or its request does."""

    def began(self, engine_id: str, context: RequestContext) -> None:
        """A request asks the engine for a generation of this id."""
        context.generations[engine_id] = None
        self._open[engine_id] = context

    def ended(self, stats: RequestStats) -> None:
        """A generation ended; called in the engine's thread, before its last output is out."""
        context = self._open.pop(stats.request_id, None)
        if context is not None:
            context.generations[stats.request_id] = stats

    def request(self, context: RequestContext) -> None:
        """An HTTP request ended: make its spans, if its caller samples it, or chance does. One that
        a client left has no spans of generations that the engine has not ended yet."""
        for engine_id in context.generations:
            self._open.pop(engine_id, None)
        if context.method != "POST" or not context.path.startswith("/v1/"):
            return
        parent = parse_traceparent(context.traceparent)
        if self._spans.samples(parent):
            self._spans.add(_of_request(context), parent)

    def close(self) -> None:
        """Send what waits."""
        self._spans.close()


def _of_request(context: RequestContext) -> Span:
    offset = time.time_ns() - time.monotonic_ns()
    ended = [stats for stats in context.generations.values() if stats is not None]
    error = str(context.log_fields.get("error") or f"status {context.status}")
    return Span(
        name=f"POST {context.handler}",
        start=_at(context.started, offset),
        end=time.time_ns(),
        attributes={
            "http.request.method": context.method,
            "http.route": context.handler,
            "http.response.status_code": context.status,
            "gen_ai.request.model": str(context.log_fields.get("model") or ""),
            "fornax.request_id": context.id,
        },
        children=[_of_generation(stats, offset) for stats in ended],
        error=error if context.status >= 400 else "",
    )


def _of_generation(stats: RequestStats, offset: int) -> Span:
    return Span(
        name="generate",
        start=_at(stats.arrival, offset),
        end=_at(stats.finished, offset),
        attributes={
            "fornax.engine_id": stats.request_id,
            "gen_ai.usage.input_tokens": stats.prompt_tokens,
            "gen_ai.usage.output_tokens": stats.generation_tokens,
            "fornax.cached_tokens": stats.cached_tokens,
            "gen_ai.response.finish_reasons": ",".join(stats.finish_reasons),
        },
        children=list(_parts(stats, offset)),
    )


def _parts(stats: RequestStats, offset: int) -> Iterator[Span]:
    """The parts of a generation that it came to; each ends where the next begins."""
    ends = [
        ("queue", stats.scheduled),
        ("prefill", stats.first_token),
        ("decode", stats.finished),
    ]
    begin = stats.arrival
    for name, reached in ends:
        end = reached or stats.finished
        yield Span(name=name, start=_at(begin, offset), end=_at(end, offset))
        if not reached:
            return
        begin = end


def _at(monotonic: float, offset: int) -> int:
    """Nanoseconds since 1970 of a time by `time.monotonic()`."""
    return round(monotonic * 1e9) + offset
