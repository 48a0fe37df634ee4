"""The generate extension: JSON by the tensors' names, whole or as server-sent events."""

import asyncio
import gzip
import json
import socket
import time

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.serving.http.fake import FakeHost

from fornax.config import ServingError
from fornax.serving.access import Auth, Limits
from fornax.serving.http.generate import read_generate, write_generate
from fornax.serving.http.infer import InferHeaders
from fornax.serving.types import InferResult, ModelMetadata, TensorMetadata

TALK = "/v2/models/talk/generate"


def _post(call, path, document, headers=None, **how):
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return call("POST", path, body, headers, **how)


def _events(body):
    blocks = body.decode().split("\n\n")
    assert blocks.pop() == ""
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def test_a_model_of_language_answers_whole(call):
    asked = {"text_input": "a b", "parameters": {"stream": False}}
    answer = _post(call, TALK, asked, {"x-request-id": "r-1"})
    assert answer.status == 200
    named = {"model_name": "talk", "model_version": "1", "id": "r-1"}
    assert json.loads(answer.body) == {**named, "text_output": "a b"}
    assert answer.headers["x-request-id"] == "r-1"


def test_events_are_pieces_of_text_and_the_last_is_done(call):
    answer = _post(call, "/v2/models/talk/versions/1/generate_stream", {"text_input": "a b"})
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = [(event["text_output"], event["done"]) for event in _events(answer.body)]
    assert found == [("a", False), ("b", False), ("", True)]
    whole = _post(call, TALK + "_stream", {"text_input": "a b", "stream": False})
    assert [event["text_output"] for event in _events(whole.body)] == ["a b"]


def test_an_error_is_a_status_before_the_first_event_and_an_event_after_it(call):
    early = _post(call, TALK + "_stream", {"text_input": "fail"})
    assert early.status == 503
    assert json.loads(early.body) == {"error": "the engine ended"}
    late = _post(call, TALK + "_stream", {"text_input": "a fail"})
    assert late.status == 200
    assert _events(late.body)[-1] == {"error": "the engine ended"}
    timed = {"text_input": "a wait", "parameters": {"timeout": 20_000}}
    assert _post(call, TALK, timed).status == 504
    for timeout in (20_000, 500_000, 20_000_000):  # a busy machine may need more to the first event
        timed["parameters"]["timeout"] = timeout
        answer = _post(call, TALK + "_stream", timed)
        if answer.status == 200:
            break
    assert "error" in _events(answer.body)[-1]


def test_a_client_that_leaves_ends_what_is_being_said(call):
    for path in (TALK, TALK + "_stream"):
        before = call.host.talk.given_up
        _post(call, path, {"text_input": "wait"}, leave=True)
        assert call.host.talk.given_up == before + 1


@pytest.mark.parametrize(
    ("document", "status", "message"),
    [
        (b"{", 400, "not JSON"),
        (b"[]", 400, "not a JSON object"),
        ({}, 404, ""),
        ({"text_input": 5}, 400, "takes strings"),
        ({"text_input": [["a"]]}, 400, "nested deeper"),
        ({"text_input": "a", "parameters": 5}, 400, "parameters is not a JSON object"),
        ({"text_input": "a", "parameters": {"text_input": "b"}}, 400, "twice"),
        ({"text_input": "a", "stream": "yes"}, 400, "BOOL takes true or false"),
        ({"text_input": "a", "stream": True}, 400, "takes a call that streams"),
        ({"text_input": "a", "id": 5}, 400, "id is not a string"),
        ({"text_input": "a", "timeout": -1}, 400, "timeout"),
        ({"text_input": "a", "binary_data_output": True}, 400, "binary"),
        ({"text_input": "a", "sequence_id": 3}, 501, "sequences"),
        ({"text_input": "a", "function": "f"}, 404, ""),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(call, document, status, message):
    path = TALK if document != {} else "/v2/models/nobody/generate"
    answer = _post(call, path, document)
    assert answer.status == status
    assert message in json.loads(answer.body)["error"]


def test_other_methods_and_missing_tokens_are_refused(call, make_caller):
    assert call("GET", TALK).status == 405
    closed = make_caller(auth=Auth(tokens=("secret",)))
    assert _post(closed, TALK, {"text_input": "a"}).status == 401
    headers = {"authorization": "Bearer secret"}
    assert _post(closed, TALK, {"text_input": "a"}, headers).status == 200


class _Zoo(FakeHost):
    """`zoo` gives back tensors of several datatypes."""

    def metadata(self, name, version=""):
        if name.partition(":")[0] != "zoo":
            return super().metadata(name, version)
        tensors = (
            TensorMetadata("rows", "FP32", (-1, 2)),
            TensorMetadata("ids", "INT64", (-1, -1)),
            TensorMetadata("half", "FP16", (-1,)),
            TensorMetadata("flag", "BOOL", (1,)),
            TensorMetadata("one", "INT32", ()),
            TensorMetadata("text", "BYTES", (-1,)),
        )
        return ModelMetadata(name, ("1",), "fornax", tensors, ())

    def _known(self, name, version=""):
        pass


def test_tensors_of_any_model_are_bare_or_lists(make_caller, monkeypatch):
    monkeypatch.setattr("tests.unit.serving.http.conftest.FakeHost", _Zoo)
    call = make_caller()
    call.host.functions["zoo"] = lambda inputs: {f"out_{name}": inputs[name] for name in inputs}
    asked = {
        "rows": [[1.5, 2], [3, float("inf")]],
        "ids": [7, 8, 9],
        "half": 0.5,
        "flag": True,
        "one": 4,
        "parameters": {"text": ["a", "b"], "scale": 2},
    }
    answer = _post(call, "/v2/models/zoo/generate", asked)
    assert answer.status == 200, answer.body
    (request,) = call.host.requests
    assert request.parameters == {"scale": 2}
    shapes = {name: array.shape for name, array in request.inputs.items()}
    assert shapes == {
        "rows": (2, 2),
        "ids": (1, 3),
        "half": (1,),
        "flag": (1,),
        "one": (),
        "text": (2,),
    }
    assert request.inputs["half"].dtype == np.float16
    found = json.loads(answer.body)
    assert found["out_rows"] == [1.5, 2.0, 3.0, "Infinity"]
    assert found["out_ids"] == [7, 8, 9]
    assert (found["out_half"], found["out_flag"], found["out_one"]) == (0.5, True, 4)
    assert found["out_text"] == ["a", "b"]
    (event,) = _events(_post(call, "/v2/models/zoo/generate_stream", asked).body)
    assert event["done"]
    assert event["out_ids"] == [7, 8, 9]
    _post(call, "/v2/models/zoo/generate", {"one": 1, "function": "other"})
    assert call.host.requests[-1].function == "other"
    assert _post(call, "/v2/models/zoo/generate", {"rows": [[1], [2, 3]]}).status == 400
    call.host.functions["zoo"] = lambda inputs: {"done": inputs["one"]}
    assert _post(call, "/v2/models/zoo/generate", {"one": 1}).status == 501


def test_events_come_as_they_are_made_and_end_with_the_connection(server):
    server.call(server.host.reset)
    with (
        httpx.Client(base_url=f"http://{server.url}", timeout=120) as client,
        client.stream("POST", TALK + "_stream", json={"text_input": "a b wait"}) as response,
    ):
        lines = response.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["text_output"] == "a"
        before = server.host.talk.given_up
    end = time.monotonic() + 120
    while server.host.talk.given_up == before:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_connections_go_on_after_events(server):
    body = json.dumps({"text_input": "a b"}).encode()
    head = f"POST {TALK}_stream HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    host, _, port = server.url.rpartition(":")
    with socket.create_connection((host, int(port)), 120) as connection:
        for _ in range(3):
            connection.sendall(head.encode() + body)
            answer = b""
            while not answer.endswith(b"0\r\n\r\n"):
                answer += connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.count(b"data: ") == 3


def test_the_servers_limits_hold(server):
    with httpx.Client(base_url=f"http://{server.url}", timeout=120) as client:
        many = client.post(TALK, json={"text_input": ["a"] * 70_000})
        assert many.status_code == 413
        assert "524288 a tensor" in many.json()["error"]
        assert client.post(TALK, content=b" " * (1 << 20) + b"{}").status_code == 413
        packed = gzip.compress(json.dumps({"text_input": "a"}).encode())
        answer = client.post(TALK, content=packed, headers={"content-encoding": "gzip"})
        assert answer.json()["text_output"] == "a"


def test_so_many_requests_at_once_and_so_long(make_caller):
    caller = make_caller(limits=Limits(max_concurrent_requests=1, request_timeout=0.05))

    async def work():
        slow, refused = (
            asyncio.ensure_future(caller.call("POST", TALK, b'{"text_input": "wait"}'))
            for _ in range(2)
        )
        return (await slow).status, (await refused).status

    assert asyncio.run(work()) == (504, 429)
    assert caller.app.routes.state.context.events.refusals["http", "RESOURCE_EXHAUSTED"] == 1


_LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
_VALUE = st.recursive(
    _LEAF,
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=2), each, max_size=2)
    ),
    max_leaves=6,
)
_KEY = st.sampled_from(
    ["rows", "ids", "half", "flag", "one", "text", "id", "timeout", "priority", "function"]
)
_DOCUMENT = st.dictionaries(_KEY, _VALUE, max_size=4)


@given(_DOCUMENT, st.none() | _DOCUMENT | _VALUE)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_any_json_is_read_or_refused(document, parameters):
    body = json.dumps({**document, "parameters": parameters}).encode()
    head = InferHeaders(None, "", None, b"")
    try:
        request = read_generate(body, head, "zoo", "", _Zoo(), Limits(), 0.0, streams=True)
    except ServingError:
        return
    write_generate(InferResult("zoo", "1", "", request.id, request.inputs), done=True)
