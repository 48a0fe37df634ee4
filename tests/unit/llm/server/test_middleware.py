"""What every request passes: key, id, size and time of the body, log; and what limits there are."""

import asyncio
import json
import logging
import threading
import time

import pytest

from fornax.llm.server.limits import RefusalPace
from fornax.llm.stats import Readiness

BODY = {"prompt": "hello", "max_tokens": 2}


def test_without_the_key_only_probes_and_metrics_answer(make_app):
    app = make_app(api_key=("one", "two"))
    reply = app.post("/v1/completions", BODY)
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"
    for path in ("/health", "/ready", "/metrics"):
        assert app.get(path).status_code == 200
    for path in ("/v1/models", "/version", "/load", "/openapi.json"):
        assert app.get(path).status_code == 401


@pytest.mark.parametrize(
    ("header", "status"),
    [("Bearer two", 200), ("bearer one", 200), ("Bearer three", 401), ("Basic one", 401)],
)
def test_any_of_the_keys_opens(make_app, header, status):
    app = make_app(api_key=("one", "two"))
    reply = app.post("/v1/completions", BODY, headers={"authorization": header})
    assert reply.status_code == status


def test_a_request_keeps_the_id_it_brings(app):
    reply = app.post("/v1/completions", BODY, headers={"x-request-id": "abc-1"})
    assert reply.headers["x-request-id"] == "abc-1"
    assert reply.json()["id"] == "cmpl-abc-1"


def test_an_id_that_could_break_the_log_is_replaced(app):
    reply = app.post("/v1/completions", BODY, headers={"x-request-id": "a b\t"})
    assert len(reply.headers["x-request-id"]) == 32


def test_a_body_over_the_limit_is_413_whether_or_not_it_says_its_size(make_app):
    app = make_app(max_body_bytes=1000)
    big = json.dumps({"prompt": "x" * 2000}).encode()

    async def chunks():
        for start in range(0, len(big), 100):
            yield big[start : start + 100]

    headers = {"content-type": "application/json"}
    for content in (big, chunks()):
        reply = app.request("POST", "/v1/completions", content=content, headers=headers)
        assert reply.status_code == 413
        assert reply.json()["error"]["type"] == "invalid_request_error"
        assert reply.headers["connection"] == "close"


def call(app, receive, body=b"", path="/v1/completions"):
    """Call the app as a server does; what it sends."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body) or 10).encode()),
        ],
    }
    asyncio.run(app.asgi(scope, receive, send))
    return sent


def test_a_body_that_does_not_come_is_408(make_app):
    app = make_app(body_timeout=0.05)

    async def never():
        await asyncio.sleep(60)

    [start, *_] = call(app, never)
    assert start["status"] == 408


def leaving(body, after):
    """A client that sends a body and goes away after some seconds."""
    given = False

    async def receive():
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.sleep(after)
        return {"type": "http.disconnect"}

    return receive


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_sequences(make_app, stream):
    app = make_app({"max_model_len": 10**6, "step_seconds": 0.001})
    request = {"prompt": ["hello", "world"], "max_tokens": 10**5, "stream": stream}
    body = json.dumps(request).encode()
    call(app, leaving(body, after=0.1), body)
    assert app.engine.num_unfinished == 0
    assert app.engine.aborted == 2
    assert app.server.concurrency.running == 0


def test_a_client_that_goes_away_while_it_waits_leaves_the_queue(make_app):
    app = make_app({"max_num_seqs": 1, "max_model_len": 10**6, "step_seconds": 0.001})
    long = json.dumps({"prompt": "hello", "max_tokens": 10**5}).encode()

    async def both():
        sent = []

        async def send(message):
            sent.append(message)

        async def run(after):
            await asyncio.to_thread(call, app, leaving(long, after), long)

        await asyncio.gather(run(0.3), run(0.1))

    asyncio.run(both())
    assert app.engine.aborted == 2
    assert app.engine.num_unfinished == 0


def test_a_client_that_goes_away_while_sending_is_no_error(app, caplog):
    async def gone():
        return {"type": "http.disconnect"}

    assert call(app, gone) == []
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_more_requests_than_allowed_get_429_and_when_to_come_again(make_app):
    app = make_app({"step_seconds": 0.01}, max_concurrent_requests=1)
    with app.server.concurrency.admitted():
        reply = app.post("/v1/completions", BODY)
    assert reply.status_code == 429
    assert reply.json()["error"]["type"] == "rate_limit_error"
    assert int(reply.headers["retry-after"]) >= 1
    assert app.post("/v1/completions", BODY).status_code == 200


def test_a_full_queue_gets_429(make_app, monkeypatch):
    app = make_app(max_queued_requests=4)
    monkeypatch.setattr(type(app.engine), "num_unfinished", app.engine.max_num_seqs + 4)
    reply = app.post("/v1/completions", BODY)
    assert reply.status_code == 429
    assert "4 requests wait" in reply.json()["error"]["message"]


def test_before_ready_503_says_how_far_compiling_is(app):
    app.engine.ready = Readiness(done=3, total=10, seconds_left=7.0)
    reply = app.post("/v1/completions", BODY)
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "7"
    assert "3 of 10" in reply.json()["error"]["message"]
    ready = app.get("/ready")
    assert ready.status_code == 503
    assert ready.json() == {"ready": False, "done": 3, "total": 10, "seconds_left": 7.0}
    assert app.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_over_its_time_is_ended(make_app, stream):
    app = make_app({"max_model_len": 10**6, "step_seconds": 0.001}, request_timeout=1.0)
    request = {"prompt": "hello", "max_tokens": 10**5, "stream": stream}
    reply = app.post("/v1/completions", request)
    assert app.engine.num_unfinished == 0
    if stream:
        error = json.loads(reply.text.split("\n\n")[-3][6:])["error"]
        assert error["code"] == "stopped"
        assert "too long" in error["message"]
    else:
        assert reply.status_code == 504
        assert reply.json()["error"]["type"] == "timeout_error"


def test_the_access_log_is_a_line_of_json_per_request(make_app, caplog):
    app = make_app()
    object.__setattr__(app.server.config, "disable_access_log", False)
    with caplog.at_level(logging.INFO, logger="fornax.llm.access"):
        app.post("/v1/completions", {**BODY, "user": 'a "user"\n'})
        app.get("/health")
        app.get("/nothing")
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    assert [line["path"] for line in lines] == ["/v1/completions", "/nothing"]
    assert lines[0]["user"] == 'a "user"\n'
    assert lines[0]["status"] == 200
    assert (lines[0]["prompt_tokens"], lines[0]["completion_tokens"]) == (1, 2)
    assert lines[1]["status"] == 404


def test_the_head_of_one_stream_leaves_nothing_in_the_next(app):
    body = {"prompt": "hello", "max_tokens": 1, "stream": True}
    headers = {"origin": "https://page.example"}
    heads = [app.post("/v1/completions", body, headers=headers).headers for _ in range(3)]
    assert [(head.get("vary"), len(head)) for head in heads] == [
        (heads[0].get("vary"), len(heads[0]))
    ] * 3
    assert heads[0].get("vary", "").count("Origin") <= 1


def test_a_page_of_another_origin_may_call(app, make_app):
    headers = {"origin": "https://page.example"}
    reply = app.post("/v1/completions", BODY, headers=headers)
    assert reply.headers["access-control-allow-origin"] == "*"
    closed = make_app(allowed_origins=())
    reply = closed.post("/v1/completions", BODY, headers=headers)
    assert "access-control-allow-origin" not in reply.headers


def test_every_stream_has_one_request_id(app):
    """They gathered in the message that all streams start with, a header a stream."""
    for number in range(3):
        body = {"prompt": "hello", "max_tokens": 2, "stream": True}
        reply = app.post("/v1/completions", body, headers={"X-Request-Id": f"id-{number}"})
        assert reply.headers.get_list("x-request-id") == [f"id-{number}"]


def test_a_flood_of_refusals_is_spaced_out_and_other_answers_are_not(app):
    app.asgi._refusals = RefusalPace(burst=5, per_second=50)

    def seconds(path, count):
        began = time.monotonic()
        for _ in range(count):
            app.get(path)
        return time.monotonic() - began

    assert seconds("/made/up", 15) >= 10 / 50
    # Health is asked for between refusals that are due, and waits for none of them.
    over = threading.Event()

    def refuse():
        for _ in range(5000):
            if over.is_set():
                return
            app.get("/made/up")
        over.set()

    refused = threading.Thread(target=refuse)
    refused.start()
    seconds("/health", 3)
    assert not over.is_set()
    over.set()
    refused.join()


def test_no_refusal_waits_longer_than_its_bound():
    async def together():
        pace = RefusalPace(burst=0, per_second=0.5, longest=0.05)
        began = time.monotonic()
        await asyncio.gather(*(pace.wait() for _ in range(20)))
        return time.monotonic() - began

    assert asyncio.run(together()) < 20  # of the 40 that 20 would take
