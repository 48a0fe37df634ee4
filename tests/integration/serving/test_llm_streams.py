"""V2 streams of a language model's tiny engine: Triton's gRPC client, and generate over HTTP."""

import asyncio
import json
import queue
import time

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio

from fornax.data import train_bpe
from fornax.models import DecoderConfig, create_decoder, save_pretrained

pytestmark = pytest.mark.slow

SETTINGS = """type: llm
model: weights
block_size: 4
max_num_seqs: 4
max_num_batched_tokens: 4
step_sizes: coarse
max_model_len: 4096
"""
FEW = {"max_tokens": 6, "temperature": "0", "ignore_eos": True}
MANY = {**FEW, "max_tokens": 4000}
PROMPT = "hello world"


@pytest.fixture(scope="module")
def server(tmp_path_factory, start_once):
    root = tmp_path_factory.mktemp("models")
    folder = root / "lm"
    folder.mkdir()
    tokenizer = train_bpe(["hello world this is a test of some text " * 20], 300)
    config = DecoderConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=4096,
        initializer_range=0.3,
    )
    save_pretrained(create_decoder(config, seed=1), folder / "weights")
    tokenizer.backend.save(str(folder / "weights" / "tokenizer.json"))
    (folder / "serving.yaml").write_text(SETTINGS)
    return start_once(root)


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=f"http://{server.address('http')}", timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def text(http):
    """What follows the prompt."""
    body = {"text_input": PROMPT, "parameters": {**FEW, "exclude_input_in_output": True}}
    return http.post("/v2/models/lm/generate", json=body).json()["text_output"]


@pytest.fixture
def stream(server):
    """Triton's client, and what its stream answers."""
    answers = queue.Queue()
    with triton.InferenceServerClient(server.address("grpc")) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        yield client, answers
        client.stop_stream(cancel_requests=True)


def _inputs(prompt, stream):
    inputs = [triton.InferInput("text_input", [1], "BYTES")]
    inputs[0].set_data_from_numpy(np.array([prompt.encode()], np.object_))
    inputs.append(triton.InferInput("stream", [1], "BOOL"))
    inputs[1].set_data_from_numpy(np.array([stream]))
    return inputs


def _pieces(answers, requests):
    """The texts of each request's responses, until each has had its last."""
    texts, ended = {}, set()
    while len(ended) < requests:
        result, error = answers.get(timeout=120)
        assert error is None
        response = result.get_response()
        assert response.id not in ended
        texts.setdefault(response.id, []).append(result.as_numpy("text_output")[0].decode())
        if response.parameters["triton_final_response"].bool_param:
            ended.add(response.id)
    return texts


def _idle(http):
    """Wait until the engine has nothing to do, sooner than what was asked for would have ended."""
    until = time.monotonic() + 120
    while "vllm:num_requests_running" not in (found := http.get("/metrics").text) or any(
        line.startswith("vllm:num_requests_running{") and not line.endswith(" 0.0")
        for line in found.splitlines()
    ):
        assert time.monotonic() < until
        time.sleep(0.02)


def _generated(http):
    found = http.get("/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in found
        if line.startswith("vllm:generation_tokens_total{")
    )


def test_a_stream_has_several_responses_for_a_request(stream, text):
    client, answers = stream
    assert client.get_model_config("lm").config.model_transaction_policy.decoupled
    for name in ("1", "2", "3"):
        client.async_stream_infer("lm", _inputs(PROMPT, True), request_id=name, parameters=FEW)
    found = _pieces(answers, 3)
    assert {"".join(pieces) for pieces in found.values()} == {text}
    assert all(len(pieces) > 1 for pieces in found.values())
    client.async_stream_infer("lm", _inputs(PROMPT, False), request_id="4", parameters=FEW)
    assert _pieces(answers, 1) == {"4": [PROMPT + text]}


def test_the_asynchronous_client_reads_as_the_vllm_backends_sample_does(server, text):
    """Sampling parameters are strings, in a tensor and once more among the parameters."""

    async def ask():
        for name in ("1", "2"):
            sampling = triton.InferInput("sampling_parameters", [1], "BYTES")
            fields = {"temperature": "0.0", "top_p": "0.95", "max_tokens": "6"}
            encoded = json.dumps({**fields, "ignore_eos": True}).encode()
            sampling.set_data_from_numpy(np.array([encoded], np.object_))
            yield {
                "model_name": "lm",
                "inputs": [*_inputs(PROMPT, True), sampling],
                "outputs": [triton.InferRequestedOutput("text_output")],
                "request_id": name,
                "parameters": fields,
            }

    async def read():
        found = {"1": "", "2": ""}
        async with triton_aio.InferenceServerClient(server.address("grpc")) as client:
            async for result, error in client.stream_infer(inputs_iterator=ask()):
                assert error is None
                found[result.get_response().id] += result.as_numpy("text_output")[0].decode()
        return found

    assert asyncio.run(read()) == {"1": text, "2": text}


def test_a_refused_request_leaves_the_stream_open(stream, text):
    client, answers = stream
    wrong = {"max_tokens": 5000}
    client.async_stream_infer("lm", _inputs(PROMPT, True), request_id="1", parameters=wrong)
    assert "context has 4096" in answers.get(timeout=120)[1].message()
    client.async_stream_infer("lm", _inputs(PROMPT, True), request_id="2", parameters=FEW)
    assert "".join(_pieces(answers, 1)["2"]) == text


def test_a_client_that_leaves_a_stream_ends_its_generation(stream, http):
    client, answers = stream
    before = _generated(http)
    client.async_stream_infer("lm", _inputs(PROMPT, True), parameters=MANY)
    answers.get(timeout=120)
    client.stop_stream(cancel_requests=True)
    _idle(http)
    assert _generated(http) - before < 3600


def test_generate_streams_what_completions_say(http, text):
    body = {"model": "lm", "prompt": PROMPT, **FEW, "temperature": 0}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == text
    asked = {"text_input": PROMPT, "parameters": FEW}
    whole = http.post("/v2/models/lm/generate", json=asked).json()
    assert whole == {"model_name": "lm", "model_version": "1", "text_output": PROMPT + text}
    events = http.post("/v2/models/lm/generate_stream", json=asked).text.split("\n\n")
    assert events.pop() == ""
    pieces = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(piece["text_output"] for piece in pieces) == text
    assert [piece["done"] for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) > 1


def test_a_client_that_leaves_the_events_ends_its_generation(http):
    before = _generated(http)
    asked = {"text_input": PROMPT, "parameters": MANY}
    with http.stream("POST", "/v2/models/lm/generate_stream", json=asked) as response:
        next(response.iter_lines())
    _idle(http)
    assert _generated(http) - before < 3600
    assert http.get("/v2/models/lm/stats").json()["model_stats"][0]["inference_stats"]


def test_a_server_that_stops_answers_what_it_streams(http, server):
    asked = {"text_input": PROMPT, "parameters": {**FEW, "max_tokens": 200}}
    with http.stream("POST", "/v2/models/lm/generate_stream", json=asked) as response:
        lines = response.iter_lines()
        next(lines)
        server.popen.terminate()
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["done"]
    assert server.popen.wait(120) == 0
