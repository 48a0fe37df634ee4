"""The app without a socket: what it answers, whom it lets in, what it refuses."""

import asyncio
import gzip
import logging
import zlib

import numpy as np
import orjson
import pytest

from fornax.serving.access import Auth, Limits

X = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}
BODY = orjson.dumps({"inputs": [X]})
ECHO = "/v2/models/echo/infer"


def _error(answer) -> str:
    document = orjson.loads(answer.body)
    assert list(document) == ["error"]
    assert "\n" not in document["error"]
    return document["error"]


def test_inference_by_model_version_and_function(call):
    for path in (ECHO, "/v2/models/echo/versions/1/infer", "/v2/models/echo:f/infer"):
        answer = call("POST", path, BODY)
        assert answer.status == 200, answer
        assert orjson.loads(answer.body)["outputs"][0]["data"] == [1, 2]
    assert [each.function for each in call.host.requests] == ["", "", "f"]
    assert [each.version for each in call.host.requests] == ["", "1", ""]


def test_a_binary_answer_says_where_its_json_ends(call):
    array = np.arange(3, dtype=np.int32)
    tensor = {
        "name": "x",
        "datatype": "INT32",
        "shape": [3],
        "parameters": {"binary_data_size": 12},
    }
    text = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    headers = {"Inference-Header-Content-Length": str(len(text))}
    answer = call("POST", ECHO, [text[:5], text[5:], array.tobytes()], headers)
    size = int(answer.headers["inference-header-content-length"])
    assert answer.body[size:] == array.tobytes()
    assert int(answer.headers["content-length"]) == len(answer.body)
    assert answer.headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "words"),
    [
        ("POST", ECHO, b"", {}, 400, "not JSON"),
        ("POST", ECHO, BODY, {"Inference-Header-Content-Length": "-1"}, 400, "not a number"),
        ("POST", ECHO, BODY, {"Inference-Header-Content-Length": "9" * 30}, 400, "not a number"),
        ("POST", ECHO, BODY, {"Inference-Header-Content-Length": "999"}, 400, "not a size of JSON"),
        ("POST", ECHO, BODY, {"Content-Encoding": "br"}, 400, "send gzip, deflate or neither"),
        ("POST", ECHO, BODY, {"Content-Encoding": "gzip"}, 400, "not valid"),
        ("POST", ECHO, b"x" * (1 << 20) + b"x", {}, 413, "larger than 1048576 bytes"),
        ("POST", ECHO, [b"x" * 1000] * 1100, {}, 413, "larger than 1048576 bytes"),
        ("POST", "/v2/models/nope/infer", BODY, {}, 404, "'nope'"),
        ("POST", "/v2/models/echo/versions/9/infer", BODY, {}, 404, "'9'"),
        ("POST", "/v2/models/full/infer", BODY, {}, 429, "full"),
        ("POST", "/v2/models/bug/infer", BODY, {}, 500, "(KeyError)"),
        ("GET", ECHO, b"", {}, 405, "takes only POST"),
        ("GET", "/v2/nothing", b"", {}, 404, "is not a path"),
        ("POST", "/v2/models/a/b/c/infer", BODY, {}, 404, "is not a path"),
        ("DELETE", "/v2", b"", {}, 405, "does not take DELETE"),
        ("GET", "/v2/models/nope", b"", {}, 404, "'nope'"),
        ("GET", "/v2/models/nope/ready", b"", {}, 503, "is not ready"),
        ("GET", "/metrics", b"", {}, 404, "no metrics"),
        ("POST", "/v2/repository/index", b'{"a":1}', {}, 400, "a is not a key"),
        ("POST", "/v2/repository/index", b"{", {}, 400, "not JSON"),
        ("POST", "/v2/repository/models/nope/load", b"", {}, 404, "'nope'"),
        (
            "POST",
            "/v2/repository/models/echo/load",
            b'{"parameters":{"config":"{}"}}',
            {},
            501,
            "serving.yaml",
        ),
        (
            "POST",
            "/v2/repository/models/echo/load",
            b'{"parameters":{"file:1/x":"aa"}}',
            {},
            501,
            "serving.yaml",
        ),
        (
            "POST",
            "/v2/repository/models/echo/unload",
            b'{"parameters":{"x":1}}',
            {},
            400,
            "no meaning",
        ),
        ("GET", "/v2/repository/models/echo/shadow", b"", {}, 409, "no shadow"),
        ("POST", "/v2/systemsharedmemory/region/a/register", b"{}", {}, 400, "key is missing"),
        (
            "POST",
            "/v2/cudasharedmemory/region/a/register",
            b"{}",
            {},
            501,
            "CUDA shared memory is not served",
        ),
        ("POST", "/v2/logging", b'{"log_infos":true}', {}, 400, "not a setting of the log"),
        ("POST", "/v2/logging", b'{"log_file":"/tmp/x"}', {}, 501, "fixed when the server"),
        ("POST", "/v2/trace/setting", b'{"trace_rate":"5"}', {}, 501, "fixed when the server"),
        ("POST", "/v2/logging", b" " * (1 << 20) + b"{}", {}, 413, "larger than"),
    ],
)
@pytest.mark.filterwarnings("default")
def test_an_error_has_its_status_and_one_paragraph(
    call, method, path, body, headers, status, words
):
    answer = call(method, path, body, headers)
    assert answer.status == status, answer
    assert words in _error(answer)
    assert ("retry-after" in answer.headers) == (status in (429, 503))


def test_what_is_refused_before_the_host_is_told_to_the_events(call):
    call("POST", ECHO, b"{")
    call("POST", "/v2/models/full/infer", BODY)
    assert dict(call.host.events.refusals) == {("http", "INVALID_ARGUMENT"): 1}


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_bodies_are_compressed_when_that_is_asked_for(call, coding):
    packed = gzip.compress(BODY) if coding == "gzip" else zlib.compress(BODY)
    headers = {"Content-Encoding": coding, "Accept-Encoding": coding}
    answer = call("POST", ECHO, packed, headers)
    assert answer.headers["content-encoding"] == coding
    opened = gzip.decompress(answer.body) if coding == "gzip" else zlib.decompress(answer.body)
    assert orjson.loads(opened)["outputs"][0]["data"] == [1, 2]


def test_a_list_of_codings_is_no_wish_to_compress(call):
    answer = call("POST", ECHO, BODY, {"Accept-Encoding": "gzip, deflate, br"})
    assert "content-encoding" not in answer.headers


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_an_inflated_body_is_bounded(call, coding):
    zeros = bytes(50_000_000)
    bomb = gzip.compress(zeros) if coding == "gzip" else zlib.compress(zeros)
    assert len(bomb) < 60_000
    for body, status in ((bomb, 413), (bomb[:100], 400), (zlib.compress(BODY) + b"x", 400)):
        assert call("POST", ECHO, body, {"Content-Encoding": coding}).status == status


def test_gzip_of_several_members_is_one_body(call):
    packed = gzip.compress(BODY[:10]) + gzip.compress(BODY[10:])
    assert call("POST", ECHO, packed, {"Content-Encoding": "gzip"}).status == 200


def test_the_callers_id_goes_through(call):
    headers = {"X-Request-Id": "abc-1", "Traceparent": "00-1-2-01"}
    answer = call("POST", ECHO, BODY, headers)
    assert answer.headers["x-request-id"] == "abc-1"
    assert "id" not in orjson.loads(answer.body)
    assert call.host.requests[0].id == "abc-1"
    assert call.host.requests[0].trace == b"00-1-2-01"
    assert call.host.requests[0].request_id == "abc-1"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", ECHO, BODY, 200),
        ("POST", ECHO, b"{", 400),
        ("POST", "/v2/models/nobody/infer", BODY, 404),
        ("GET", ECHO, b"", 405),
        ("GET", "/v2/health/live", b"", 200),
        ("GET", "/v2/nowhere", b"", 404),
        ("POST", "/v2/models/nobody/generate", b"{}", 404),
    ],
)
def test_every_response_has_an_id(call, method, path, body, status):
    """The client's, or a new one where that is none that could be repeated."""
    heard = []
    call.host.events.refused.append(heard.append)
    answer = call(method, path, body, {"X-Request-Id": "abc-2"})
    assert (answer.status, answer.headers["x-request-id"]) == (status, "abc-2")
    assert [each.request_id for each in heard] in ([], ["abc-2"])
    made = [call(method, path, body, {"X-Request-Id": "a b\t" * 50}) for _ in range(2)]
    names = {answer.headers["x-request-id"] for answer in made}
    assert len(names) == 2
    assert {len(name) for name in names} == {32}
    if status == 200 and method == "POST":
        assert call.host.requests[-1].request_id == made[-1].headers["x-request-id"]
        assert call.host.requests[-1].id == ""


def test_a_client_that_leaves_cancels_its_request(call):
    answer = call("POST", "/v2/models/slow/infer", BODY, leave=True)
    assert answer.status == 0
    assert call.host.slow.cancelled()


def test_a_request_past_its_time_gets_504_and_is_cancelled(call):
    body = orjson.dumps({"inputs": [X], "parameters": {"timeout": 20_000}})
    answer = call("POST", "/v2/models/slow/infer", body)
    assert (answer.status, "0.02 s are over" in _error(answer)) == (504, True)
    assert call.host.slow.cancelled()


def test_requests_beyond_the_limit_get_429(make_caller):
    async def run():
        waiting = asyncio.create_task(call.call("POST", "/v2/models/slow/infer", BODY))
        while call.host.slow is None:
            await asyncio.sleep(0.001)
        refused = await call.call("POST", ECHO, BODY)
        call.host.slow.cancel()
        return refused, await waiting, await call.call("POST", ECHO, BODY)

    call = make_caller(limits=Limits(max_concurrent_requests=1))
    refused, dropped, after = asyncio.run(run())
    assert (refused.status, dropped.status, after.status) == (429, 503, 200)
    assert refused.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("method", "path", "plain", "admin"),
    [
        ("GET", "/v2/health/live", 200, 200),
        ("GET", "/v2/health/ready", 200, 200),
        ("GET", "/v2/models/echo/ready", 200, 200),
        ("GET", "/v2", 200, 200),
        ("POST", "/v2/repository/index", 200, 200),
        ("POST", ECHO, 200, 200),
        ("GET", "/v1/models", 200, 200),
        ("POST", "/v2/repository/models/echo/load", 403, 200),
        ("POST", "/v2/repository/models/echo/rollback", 403, 200),
        ("GET", "/v2/systemsharedmemory/status", 403, 200),
        ("POST", "/v2/systemsharedmemory/unregister", 403, 200),
        ("POST", "/v2/profile", 403, 200),
        ("GET", "/v2/logging", 200, 200),
        ("POST", "/v2/logging", 403, 200),
        ("POST", "/v2/models/echo/trace/setting", 403, 200),
    ],
)
def test_tokens_open_what_they_are_for(make_caller, method, path, plain, admin):
    async def extra(scope, receive, send):
        assert (await receive())["type"] == "http.request"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"extra"})

    call = make_caller(
        auth=Auth(tokens=("plain", "boss")),
        admin=Auth(tokens=("boss",)),
        extra_apps={"/v1": extra, "/v2/profile": extra},
    )
    body = BODY if path == ECHO else b"{}" if method == "POST" else b""
    statuses = [
        call(method, path, body, headers).status
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer plain"},
            {"Authorization": "Bearer boss"},
        )
    ]
    unknown = 200 if "health" in path or path.endswith("ready") else 401
    assert statuses == [unknown, unknown, plain, admin]


def test_a_model_or_a_label_called_ready_is_no_open_door(make_caller):
    call = make_caller(auth=Auth(tokens=("secret",)))
    for path in ("/v2/models/ready", "/v2/models/echo/versions/live", "/v2/models/ready/stats"):
        assert call("GET", path).status == 401


def test_a_missing_token_is_asked_for(make_caller):
    call = make_caller(auth=Auth(tokens=("secret",), open_metrics=False))
    answer = call("GET", "/metrics")
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert "secret" not in _error(answer)


def test_an_extra_app_gets_the_body_within_the_limits(make_caller, tight):
    seen = []

    async def extra(scope, receive, send):
        seen.append((scope["path"], (await receive())["body"]))
        await send({"type": "http.response.start", "status": 202, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    call = make_caller(extra_apps={"/v1": extra}, limits=tight)
    assert call("POST", "/v1/chat/completions", [b"ab", b"c"]).status == 202
    assert call("POST", "/v1/chat", b"x" * 1001).status == 413
    assert call("POST", "/v1chat", b"").status == 404
    assert seen == [("/v1/chat/completions", b"abc")]


def test_logs_say_more_when_told_to(call):
    logger = logging.getLogger("fornax")
    before = logger.level
    try:
        assert call("POST", "/v2/logging", b'{"log_verbose_level":1}').status == 200
        assert logger.level == logging.DEBUG
        assert orjson.loads(call("GET", "/v2/logging").body)["log_verbose_level"] == 1
        body = b'{"log_verbose_level":0,"log_info":false}'
        assert orjson.loads(call("POST", "/v2/logging", body).body)["log_info"] is False
        assert logger.level == logging.WARNING
        assert call("POST", "/v2/logging", b'{"log_error":false}').status == 400
    finally:
        logger.setLevel(before)


def test_traces_are_told_of_and_not_changed(make_caller):
    call = make_caller(trace_sample_rate=0.1)
    told = orjson.loads(call("GET", "/v2/models/echo/trace/setting").body)
    assert (told["trace_level"], told["trace_rate"]) == (["TIMESTAMPS"], "10")
    assert call("POST", "/v2/trace/setting", orjson.dumps(told)).status == 200


def test_every_call_of_ours_answers_as_documented(call):
    document = orjson.loads(call("GET", "/openapi.json").body)
    paths = document["paths"]
    assert {ECHO.replace("echo", "{model}"), "/v2/models/{model}/versions/{version}/infer"} <= set(
        paths
    )
    rolled = call("POST", "/v2/repository/models/echo/rollback", b'{"parameters":{"version":3}}')
    assert orjson.loads(rolled.body)["version"] == "3"
    assert call("POST", "/v2/repository/models/echo/release").status == 200
    described = call("GET", "/v2/models/echo/versions/1/config")
    assert orjson.loads(described.body)["max_batch_size"] == 8


def test_bodies_that_fill_the_memory_get_429_until_some_are_done(make_caller, tight):
    async def run():
        waiting = [
            asyncio.create_task(call.call("POST", "/v2/models/slow/infer", large)) for _ in range(5)
        ]
        while call.host.slow is None or not any(each.done() for each in waiting):
            await asyncio.sleep(0.001)
        refused = [each for each in waiting if each.done()]
        call.host.slow.cancel()
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        after = await asyncio.gather(*(call.call("POST", ECHO, large) for _ in range(3)))
        return [each.result().status for each in refused], [each.status for each in after]

    large = BODY + b" " * (900 - len(BODY))
    call = make_caller(limits=tight)
    assert asyncio.run(run()) == ([429], [200, 200, 200])


def test_what_is_held_is_released_whatever_becomes_of_it(make_caller, tight):
    call = make_caller(limits=tight)
    for _ in range(3):
        call("POST", ECHO, [b"x" * 900, b"y" * 900])
        call("POST", ECHO, b"z" * 900)
        call("POST", "/v2/models/slow/infer", BODY + b" " * 800, leave=True)
        call("POST", ECHO, gzip.compress(BODY + b" " * 800), {"Content-Encoding": "gzip"})
        call("POST", "/v2/repository/index", b" " * 900 + b"{}")
    assert call.app._memory.left == 4 * tight.max_body_bytes
