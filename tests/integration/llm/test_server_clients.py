"""Clients that others wrote, against the server as a process."""

import asyncio
import json
import time

import httpx
import openai
import pytest

from fornax.llm.server.config import ServerConfig

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


@pytest.fixture
def connect(serve):
    """Starts a server; a client of it."""
    clients = []

    def start(**config):
        server = serve(api_key=["secret"], served_model_name=["tiny", "alias"], **config)
        clients.append(openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret"))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


SIZES = {"block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 64}
TEMPLATE = "{% for message in messages %}{{ message.content }}: {% endfor %}"


@pytest.mark.slow
def test_the_openai_client_completes_chats_and_embeds(connect):
    client = connect(_model=True, chat_template=TEMPLATE, **SIZES)
    until = time.monotonic() + 120
    while httpx.get(str(client.base_url.join("/ready")), timeout=120).status_code != 200:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    prompt = {"model": "alias", "prompt": "the cat: ", "temperature": 0.0}
    whole = client.completions.create(**prompt, max_tokens=5, logprobs=1)
    [completion] = whole.choices
    assert "".join(completion.logprobs.tokens) == completion.text
    assert whole.usage.completion_tokens == 5
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}]}
    asked |= {"temperature": 0.0, "max_tokens": 5}
    chat = client.chat.completions.create(**asked)
    assert chat.choices[0].message.content == completion.text
    stream = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == completion.text
    assert last.usage.completion_tokens == 5
    texts = {"model": "tiny", "input": ["the cat", "two three"]}
    vectors = client.embeddings.create(**texts)
    floats = client.embeddings.create(**texts, encoding_format="float")
    for packed, plain in zip(vectors.data, floats.data, strict=True):
        assert packed.embedding == pytest.approx(plain.embedding, abs=1e-6)
    assert floats.data[0].embedding != floats.data[1].embedding


def test_the_openai_client_understands_what_went_wrong(connect):
    client = connect(max_body_bytes=10_000)
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.completions.create(model="other", prompt="hello")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="hello", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="tiny", prompt="x" * 20_000)
    assert caught.value.status_code == 413
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


@pytest.mark.slow
def test_the_openai_client_calls_tools(connect):
    said = '[{"name": "look", "parameters": {"place": "here"}}]'
    client = connect(_reply=said)
    with client.chat.completions.stream(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        tools=[TOOL],
        tool_choice="required",
        stop="]",
    ) as stream:
        final = stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls
    assert call.function.name == "look"
    assert json.loads(call.function.arguments) == {"place": "here"}
    assert final.choices[0].finish_reason == "tool_calls"


@pytest.mark.slow
def test_a_gigantic_body_is_refused_and_the_server_lives_on(serve):
    server = serve()
    body = b'{"prompt": "' + b"x" * (ServerConfig().max_body_bytes + 1000) + b'"}'
    headers = {"content-type": "application/json"}
    with server.client() as client:
        assert client.post("/v1/completions", content=body, headers=headers).status_code == 413
        assert client.post("/v1/completions", json={"prompt": "hello"}).status_code == 200


@pytest.mark.slow
def test_adapters_named_at_the_start_are_there_when_it_is_ready(serve, tmp_path):
    server = serve(
        enable_lora=True, lora_modules=[f"small={tmp_path}"], enable_adapter_endpoints=True
    )
    with server.client() as client:
        while client.get("/ready").status_code != 200:
            pass
        names = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert names == ["mock", "small"]
        body = {"model": "small", "prompt": "hello"}
        assert client.post("/v1/completions", json=body).json()["model"] == "small"
        more = {"lora_name": "more", "lora_path": str(tmp_path)}
        assert client.post("/v1/load_lora_adapter", json=more).status_code == 200
        assert client.post("/v1/load_lora_adapter", json=more).status_code == 400
        assert client.post("/v1/unload_lora_adapter", json=more).status_code == 400
        gone = {"lora_name": "more"}
        assert client.post("/v1/unload_lora_adapter", json=gone).status_code == 200
        assert client.post("/v1/unload_lora_adapter", json=gone).status_code == 404


@pytest.mark.slow
def test_an_adapter_that_cannot_be_loaded_stops_the_start(serve):
    server = serve(enable_lora=True, lora_modules=["small=relative/path"])
    assert server.popen.wait(120) == 1
    assert "lora_path=relative/path" in server.log.read_text()


@pytest.mark.slow
def test_many_chats_at_once_each_get_their_own_text(serve):
    server = serve(_max_num_seqs=8)
    texts = [" ".join(["hello", "world", "test"][i % 3] for _ in range(5)) for i in range(24)]

    async def one(client, text):
        body = {"prompt": text, "max_tokens": 5, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            lines = [line[6:] async for line in reply.aiter_lines() if line]
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])

    async def all_of_them():
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            return await asyncio.gather(*[one(client, text) for text in texts])

    for text, answer in zip(texts, asyncio.run(all_of_them()), strict=True):
        assert text.startswith(answer[:5])
