"""`/v1/chat/completions`: the template, shapes of answers and streams, what is refused."""

import json

import pytest

from fornax.llm.text import ChatTemplate

MESSAGES = [{"role": "user", "content": "hello world"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def events(text):
    """The JSON objects of a stream, which must end with [DONE]."""
    blocks = [block for block in text.split("\n\n") if block]
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block[len("data: ") :]) for block in blocks[:-1]]


def ask(app, **fields):
    return app.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, **fields})


def prompt_of(app, **fields):
    """The text that a chat's prompt is."""
    reply = ask(app, return_prompt_text=True, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()["prompt_text"]


def test_answers_with_a_message(make_app):
    app = make_app({"reply": "this is a test"})
    body = ask(app, max_tokens=5).json()
    assert body["object"] == "chat.completion"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "this is a test"}
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 5


def test_a_stream_begins_with_the_role_and_says_the_same(make_app):
    app = make_app({"reply": "this is a test"})
    chunks = events(ask(app, stream=True, max_tokens=5).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "this is a test"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["length"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_each_of_n_choices_begins_with_its_role(app):
    chunks = events(ask(app, stream=True, n=2, temperature=1).text)
    firsts = [c["choices"][0] for c in chunks if "role" in c["choices"][0]["delta"]]
    assert [first["index"] for first in firsts] == [0, 1]


def test_a_stream_ends_with_usage_when_asked(app):
    *_, last = events(ask(app, stream=True, stream_options={"include_usage": True}).text)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4


def test_without_a_limit_it_goes_on_to_the_end_of_the_context(app):
    usage = ask(app, max_tokens=None).json()["usage"]
    assert usage["total_tokens"] == app.engine.max_model_len


def test_the_models_own_limit_is_a_default(make_app):
    app = make_app(override_generation_config={"max_tokens": 3, "temperature": 0.5})
    assert ask(app, max_tokens=None).json()["usage"]["completion_tokens"] == 3
    assert ask(app).json()["usage"]["completion_tokens"] == 4


def test_logprobs_come_with_bytes_and_the_most_likely_tokens(app):
    content = ask(app, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    entry = content[0]
    assert bytes(entry["bytes"]).decode() == entry["token"]
    assert entry["logprob"] == -0.5
    [top] = entry["top_logprobs"]
    assert top["token"] == entry["token"]


def test_logprobs_stream_with_their_tokens(app):
    chunks = events(ask(app, logprobs=True, stream=True).text)
    counts = [len((c["choices"][0]["logprobs"] or {"content": []})["content"]) for c in chunks]
    assert counts == [0, 1, 1, 1, 1]


def test_the_prompt_is_what_the_template_makes(app):
    assert prompt_of(app) == "user: hello world\nassistant: "
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]
    messages = [{"role": "user", "content": parts}]
    assert prompt_of(app, messages=messages) == "user: hello\nworld\nassistant: "


def test_a_message_can_be_continued(app):
    messages = [*MESSAGES, {"role": "assistant", "content": "this is"}]
    prompt = prompt_of(app, messages=messages, continue_final_message=True)
    assert prompt == "user: hello world\nassistant: this is"


def test_variables_of_the_template_come_from_the_request_before_the_server(make_app):
    app = make_app(default_chat_template_kwargs={"mood": "dull"})
    assert "[dull]" in prompt_of(app)
    assert "[glad]" in prompt_of(app, chat_template_kwargs={"mood": "glad"})


def test_a_requests_template_is_taken_only_where_it_is_trusted(make_app):
    own = {"chat_template": "{{ messages[0].content }}"}
    refused = ask(make_app(), **own)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template"
    trusting = make_app(trust_request_chat_template=True)
    assert prompt_of(trusting, **own) == "hello world"
    assert ask(trusting, chat_template="{% if %}").json()["error"]["param"] == "chat_template"


def test_the_servers_template_goes_before_the_models(make_app, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("<{{ messages[0].content }}>")
    assert prompt_of(make_app(chat_template=str(file))) == "<hello world>"
    assert prompt_of(make_app(chat_template="<<{{ messages[0].content }}>>")) == "<<hello world>>"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "bad", "content": "x"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": []}, "functions"),
        ({"store": True}, "store"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "other"}},
            },
            "tool_choice",
        ),
    ],
)
def test_what_cannot_be_honoured_names_the_field(app, change, param):
    reply = ask(app, **change)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_a_model_without_a_template_says_what_to_do(make_app):
    app = make_app({"chat_template": None})
    error = ask(app).json()["error"]
    assert "--chat-template" in error["message"]


def test_a_chat_tokenizes_as_it_is_served(app):
    tokens = app.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    served = ask(app, return_token_ids=True).json()["prompt_token_ids"]
    assert tokens == served


def test_special_tokens_of_the_template_become_tokens(make_app, tokenizer):
    app = make_app({"chat_template": ChatTemplate("<|endoftext|>{{ messages[0].content }}")})
    ids = ask(app, return_token_ids=True).json()["prompt_token_ids"]
    assert ids[0] == tokenizer.eos_id
