"""What the server tells of itself: metrics, the log, spans, profiles, an entry's counts."""

import asyncio
import json
import logging
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fornax.config import EngineError, ServingCode, ServingError
from fornax.serving.backend import Backend
from fornax.serving.backends import BackendModel
from fornax.serving.events import Events, StateChange
from fornax.serving.execution.devices import Memory
from fornax.serving.statistics import BatchCount, ModelStatistics
from fornax.serving.telemetry.logs import AccessLog, StateLog, _JsonLines
from fornax.serving.telemetry.metrics import Metrics
from fornax.serving.telemetry.profile import Profiler
from fornax.serving.telemetry.tracing import Tracer
from fornax.serving.types import IndexEntry, InferRequest, InferResult, Timing

MEMORY = Memory({"cpu": 10_000})
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def _request(**fields):
    inputs = {"ids": np.zeros((4, 2), np.int32)}
    started = time.monotonic() - 0.01
    return InferRequest("ranker", inputs, id="mine", received=started, request_id="r-1", **fields)


def _result():
    timing = Timing(
        queue=2_000_000, compute_input=1000, compute_infer=3_000_000, compute_output=500
    )
    return InferResult("ranker", "3", "predict", "r-1", {}, timing)


class _Host:
    backends: ClassVar[dict[str, Backend]] = {}

    def __init__(self):
        self.events = Events()

    def statistics(self, name="", version=""):
        function = ModelStatistics(
            name="predict",
            success=7,
            failure=4,
            cancel=1,
            reject={"RESOURCE_EXHAUSTED": 3, "INVALID_ARGUMENT": 1},
            inference_count=20,
            execution_count=5,
            request_ns=9_000_000,
            queue_ns=4_000_000,
            compute_infer_ns=2_500_999,
            padded_rows=20,
            bucket_rows=40,
            batches={8: BatchCount(count=5, rows=20)},
            queued=2,
            pending=6,
        )
        model = ModelStatistics(name='ran"ker', version="3", memory_bytes=1234)
        model.add(function)
        model.compilations_after_ready = 2
        return [model]

    def index(self, ready_only=False):
        return [IndexEntry('ran"ker', "3", "READY"), IndexEntry("other", "1", "UNAVAILABLE", "why")]

    def shadows(self):
        counts = {"copied": 9, "compared": 8, "differing": 1, "failed": 0, "dropped": 2}
        return [SimpleNamespace(name='ran"ker', shadow=SimpleNamespace(version=4), counts=counts)]


def _scrape(metrics):
    text, kind = metrics.exposition()
    assert kind.startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            # The parser gives every counter OpenMetrics' suffix; the name is what was written.
            written = f"\n{sample.name}" in text.decode()
            name = sample.name if written else sample.name.removesuffix("_total")
            found[name, tuple(sorted(sample.labels.items()))] = sample.value
    return found, text.decode()


def test_metrics_have_tritons_names_and_meanings():
    metrics = Metrics(_Host(), MEMORY)
    found, text = _scrape(metrics)
    of = (("model", 'ran"ker'), ("version", "3"))
    assert found["nv_inference_request_success", of] == 7
    assert found["nv_inference_count", of] == 20
    assert found["nv_inference_exec_count", of] == 5
    assert found["nv_inference_request_duration_us", of] == 9000
    assert found["nv_inference_queue_duration_us", of] == 4000
    assert found["nv_inference_compute_infer_duration_us", of] == 2500
    assert found["nv_inference_pending_request_count", of] == 2
    reasons = {
        reason: found["nv_inference_request_failure", (of[0], ("reason", reason), of[1])]
        for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER")
    }
    assert reasons == {"REJECTED": 3, "CANCELED": 1, "BACKEND": 0, "OTHER": 1}
    assert "# TYPE nv_inference_request_success counter" in text


def test_metrics_of_our_own_tell_fill_padding_states_and_shadows():
    host = _Host()
    metrics, events = Metrics(host, MEMORY), host.events
    events.tell_refused("http", ServingCode.UNAUTHENTICATED, "no token")
    events.tell_state(StateChange('ran"ker', "3", "READY", seconds=1.5))
    found, _ = _scrape(metrics)
    of = (("function", "predict"), ("model", 'ran"ker'), ("version", "3"))
    assert found["fornax_rows_computed_total", of] == 40
    assert found["fornax_rows_padding_total", of] == 20
    rows = (*of[:2], ("rows", "8"), of[2])
    assert found["fornax_batches_total", rows] == 5
    assert found["fornax_batch_rows_total", rows] == 20
    assert found["fornax_queue_depth", of] == 2
    assert found["fornax_requests_running", of] == 6
    assert found["fornax_compilations_after_ready_total", ()] == 2
    refused = (("code", "UNAUTHENTICATED"), ("protocol", "http"))
    assert found["fornax_refused_total", refused] == 1
    state = (("model", "other"), ("state", "UNAVAILABLE"), ("version", "1"))
    assert found["fornax_model_state", state] == 1
    assert found["nv_model_load_duration_secs", of[1:]] == 1.5
    shadow = (("model", 'ran"ker'), ("version", "4"))
    assert found["fornax_shadow_differing_total", shadow] == 1
    assert found["fornax_model_memory_bytes", of[1:]] == 1234
    assert found["fornax_device_memory_limit_bytes", (("device", "cpu"),)] == 10_000
    assert any(name == "process_cpu_seconds_total" for name, _ in found)


def test_latencies_are_a_histogram_of_what_was_answered():
    host = _Host()
    metrics, events = Metrics(host, MEMORY), host.events
    tell = metrics.latencies.finished
    for _ in range(3):
        tell(_request(), _result())
    tell(_request(), ServingError(ServingCode.NOT_FOUND, "no"))
    found, _ = _scrape(metrics)
    of = (("model", "ranker"), ("version", "3"))
    buckets = {
        float(dict(labels)["le"]): value
        for (name, labels), value in found.items()
        if name == "fornax_request_duration_seconds_bucket"
    }
    assert next(iter(buckets)) == 1e-4
    assert buckets[0.005] == 0
    assert buckets[10.0] == buckets[float("inf")] == 3
    assert list(buckets.values()) == sorted(buckets.values())
    assert found["fornax_request_duration_seconds_count", of] == 3
    assert found["fornax_request_duration_seconds_sum", of] >= 0.03
    events.tell_state(StateChange("ranker", "3", "UNAVAILABLE", "unloaded"))
    assert ("fornax_request_duration_seconds_count", of) not in _scrape(metrics)[0]


def _lines(which, form, tell):
    written = []
    log = AccessLog(which=which, form=form, write=written.append)
    tell(log)
    log.close()
    return "".join(written).splitlines()


def test_what_a_client_sends_makes_no_endless_line():
    request = _request(version="v" * 9999)
    (line,) = _lines(
        "all",
        "json",
        lambda log: log.finished(request, ServingError(ServingCode.NOT_FOUND, "x" * 9999)),
    )
    assert len(line) < 4000


def test_a_request_is_one_line_of_json():
    (line,) = _lines("all", "json", lambda log: log.finished(_request(), _result()))
    entry = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry.pop("time"))
    assert 0.01 <= entry.pop("seconds") < 600
    assert entry == {
        "id": "mine",
        "request_id": "r-1",
        "model": "ranker",
        "version": "3",
        "function": "predict",
        "rows": 4,
        "code": "OK",
        "queue_us": 2000,
        "compute_us": 3001,
    }


def test_errors_alone_are_logged_when_asked_for():
    def tell(log):
        log.finished(_request(), _result())
        log.finished(_request(version="9"), ServingError(ServingCode.NOT_FOUND, "no version 9"))
        log.finished(_request(), asyncio.CancelledError())
        log.finished(_request(), ZeroDivisionError())
        events = Events()
        events.refused.append(log.refused)
        events.tell_refused("grpc", ServingCode.TOO_LARGE, "a body\nof 3 GB", model="ranker")

    lines = _lines("errors", "text", tell)
    codes = [re.search(r"code=(\w+)", line)[1] for line in lines]
    assert codes == ["NOT_FOUND", "CANCELLED", "INTERNAL", "TOO_LARGE"]
    assert 'error="no version 9"' in lines[0]
    assert lines[3].endswith('protocol=grpc code=TOO_LARGE error="a body\\nof 3 GB"')


def test_more_lines_than_may_wait_are_counted(monkeypatch):
    monkeypatch.setattr("fornax.config.background._MOST", 2)

    def tell(log):
        for _ in range(5):
            log.finished(_request(), _result())

    found = [json.loads(line) for line in _lines("all", "json", tell)]
    assert [entry.get("left_out") for entry in found] == [None, None, 3]


def test_a_log_that_cannot_be_written_stops_nothing(caplog):
    class Closed:
        def write(self, text):
            raise BrokenPipeError("nobody reads")

    from fornax.serving.telemetry.logs import _Stdout

    write = _Stdout(Closed())
    write("one\n")
    write("two\n")
    assert [record.message for record in caplog.records] == [
        "the access log cannot be written any more: nobody reads"
    ]


def test_states_are_logged_and_a_failed_load_is_an_error(caplog):
    caplog.set_level(logging.INFO, "fornax.serving")
    log = StateLog()
    log.changed(StateChange("m", "2", "LOADING"))
    log.changed(StateChange("m", "2", "UNAVAILABLE", "a file was altered"))
    log.changed(StateChange("m", "1", "READY", seconds=2.0))
    assert log.failed == {("m", "2")}
    log.changed(StateChange("m", "1", "UNAVAILABLE", "unloaded"))
    found = [(record.levelname, record.message) for record in caplog.records]
    assert found == [
        ("INFO", "m 2: loading"),
        ("ERROR", "m 2: unavailable: a file was altered"),
        ("INFO", "m 1: ready after 2.0 s"),
        ("INFO", "m 1: unavailable: unloaded"),
    ]
    entry = json.loads(_JsonLines().format(caplog.records[1]))
    assert entry["level"] == "error"
    assert (entry["model"], entry["version"], entry["state"]) == ("m", "2", "UNAVAILABLE")


def _spans(tell, rate=0.0):
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracer = Tracer(sample_rate=rate, exporter=exporter)
    tell(tracer)
    tracer.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_sampled_caller_gets_spans_of_queue_and_compute():
    trace = f"00-{TRACE}-{SPAN}-01"
    spans = _spans(lambda tracer: tracer.finished(_request(trace=trace), _result()))
    root = spans.pop("infer ranker")
    assert root.context.trace_id == int(TRACE, 16)
    assert root.parent.span_id == int(SPAN, 16)
    assert root.attributes["fornax.version"] == "3"
    assert root.attributes["fornax.request_id"] == "r-1"
    assert set(spans) == {"queue", "compute_input", "compute_infer", "compute_output"}
    assert all(span.parent.span_id == root.context.span_id for span in spans.values())
    assert spans["queue"].end_time - spans["queue"].start_time == 2_000_000
    assert spans["queue"].start_time == root.start_time
    assert spans["compute_infer"].start_time == spans["compute_input"].end_time
    assert root.end_time - root.start_time >= 10_000_000


def test_who_is_not_sampled_gets_none_and_chance_decides_for_the_rest():
    unsampled = _request(trace=f"00-{TRACE}-{SPAN}-00")
    assert _spans(lambda tracer: tracer.finished(unsampled, _result()), rate=1.0) == {}
    assert _spans(lambda tracer: tracer.finished(_request(), _result()), rate=0.0) == {}
    error = ServingError(ServingCode.RESOURCE_EXHAUSTED, "the queue is full")
    spans = _spans(lambda tracer: tracer.finished(_request(), error), rate=1.0)
    assert spans["infer ranker"].parent is None
    assert spans["infer ranker"].status.description == "the queue is full"


async def _ask(profiler, body, method="POST"):
    transport = httpx.ASGITransport(profiler.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.request(method, "/v2/profile", content=body)
    return answer.status_code, answer.json()


def test_a_profile_is_started_stopped_and_never_two_at_once(tmp_path):
    async def work():
        profiler = Profiler(tmp_path, 60.0)
        status, answer = await _ask(profiler, b'{"seconds": 30}')
        assert (status, answer["running"]) == (200, True)
        status, refused = await _ask(profiler, b"{}")
        assert status == 409
        assert "runs already" in refused["error"]
        assert await _ask(profiler, b'{"stop": true}') == (
            200,
            {"directory": answer["directory"], "running": False},
        )
        assert (await _ask(profiler, b'{"stop": true}'))[0] == 409
        return Path(answer["directory"])

    folder = asyncio.run(work())
    assert folder.parent == tmp_path / "plugins" / "profile"
    assert list(folder.rglob("*.xplane.pb"))


def test_a_profile_ends_by_itself_and_with_the_server(tmp_path):
    async def work():
        profiler = Profiler(tmp_path, 60.0)
        first = await profiler.start(0.01)
        async with asyncio.timeout(120):
            while not list(first.rglob("*.xplane.pb")) or profiler.running:
                await asyncio.sleep(0.02)
        # A process that stops it too late gets it all the same, once.
        assert await profiler.stop() == first
        second = await profiler.start(30.0)
        await profiler.close()
        return second

    assert list(asyncio.run(work()).rglob("*.xplane.pb"))


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "not JSON"),
        (b"[]", 400, "a profile takes"),
        (b'{"secs": 1}', 400, "a profile takes"),
        (b'{"seconds": "1"}', 400, "is a number"),
        (b'{"seconds": 61}', 400, "at most 60"),
        (b'{"seconds": 0}', 400, "above 0"),
        (b'{"stop": 1}', 400, "a profile takes"),
    ],
)
def test_what_is_no_request_for_a_profile_is_refused(tmp_path, body, status, message):
    found, answer = asyncio.run(_ask(Profiler(tmp_path, 60.0), body))
    assert found == status
    assert message in answer["error"]
    assert not list(tmp_path.iterdir())


def test_profiles_are_off_unless_a_folder_is_named():
    status, answer = asyncio.run(_ask(Profiler(None, 60.0), b"{}"))
    assert status == 409
    assert "--profile-dir" in answer["error"]


class _Entry:
    name, memory, platform = "lm", 99, "test"

    def __init__(self, answer):
        self.answer = answer

    def inputs(self):
        return {"text_input": ("BYTES", (-1,))}

    def outputs(self):
        return {"text_output": ("BYTES", (-1,)), "count": ("INT64", (1,))}

    async def infer(self, request):
        return await self.answer()


def _texts(*texts):
    array = np.empty(len(texts), np.object_)
    array[:] = texts
    return array


async def _answer():
    return {"text_output": _texts(b"x", b"y"), "count": np.array([2])}


def _infer(model, **fields):
    request = InferRequest("lm", {"text_input": _texts(b"a", b"b")}, id="7", **fields)
    return asyncio.run(model.infer(request))


def test_an_entrys_answers_are_the_servers_and_counted():
    model = BackendModel(_Entry(_answer))
    result = _infer(model, outputs=("count",))
    assert (result.model, result.version, result.id) == ("lm", "1", "7")
    assert list(result.outputs) == ["count"]
    stats = model.statistics()
    assert (stats.success, stats.inference_count, stats.pending, stats.memory_bytes) == (
        1,
        2,
        0,
        99,
    )
    assert [tensor.name for tensor in model.metadata().outputs] == ["text_output", "count"]


def test_an_entrys_failures_have_codes_and_are_counted():
    async def slow():
        await asyncio.sleep(600)

    async def broken():
        raise ZeroDivisionError

    async def refused():
        raise EngineError("temperature=9 is above 2")

    codes = []
    for answer, fields in (
        (_answer, {"outputs": ("other",)}),
        (_answer, {"function": "score"}),
        (refused, {}),
        (slow, {"deadline": time.monotonic() + 0.01}),
        (broken, {}),
    ):
        model = BackendModel(_Entry(answer))
        with pytest.raises(ServingError) as caught:
            _infer(model, **fields)
        codes.append(caught.value.code.name)
        assert model.statistics().reject == {caught.value.code.name: 1}
    assert codes == ["INVALID_ARGUMENT"] * 3 + ["DEADLINE_EXCEEDED", "INTERNAL"]
