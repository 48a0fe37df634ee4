"""What a client did wrong is answered 4xx with OpenAI's error object that names the field."""

import json
import time

import pytest

from fornax.config import EngineError
from fornax.llm.server.errors import from_engine
from fornax.llm.server.limits import RequestLimits

COMPLETION = {"prompt": "hello"}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def error_of(reply, status):
    """The error, whose shape is checked."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def refusal_seconds(app, path, body):
    """Processor time that a refusal takes at least: what else the process and a virtual machine do
    meanwhile is counted too."""
    content, seconds = json.dumps(body), []
    for _ in range(4):
        begin = time.process_time()
        error_of(app.post(path, content=content), 400)
        seconds.append(time.process_time() - begin)
    return min(seconds)


@pytest.mark.parametrize(
    ("change", "param", "limit"),
    [
        ({"n": 128, "prompt": ["hello"] * 9}, "n", "max_completions"),
        ({"n": 100, "prompt": [1] * 60}, "n", "max_prompt_tokens"),
        ({"stop": ["x" * 4000, "y" * 97]}, "stop", "max_stop_characters"),
        ({"stop": "x" * 3000, "prompt": ["a", "b"]}, "stop", "max_stop_characters"),
        ({"bad_words": ["word"] * 5000}, "bad_words", "max_bad_word_characters"),
        ({"allowed_token_ids": [1] * 20_000}, "allowed_token_ids", "max_token_ids"),
        ({"prompt": [1] * 131_073}, None, "max_body_values"),
        (
            {"structured_outputs": {"choice": ["a" * 70_000]}},
            "structured_outputs",
            "max_structured_characters",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 70_000, "min_count": 2}},
            "repetition_detection",
            "max_repetition_pattern",
        ),
    ],
)
def test_a_request_for_too_much_is_refused_before_any_work(make_app, change, param, limit):
    app = make_app(request_limits=RequestLimits(max_prompt_tokens=5000))
    error = error_of(app.post("/v1/completions", {**COMPLETION, **change}), 400)
    assert error["param"] == param
    assert limit in error["message"]
    assert len(error["message"]) < 300


def test_embeddings_and_chats_have_limits_of_their_own(make_app):
    app = make_app(request_limits=RequestLimits(max_messages=2, max_prompt_tokens=3))
    long = app.post("/v1/embeddings", {"input": [[1, 2], [3, 4]]})
    assert "max_prompt_tokens" in error_of(long, 400)["message"]
    for path in ("/v1/chat/completions", "/tokenize"):
        chat = app.post(path, {"messages": CHAT["messages"] * 3})
        assert "max_messages" in error_of(chat, 400)["message"]


def test_a_context_longer_than_the_limit_may_be_filled_with_token_ids(make_app):
    limits = RequestLimits(max_body_values=10)
    app = make_app(engine={"max_model_len": 64}, request_limits=limits)
    body = {"prompt": [1] * 60, "max_tokens": 2}
    assert app.post("/v1/completions", body).status_code == 200
    assert app.post("/v1/completions", {**body, "prompt": [1] * 130}).status_code == 400


@pytest.mark.parametrize("change", [{"model": "m" * 100_000}, {"k" * 100_000: 1}])
def test_an_error_repeats_the_beginning_of_what_was_sent(make_app, change):
    reply = make_app().post("/v1/completions", {**COMPLETION, **change})
    assert 400 <= reply.status_code < 500
    assert len(reply.content) < 5000


@pytest.mark.parametrize(
    "change",
    [
        {"bad_words": [1] * 60_000},
        {"prompt": [1.5] * 60_000},
        {"prompt": [[1.5]] * 60_000},
        {"logit_bias": {str(i): "x" for i in range(60_000)}},
        {f"key{i}": 1 for i in range(60_000)},
        {"structured_outputs": {"choice": [1] * 60_000}},
        {"structured_outputs": {f"key{i}": 1 for i in range(60_000)}},
    ],
)
def test_a_body_of_many_errors_is_refused_at_the_first(make_app, change):
    """Each error described is 10 microseconds of every thread."""
    app = make_app()
    error_of(app.post("/v1/completions", {**COMPLETION, "temperature": "warm"}), 400)
    assert refusal_seconds(app, "/v1/completions", {**COMPLETION, **change}) < 0.2


def test_chats_and_metadata_of_many_errors_are_refused_at_the_first(make_app):
    app = make_app()
    for change in (
        {"messages": [1] * 60_000},
        {"metadata": {str(i): 1 for i in range(60_000)}},
        {"documents": [{str(i): 1 for i in range(60_000)}]},
    ):
        assert refusal_seconds(app, "/v1/chat/completions", {**CHAT, **change}) < 0.2


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"logit_bias": {"hello": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["hello", ""]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, 2, 10**6]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["hello"] * 1025}, "prompt"),
        ({"seed": 2**64}, "seed"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"unknown_field": 1}, "unknown_field"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"guided_json": {}}, "guided_json"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_a_completion_that_cannot_be_honoured_names_the_field(app, change, param):
    error = error_of(app.post("/v1/completions", {**COMPLETION, **change}), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_fields_that_ask_for_nothing_pass(app):
    neutral = {"suffix": None, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0}
    assert app.post("/v1/completions", {**COMPLETION, **neutral}).status_code == 200


def test_a_prompt_longer_than_the_context_says_by_how_much(app):
    error = error_of(app.post("/v1/completions", {"prompt": "hello " * 100}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "64 tokens" in error["message"]


def test_a_prompt_far_too_long_is_refused_before_it_is_tokenized(app, monkeypatch):
    monkeypatch.setattr(app.server.encoder, "_backend", None)  # would raise if it were used
    error = error_of(app.post("/v1/completions", {"prompt": "x" * 10**6}), 400)
    assert error["code"] == "context_length_exceeded"


def test_an_unknown_model_is_404_and_the_known_ones_are_named(app):
    error = error_of(app.post("/v1/completions", {**COMPLETION, "model": "gpt"}), 404)
    assert error["code"] == "model_not_found"
    assert "this server has m" in error["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a"} trailing',
        b"\x00\x01\x02",
    ],
)
def test_a_malformed_body_is_400(app, raw):
    headers = {"content-type": "application/json"}
    error_of(app.request("POST", "/v1/completions", content=raw, headers=headers), 400)


def test_another_content_type_is_400_and_says_which_is_wanted(app):
    error = error_of(app.request("POST", "/v1/completions", content=b'{"prompt": "a"}'), 400)
    assert "application/json" in error["message"]


def test_a_null_byte_in_the_prompt_is_text_like_any_other(app):
    assert app.post("/v1/completions", {"prompt": "a\x00b"}).status_code == 200


def test_unknown_paths_and_methods_get_the_error_object_too(app):
    error_of(app.get("/v2/nothing"), 404)
    error_of(app.get("/v1/completions"), 405)


def test_the_engines_refusals_name_the_field_they_begin_with():
    assert from_engine(EngineError("top_k=-5 must be 0 or more")).param == "top_k"
    assert from_engine(EngineError("structured_outputs: no such grammar")).param == (
        "structured_outputs"
    )
    assert from_engine(EngineError("structured_outputs cannot be followed")).param == (
        "structured_outputs"
    )
    assert from_engine(EngineError("the prompt is empty")).param is None


def test_a_failure_of_the_server_is_500_without_its_details(app, monkeypatch, caplog):
    def broken(*args, **options):
        raise RuntimeError("secret")

    monkeypatch.setattr(app.engine, "generate", broken)
    error = error_of(app.post("/v1/completions", COMPLETION), 500)
    assert "secret" not in json.dumps(error)
    assert "secret" in caplog.text


def test_a_dead_engine_is_told_everywhere(app):
    app.engine.die(RuntimeError("out of memory"))
    assert error_of(app.post("/v1/completions", COMPLETION), 503)["code"] == "engine_dead"
    error_of(app.get("/health"), 503)
    assert app.get("/ready").status_code == 503


def test_an_engine_that_dies_ends_running_streams_with_an_error(make_app):
    app = make_app({"max_model_len": 4096, "step_seconds": 0.01})

    original = app.engine._step
    app.engine._step = lambda: (app.engine.__dict__.update(_error=RuntimeError("x")), original())[1]
    reply = app.post("/v1/completions", {"prompt": "hello", "max_tokens": 4000, "stream": True})
    blocks = [block for block in reply.text.split("\n\n") if block]
    assert reply.status_code == 200
    assert blocks[-1] == "data: [DONE]"
    assert json.loads(blocks[-2][6:])["error"]["code"] == "engine_dead"
