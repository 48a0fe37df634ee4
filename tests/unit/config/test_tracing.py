"""Trace contexts are read as W3C writes them, and spans stand inside each other."""

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fornax.config.tracing import Span, Spans, parse_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (f"00-{TRACE}-{SPAN}-01", (int(TRACE, 16), int(SPAN, 16), True)),
        (f"00-{TRACE}-{SPAN}-00", (int(TRACE, 16), int(SPAN, 16), False)),
        (f"01-{TRACE}-{SPAN}-01-more", (int(TRACE, 16), int(SPAN, 16), True)),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        ("nonsense", None),
        (None, None),
    ],
)
def test_traceparent_is_read_as_w3c_writes_it(text, parsed):
    assert parse_traceparent(text) == parsed
    if text is not None:
        assert parse_traceparent(text.encode()) == parsed


def test_spans_stand_inside_each_other_and_say_what_failed():
    exporter = InMemorySpanExporter()
    spans = Spans("test", sample_rate=0.0, exporter=exporter)
    inner = Span(name="inner", start=2, end=3)
    middle = Span(name="middle", start=2, end=4, children=[inner])
    attributes = {"said": "x", "empty": "", "none": 0}
    whole = Span(
        name="whole", start=1, end=5, attributes=attributes, children=[middle], error="no room"
    )
    spans.add(whole, parse_traceparent(f"00-{TRACE}-{SPAN}-01"))
    spans.close()
    found = {span.name: span for span in exporter.get_finished_spans()}
    assert {span.context.trace_id for span in found.values()} == {int(TRACE, 16)}
    assert found["whole"].parent.span_id == int(SPAN, 16)
    assert found["middle"].parent.span_id == found["whole"].context.span_id
    assert found["inner"].parent.span_id == found["middle"].context.span_id
    assert dict(found["whole"].attributes) == {"said": "x"}
    assert (found["whole"].start_time, found["whole"].end_time) == (1, 5)
    assert found["whole"].status.description == "no room"
    assert found["middle"].status.is_unset


def test_callers_decide_and_chance_decides_for_the_rest():
    exporter = InMemorySpanExporter()
    for rate in (0.0, 1.0):
        spans = Spans("test", sample_rate=rate, exporter=exporter)
        assert spans.samples(parse_traceparent(f"00-{TRACE}-{SPAN}-01"))
        assert not spans.samples(parse_traceparent(f"00-{TRACE}-{SPAN}-00"))
        assert spans.samples(None) == bool(rate)
        spans.close()
