"""A language model among the models of `fornax host`, over an engine without a model."""

import asyncio
import contextlib
import json
import time
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from tests.mock_engine import MockEngine

from fornax.config import ConfigError, EngineError, ServingError
from fornax.llm.host_entry import LLMEntry
from fornax.llm.server.preprocessing import PromptEncoder


@pytest.fixture
def make_entry(tmp_path, tokenizer):
    """Makes entries; keywords of MockEngine in `engine`, keys of serving.yaml as they are."""
    engines = []
    (tmp_path / "lm").mkdir()

    def make(engine=None, **settings):
        def build(model, config, observer):
            made = MockEngine(tokenizer, max_model_len=64, observer=observer, **(engine or {}))
            engines.append(made)
            return made

        return LLMEntry("lm", tmp_path / "lm", settings, build)

    yield make
    for made in engines:
        made.shutdown()


def _bytes(*texts):
    array = np.empty(len(texts), np.object_)
    array[:] = [text if isinstance(text, bytes) else text.encode() for text in texts]
    return array


def _request(*prompts, parameters=None, **inputs):
    inputs = {"text_input": _bytes(*prompts), **inputs} if prompts else inputs
    parameters = parameters or {}
    return SimpleNamespace(inputs=inputs, parameters=parameters, priority=0, request_id="r-1")


def _sampling(**fields):
    return _bytes(json.dumps(fields))


def _run(entry, *requests):
    async def work():
        await entry.start()
        return [(await entry.infer(each))["text_output"].tolist() for each in requests]

    return asyncio.run(work())


def test_prompts_are_completed_and_echoed_as_tritons_backend_does(make_entry):
    alone = np.array([True])
    four = _sampling(max_tokens=4, temperature=0)
    echoed, bare = _run(
        make_entry(),
        _request("hello world", sampling_parameters=four),
        _request("hello", "this is", sampling_parameters=four, exclude_input_in_output=alone),
    )
    assert len(echoed) == 1
    assert echoed[0].startswith(b"hello world")
    assert len(echoed[0]) > len(b"hello world")
    assert len(bare) == 2
    # The engine repeats its prompt, so four tokens of `hello` are four times the word.
    assert bare[0].split() == [b"hello"] * 4 or bare[0] == b"hello" * 4


def test_parameters_of_the_request_are_fields_too_and_n_makes_outputs(make_entry):
    request = _request("hello", parameters={"max_tokens": 2, "n": 3, "temperature": 1.0})
    (texts,) = _run(make_entry(), request)
    assert len(texts) == 3


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (_request(), "text_input is missing"),
        (_request(text_input=np.zeros(1, np.int32)), "text_input is int32"),
        (_request(b"\xff"), "not UTF-8"),
        (_request("a", stream=np.array([True])), "stream=true takes a call"),
        (_request("a", stream=np.array([1.0])), "send one BOOL"),
        (_request("a", sampling_parameters=_bytes("{")), "not JSON"),
        (_request("a", sampling_parameters=_bytes("[]")), "not a JSON object"),
        (_request("a", sampling_parameters=_bytes("{}", "{}")), "2 elements"),
        (_request("a", sampling_parameters=_sampling(temprature=1)), "temprature is not a field"),
        (_request("a", sampling_parameters=_sampling(temperature=9)), "temperature"),
        (_request("a", sampling_parameters=_sampling(temperature="hot")), "temperature"),
        (_request("a", sampling_parameters=_sampling(max_tokens=100)), "context has 64"),
        (_request("a", parameters={"output_kind": 1}), "output_kind is not a field"),
        (_request("a", "b", parameters={"n": 2, "temperature": 1}), "goes with one prompt"),
        (_request("hello " * 100), "context has 64|the context 64"),
        (_request("a", sampling_parameters=_sampling(stop=["x" * 5000])), "max_stop_characters"),
        (_request(*["a"] * 1025), "max_completions"),
        (_request("a", parameters={"n": 2000, "temperature": 1}), "max_completions"),
        (_request("a", sampling_parameters=_sampling(x=[1] * 140_000)), "max_body_values"),
        (
            _request("a", parameters={"bad_words": [f"w{i}" for i in range(5000)]}),
            "max_bad_word_characters",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(make_entry, request_, message):
    with pytest.raises(ServingError, match=message) as caught:
        _run(make_entry(), request_)
    assert caught.value.code.http == 400


def test_prompts_times_n_have_the_limit_of_the_http_server(make_entry):
    entry = make_entry(request_limits={"max_prompt_tokens": 10})
    many = _request("hello " * 6, parameters={"n": 8, "temperature": 1})
    with pytest.raises(ServingError, match="max_prompt_tokens"):
        _run(entry, many)


def test_openai_routes_answer_beside_and_only_while_it_serves(make_entry):
    entry = make_entry()

    async def work():
        transport = httpx.ASGITransport(entry.routes()["/v1"])
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            early = await client.get("/v1/models")
            assert not entry.ready()
            await entry.start()
            assert entry.ready()
            assert entry.reason() == ""
            models = (await client.get("/v1/models")).json()
            body = {"model": "lm", "prompt": "hello", "max_tokens": 2}
            answer = await client.post("/v1/completions", json=body)
            names = {family.name for family in entry.collect()}
            await entry.stop(1.0)
            late = await client.get("/v1/models")
        return early, models, answer, names, late

    early, models, answer, names, late = asyncio.run(work())
    assert early.status_code == late.status_code == 503
    assert "lm is not ready" in early.json()["error"]["message"]
    assert models["data"][0]["id"] == "lm"
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert "vllm:generation_tokens" in names
    assert not entry.ready()
    assert entry.reason() == "it was unloaded"
    assert list(entry.collect()) == []


def test_a_stop_lets_what_runs_finish(make_entry):
    entry = make_entry(engine={"step_seconds": 0.02})

    async def work():
        await entry.start()
        request = _request("hello", sampling_parameters=_sampling(max_tokens=10))
        running = asyncio.ensure_future(entry.infer(request))
        await asyncio.sleep(0.03)
        started = time.monotonic()
        await entry.stop(240.0)
        with pytest.raises(ServingError) as caught:
            await entry.infer(request)
        return (await running)["text_output"], caught.value.code.http, time.monotonic() - started

    texts, status, seconds = asyncio.run(work())
    assert len(texts) == 1
    assert status == 503
    assert seconds < 120


def test_a_stop_waits_for_what_is_not_in_the_engine_yet(make_entry, monkeypatch):
    entry = make_entry()
    encode = PromptEncoder.encode

    async def work():
        held = asyncio.Event()

        async def late(*words, **options):
            await held.wait()
            return await encode(*words, **options)

        monkeypatch.setattr(PromptEncoder, "encode", late)
        await entry.start()
        running = asyncio.ensure_future(entry.infer(_request("hello")))
        await asyncio.sleep(0)
        stopping = asyncio.ensure_future(entry.stop(240.0))
        await asyncio.sleep(0.2)
        assert not stopping.done()
        held.set()
        await stopping
        return (await asyncio.wait_for(running, 120))["text_output"]

    assert len(asyncio.run(work())) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 8000}, "port is a key of fornax serve that means nothing"),
        ({"max_model_length": 5}, "did you mean max_model_len"),
        ({"max_model_len": "long"}, "max_model_len"),
    ],
)
def test_settings_that_mean_nothing_here_are_refused(make_entry, settings, message):
    with pytest.raises(ConfigError, match=message):
        make_entry(**settings)


def test_a_model_that_is_not_there_is_said_at_the_start(make_entry):
    with pytest.raises(ConfigError, match="is neither a folder nor a GGUF file"):
        asyncio.run(make_entry(model="nowhere").start())


def test_an_engine_that_dies_while_it_compiles_is_said(make_entry, monkeypatch):
    entry = make_entry()
    monkeypatch.setattr(MockEngine, "readiness", lambda self: SimpleNamespace(ready=False))
    monkeypatch.setattr(MockEngine, "error", lambda self: RuntimeError("no memory"))
    with pytest.raises(EngineError, match="died while it compiled: no memory"):
        asyncio.run(entry.start())


def _pieces(entry, request, most=None):
    async def work():
        found = []
        await entry.start()
        async with contextlib.aclosing(entry.stream(request)) as pieces:
            async for outputs, last in pieces:
                found.append((outputs["text_output"].tolist(), last))
                if len(found) == most:
                    break
        return found, entry.ready()

    return asyncio.run(work())


STREAM = np.array([True])


def test_pieces_join_to_the_whole_without_the_prompt(make_entry):
    fields = {"max_tokens": 4, "temperature": 0}
    entry = make_entry()
    request = _request("hello world", stream=STREAM, parameters=fields)
    found, _ = _pieces(entry, request)
    assert [last for _, last in found] == [False] * 3 + [True]
    (whole,) = _run(
        make_entry(), _request("hello world", exclude_input_in_output=STREAM, parameters=fields)
    )
    assert [b"".join(texts[0] for texts, _ in found)] == whole
    assert entry.config()["model_transaction_policy"] == {"decoupled": True}


def test_without_stream_there_is_one_piece_which_has_the_prompt(make_entry):
    found, _ = _pieces(make_entry(), _request("hello", parameters={"max_tokens": 2}))
    ((texts, last),) = found
    assert last
    assert texts[0].startswith(b"hello")


def test_a_piece_has_a_text_for_each_completion(make_entry):
    parameters = {"max_tokens": 2, "n": 3, "temperature": 1.0}
    found, _ = _pieces(make_entry(), _request("hello", stream=STREAM, parameters=parameters))
    assert {len(texts) for texts, _ in found} == {3}


def test_closing_the_pieces_gives_the_request_up(make_entry, monkeypatch):
    given_up = []
    abort = MockEngine._abort
    monkeypatch.setattr(
        MockEngine, "_abort", lambda self, stream: (given_up.append(stream), abort(self, stream))
    )
    entry = make_entry(engine={"step_seconds": 0.2})  # ten seconds for all
    request = _request("hello", stream=STREAM, parameters={"max_tokens": 50})
    found, _ = _pieces(entry, request, most=1)
    assert len(found) == len(given_up) == 1
    assert given_up[0].made < 50


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (_request("a", "b", stream=STREAM), "2 prompts"),
        (_request("a", stream=STREAM, exclude_input_in_output=np.array([False])), "does not go"),
        (_request("a", stream=STREAM, parameters={"max_tokens": "many"}), "is not a number"),
    ],
)
def test_what_cannot_come_in_pieces_is_refused_with_the_reason(make_entry, request_, message):
    with pytest.raises(ServingError, match=message) as caught:
        _pieces(make_entry(), request_)
    assert caught.value.code.http == 400


def test_parameters_may_be_strings_and_words_empty_as_clients_send_them(make_entry):
    parameters = {"max_tokens": "3", "temperature": "0.0", "stop_words": [""], "bad_words": [""]}
    found, _ = _pieces(make_entry(), _request("hello", stream=STREAM, parameters=parameters))
    assert len(found) == 3
