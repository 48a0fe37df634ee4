"""Reading a stream: the same whatever pieces it comes in, and every way it can go wrong."""

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from fornax.bench.connection import Exchange
from fornax.bench.openai.outcome import read_outcome


def stream(*events: object, end: str = "\n\n") -> bytes:
    data = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "".join(f"data: {event}{end}" for event in data).encode()


def text(*words: str) -> list[dict]:
    return [{"choices": [{"text": word}]} for word in words]


def outcome(body: bytes, status: int = 200):
    return read_outcome(Exchange(10.0, status, [(10.5, body)]), prompt_tokens=3)


BODY = stream(*text("é", "", "☃\n\n"), {"choices": [], "usage": {"completion_tokens": 5}}, "[DONE]")


@given(st.lists(st.integers(1, len(BODY) - 1), unique=True), st.booleans())
def test_pieces_do_not_matter(cuts, carriage_returns):
    body = BODY.replace(b"\n", b"\r\n") if carriage_returns else BODY
    edges = [0, *sorted(cuts), len(body)]
    pieces = [(10.0 + n, body[a:b]) for n, (a, b) in enumerate(itertools.pairwise(edges))]
    read = read_outcome(Exchange(10.0, 200, pieces), prompt_tokens=3)
    assert read.error == ""
    assert read.text == "é☃\n\n"
    assert (read.prompt_tokens, read.output_tokens, len(read.gaps)) == (3, 5, 2)
    assert read.latency == read.first_token + sum(read.gaps)
    assert read.latency <= pieces[-1][0] - 10.0


def test_a_token_counts_when_its_last_byte_came():
    event = stream(*text("a"))
    pieces = [(11.0, event[:9]), (12.0, event[9:] + stream(*text("b"))), (14.5, stream("[DONE]"))]
    read = read_outcome(Exchange(10.0, 200, pieces), prompt_tokens=1)
    assert (read.first_token, read.gaps, read.latency) == (2.0, [0.0], 2.0)


def test_without_usage_pieces_are_counted():
    assert outcome(stream(*text("a", "b"), "[DONE]")).output_tokens == 2


def test_comments_are_no_events():
    assert outcome(b": ping\n\n" + stream(*text("a"), "[DONE]")).error == ""


def test_chat_counts_content_reasoning_and_tool_calls():
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "a"},
        {"tool_calls": [{"index": 0}]},
    ]
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    events.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    read = outcome(stream(*events, "[DONE]"))
    assert (read.error, read.text, read.output_tokens) == ("", "hma", 3)


def test_an_error_in_the_stream_is_a_failure():
    read = outcome(stream(*text("a"), {"error": {"message": "engine died"}}, "[DONE]"))
    assert read.error == "engine died"


def test_a_stream_cut_short_is_a_failure():
    assert outcome(stream(*text("a"))).error == "the stream ended early"


def test_a_stream_without_tokens_is_a_failure():
    assert outcome(stream("[DONE]")).error == "the stream has no token"


def test_an_event_that_is_no_json_is_a_failure():
    assert "not JSON" in outcome(stream("{", "[DONE]")).error


def test_a_refusal_is_quoted():
    assert outcome(b'{"error": {"message": "too long"}}', 400).error == "status 400: too long"
    assert outcome(b"<html>", 502).error == "status 502: <html>"
