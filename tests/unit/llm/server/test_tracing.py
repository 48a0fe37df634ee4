"""A request's spans: queue, prefill and decode of each generation inside the HTTP request."""

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fornax.config import ConfigError
from fornax.config.tracing import Spans
from fornax.llm.server import ServerConfig
from fornax.llm.server.tracing import RequestTracer

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": "r-1"}
BODY = {"model": "m", "prompt": "hello world", "max_tokens": 4}


class Collector:
    """An app that traces, and its spans."""

    def __init__(self, app, rate: float = 0.0):
        self.app, self.exporter = app, InMemorySpanExporter()
        app.metrics.tracer = RequestTracer(Spans("test", sample_rate=rate, exporter=self.exporter))

    def spans(self):
        """All that were made; ends the tracing."""
        self.app.metrics.close()
        return list(self.exporter.get_finished_spans())


def test_a_sampled_callers_request_has_its_way_in_spans(app):
    traced = Collector(app)
    assert app.post("/v1/completions", BODY, headers=SAMPLED).status_code == 200
    found = {span.name: span for span in traced.spans()}
    assert set(found) == {"POST /v1/completions", "generate", "queue", "prefill", "decode"}
    root, whole = found["POST /v1/completions"], found["generate"]
    assert (root.context.trace_id, root.parent.span_id) == (int(TRACE, 16), int(SPAN, 16))
    assert root.attributes["fornax.request_id"] == "r-1"
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["gen_ai.request.model"] == "m"
    assert whole.parent.span_id == root.context.span_id
    assert whole.attributes["gen_ai.usage.output_tokens"] == 4
    assert whole.attributes["fornax.engine_id"].startswith("cmpl-r-1-")
    parts = [found[name] for name in ("queue", "prefill", "decode")]
    assert all(part.parent.span_id == whole.context.span_id for part in parts)
    times = [whole.start_time, *(part.end_time for part in parts)]
    assert [part.start_time for part in parts] == times[:-1]
    assert times == sorted(times)
    assert times[-1] == whole.end_time
    assert root.start_time <= whole.start_time <= whole.end_time <= root.end_time


def test_each_prompt_is_a_generation_and_a_stream_is_traced_too(app):
    traced = Collector(app, rate=1.0)
    body = {**BODY, "prompt": ["hello", "world"]}
    assert app.post("/v1/completions", body).status_code == 200
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    assert app.post("/v1/chat/completions", chat).status_code == 200
    spans = traced.spans()
    names = [span.name for span in spans]
    assert names.count("generate") == 3
    roots = [span for span in spans if span.parent is None]
    assert {span.name for span in roots} == {"POST /v1/completions", "POST /v1/chat/completions"}
    assert len({span.context.trace_id for span in spans}) == 2


def test_a_refused_request_has_its_status_and_what_is_no_request_has_no_span(app):
    traced = Collector(app, rate=1.0)
    assert app.post("/v1/completions", {**BODY, "model": "other"}).status_code == 404
    assert app.get("/v1/models").status_code == 200
    assert app.get("/health").status_code == 200
    [span] = traced.spans()
    assert span.attributes["http.response.status_code"] == 404
    assert span.status.description == "status 404"


def test_who_is_not_sampled_leaves_nothing_behind(app):
    traced = Collector(app)
    unsampled = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
    for headers in (unsampled, {}, {"traceparent": "nonsense"}):
        assert app.post("/v1/completions", BODY, headers=headers).status_code == 200
    assert app.post("/v1/completions", {**BODY, "max_tokens": 10**6}).status_code == 400
    assert traced.spans() == []
    assert app.metrics.tracer._open == {}


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan")])
def test_a_rate_that_is_no_share_is_refused(rate):
    with pytest.raises(ConfigError, match="is not between 0 and 1"):
        ServerConfig(trace_sample_rate=rate)
