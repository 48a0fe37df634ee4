"""Spans of the router: what a collector gets, and what replicas receive of the trace."""

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.integration.local_http import Handler, serving
from tests.unit.cluster.routing.conftest import piece, reply, routed, start
from tests.unit.cluster.routing.test_grpc_proxy import Routed, Stream, X

from fornax.config.tracing import Spans
from fornax.serving.config import HostConfig
from fornax.serving.grpc.client import infer_message
from fornax.serving.grpc.methods import METHODS

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-01", "x-request-id": "mine"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-00"}
Message: Any = ExportTraceServiceRequest


class Collector:
    """Where it listens, and the spans that it was sent."""

    def __init__(self, url: str, messages: list[Any]):
        self.url = url
        self._messages = messages

    def spans(self) -> list[Any]:
        return [
            span
            for message in self._messages
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def one(self) -> Any:
        [span] = self.spans()
        return span


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    # A collector on a busy machine may be slow, and what is sent again would come twice.
    monkeypatch.setattr("fornax.config.tracing._SEND_SECONDS", 240.0)
    messages: list[Any] = []

    class Server(Handler):
        def answer(self, body: bytes) -> None:
            assert self.path == "/v1/traces"
            messages.append(Message.FromString(body))
            self.send(200, b"", "application/x-protobuf")

    with serving(Server) as address:
        yield Collector(f"{address}/v1/traces", messages)


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(600):
            await test

    asyncio.run(bounded())


def attributes(span: Any) -> dict[str, Any]:
    values = {each.key: each.value for each in span.attributes}
    return {key: value.string_value or value.int_value for key, value in values.items()}


def passed_on(given: Any) -> tuple[str, str, str]:
    """Trace, span and flags of a `traceparent`."""
    found = re.fullmatch("00-([0-9a-f]{32})-([0-9a-f]{16})-(0[01])", given)
    assert found is not None, given
    return found[1], found[2], found[3]


async def fine(upstream, request, send):
    await reply(send, body=b"{}", content_type="application/json")


async def full(upstream, request, send):
    await reply(send, 503)


def test_a_sampled_callers_request_is_a_span_and_replicas_stand_inside_it(tmp_path, collector):
    async def test():
        options = {"otlp_traces_endpoint": collector.url, "trace_sample_rate": 0.0}
        async with routed(tmp_path, full, fine, **options) as router:
            asked = await router.client.post("/v1/completions", json={}, headers=SAMPLED)
            assert asked.status_code == 200
            told = [each.headers["traceparent"] for up in router.upstreams for each in up.seen]
            names = [each.headers["x-request-id"] for up in router.upstreams for each in up.seen]
            assert set(names) == {"mine"}
            [given] = set(told)  # each of those asked
            seen.append(given)

    seen: list[str] = []
    run(test())
    span = collector.one()
    assert passed_on(seen[0]) == (TRACE, span.span_id.hex(), "01")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, CALLER)
    assert span.name == "route"
    assert span.start_time_unix_nano < span.end_time_unix_nano
    assert not span.status.code
    assert attributes(span) == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "fornax.replica": "1",
        "fornax.request_id": "mine",
    }


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_the_router_decides_for_replicas_where_no_caller_did(tmp_path, collector, rate):
    async def test():
        options = {"otlp_traces_endpoint": collector.url, "trace_sample_rate": rate}
        async with routed(tmp_path, fine, **options) as router:
            for headers in ({}, {"traceparent": "nonsense"}, UNSAMPLED):
                await router.client.post("/v1/completions", json={}, headers=headers)
            await router.client.get("/v1/models", headers=SAMPLED)
            *traced, models = (each.headers["traceparent"] for each in router.upstreams[0].seen)
            assert models == SAMPLED["traceparent"]  # what is not traced is passed on
            seen.extend(map(passed_on, traced))

    seen: list[tuple[str, str, str]] = []
    run(test())
    flag = f"0{rate:.0f}"
    assert [flags for *_, flags in seen] == [flag, flag, "00"]
    assert seen[2][0] == TRACE
    assert len({trace for trace, *_ in seen}) == 3
    made = [(each.trace_id.hex(), each.span_id.hex()) for each in collector.spans()]
    assert sorted(made) == sorted((trace, span) for trace, span, flags in seen if flags == "01")
    assert not any(each.parent_span_id for each in collector.spans())


def test_a_router_without_a_collector_passes_the_callers_trace_on(tmp_path):
    async def test():
        async with routed(tmp_path, fine) as router:
            await router.client.post("/v1/completions", json={}, headers=SAMPLED)
            [seen] = router.upstreams[0].seen
            assert seen.headers["traceparent"] == SAMPLED["traceparent"]

    run(test())


def test_a_stream_that_breaks_off_says_so_in_its_span(tmp_path, collector):
    async def breaks(upstream, request, send):
        await start(send)
        await piece(send, b"data: {}\n\n")
        raise RuntimeError("this replica ends here")

    async def test():
        options = {"otlp_traces_endpoint": collector.url}
        async with routed(tmp_path, breaks, **options) as router:
            found = await router.client.post("/v1/completions", json={}, headers=SAMPLED)
            assert found.status_code == 200

    run(test())
    assert collector.one().status.message.startswith("replica 0 ended while it answered")


def test_inferences_of_host_are_traced_over_http(tmp_path, collector):
    (tmp_path / "models").mkdir()
    host = HostConfig(
        repository=tmp_path / "models",
        http="127.0.0.1:0",
        grpc="127.0.0.1:0",
        trace_endpoint=collector.url,
    )

    async def test():
        async with routed(tmp_path, fine, host=host) as router:
            path = "/v2/models/m/versions/1/infer"
            await router.client.post(path, json={}, headers=SAMPLED)
            await router.client.post("/v2/models/m/ready", json={}, headers=SAMPLED)
            first, second = (each.headers["traceparent"] for each in router.upstreams[0].seen)
            assert passed_on(first)[1] != CALLER
            assert second == SAMPLED["traceparent"]

    run(test())
    assert attributes(collector.one())["url.path"] == "/v2/models/m/versions/1/infer"


def infer(model: str) -> Callable[[grpc.Channel], Any]:
    data = infer_message(model, X).SerializeToString()
    path = METHODS["ModelInfer"].path
    return lambda channel: channel.unary_unary(path).future(data, metadata=tuple(SAMPLED.items()))


def test_calls_over_grpc_are_traced(collector):
    spans = Spans("test", endpoint=collector.url, sample_rate=1.0)
    router = Routed(upstreams=1, spans=spans)
    [upstream] = router.upstreams
    with grpc.insecure_channel(router.address) as channel:
        assert infer("echo")(channel).code() is grpc.StatusCode.OK
        assert infer("nobody")(channel).code() is grpc.StatusCode.NOT_FOUND
    with Stream(router.address) as stream:
        stream.send("echo")
        stream.send("echo")
        stream.read()
        stream.read()
        assert stream.end() == []
    told = [passed_on(each.trace) for each in upstream.host.requests]
    router.close()
    spans.close()
    good, bad, streamed = collector.spans()
    assert told[0] == (TRACE, good.span_id.hex(), "01")
    assert {each.parent_span_id.hex() for each in (good, bad)} == {CALLER}
    assert attributes(good) == {
        "rpc.system": "grpc",
        "rpc.method": "ModelInfer",
        "rpc.grpc.status": "OK",
        "fornax.replica": "0",
        "fornax.request_id": "mine",
    }
    assert "no model 'nobody'" in bad.status.message
    whole = streamed.trace_id.hex(), streamed.span_id.hex(), "01"
    assert told[1:] == [whole, whole]  # the requests of a stream belong to it
    assert attributes(streamed)["rpc.method"] == "ModelStreamInfer"
