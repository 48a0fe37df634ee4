"""Tool calls and reasoning in chats, whole and streamed."""

import json

import pytest

from fornax.config import EngineError
from fornax.llm.server import ServerConfig
from fornax.llm.server.chat_parser import choose_parsers
from fornax.llm.server.chat_protocol import ChatBody

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
REST = {"type": "function", "function": {"name": "rest"}}
MESSAGES = [{"role": "user", "content": "hello"}]
TWO = (
    'I look. <tool_call>{"name": "look", "arguments": {"place": "here"}}</tool_call>'
    '<tool_call>{"name": "rest", "arguments": {}}</tool_call>'
)
AUTO = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


@pytest.fixture
def says(make_app, tokenizer):
    """Asks a server whose model says a text; the answer, or the events of its stream."""

    def ask(text, config=None, **fields):
        app = make_app({"reply": text, "max_model_len": 4096}, **(config or {}))
        count = len(tokenizer.encode(text))
        body = {"messages": MESSAGES, "max_tokens": count, **fields}
        reply = app.post("/v1/chat/completions", body)
        assert reply.status_code == 200, reply.text
        if not fields.get("stream"):
            return reply.json()["choices"][0]
        blocks = [block[6:] for block in reply.text.split("\n\n") if block]
        assert blocks[-1] == "[DONE]"
        return [json.loads(block)["choices"][0] for block in blocks[:-1]]

    return ask


def joined(choices):
    """The message that a stream's deltas amount to."""
    message = {"content": "", "reasoning": "", "calls": {}}
    for choice in choices:
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", ()):
            known = message["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
            known["name"] += call["function"].get("name", "")
            known["arguments"] += call["function"]["arguments"]
            known.setdefault("id", call.get("id"))
    return message


def test_calls_are_taken_out_of_the_text(says):
    choice = says(TWO, AUTO, tools=[LOOK, REST])
    message = choice["message"]
    assert message["content"].strip() == "I look."
    functions = [call["function"] for call in message["tool_calls"]]
    assert [function["name"] for function in functions] == ["look", "rest"]
    assert json.loads(functions[0]["arguments"]) == {"place": "here"}
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_streamed_calls_are_the_same(says):
    choices = says(TWO, AUTO, tools=[LOOK, REST], stream=True)
    message = joined(choices)
    assert message["content"].strip() == "I look."
    assert [call["name"] for call in message["calls"].values()] == ["look", "rest"]
    assert json.loads(message["calls"][0]["arguments"]) == {"place": "here"}
    assert all(call["id"].startswith("call_") for call in message["calls"].values())


def test_only_one_call_when_parallel_ones_are_not_wanted(says):
    one = {"tools": [LOOK, REST], "parallel_tool_calls": False}
    assert len(says(TWO, AUTO, **one)["message"]["tool_calls"]) == 1
    assert list(joined(says(TWO, AUTO, **one, stream=True))["calls"]) == [0]


def test_with_tool_choice_none_the_text_stays_as_it_is(says):
    choice = says(TWO, AUTO, tools=[LOOK], tool_choice="none")
    assert choice["message"]["content"] == TWO
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_function_gets_the_whole_text_as_its_arguments(says, stream):
    named = {"type": "function", "function": {"name": "look"}}
    found = says('{"place": "x"}', tools=[LOOK], tool_choice=named, stream=stream)
    call = joined(found)["calls"][0] if stream else found["message"]["tool_calls"][0]["function"]
    assert call["name"] == "look"
    assert json.loads(call["arguments"]) == {"place": "x"}


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_are_a_list(says, stream):
    text = '[{"name": "rest", "parameters": {}}]'
    found = says(text, tools=[LOOK, REST], tool_choice="required", stream=stream)
    call = joined(found)["calls"][0] if stream else found["message"]["tool_calls"][0]["function"]
    assert (call["name"], json.loads(call["arguments"])) == ("rest", {})


def chat(**fields):
    return ChatBody(messages=MESSAGES, tools=[LOOK, REST], **fields)


def test_forced_calls_constrain_the_text():
    reading = choose_parsers(
        chat(tool_choice="required", parallel_tool_calls=False), ServerConfig(), ""
    )
    schema = reading.structured.json
    assert schema["maxItems"] == 1
    names = [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]]
    assert names == ["look", "rest"]
    named = {"type": "function", "function": {"name": "look"}}
    named = choose_parsers(chat(tool_choice=named), ServerConfig(), "")
    assert named.structured.json == LOOK["function"]["parameters"]
    assert named.named


def test_an_ending_with_calls_says_so_unless_the_function_was_named(make_app):
    text = '[{"name": "rest", "parameters": {}}]'
    app = make_app({"reply": text, "max_model_len": 4096})
    body = {"messages": MESSAGES, "tools": [REST], "max_tokens": 500, "stop": "]"}
    required = app.post("/v1/chat/completions", {**body, "tool_choice": "required"}).json()
    assert required["choices"][0]["finish_reason"] == "tool_calls"
    named = {"type": "function", "function": {"name": "rest"}}
    named = app.post("/v1/chat/completions", {**body, "tool_choice": named}).json()
    assert named["choices"][0]["finish_reason"] == "stop"


def test_markers_that_are_special_tokens_stay_in_the_text():
    config = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="mistral")
    assert choose_parsers(chat(), config, "").special_tokens
    assert not choose_parsers(chat(tool_choice="none"), config, "").special_tokens


@pytest.mark.parametrize(
    ("fields", "needle"),
    [
        ({"tools": [LOOK]}, "--enable-auto-tool-choice"),
        ({"tools": [LOOK], "tool_choice": "auto"}, "--enable-auto-tool-choice"),
        (
            {
                "tools": [LOOK],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "response_format",
        ),
    ],
)
def test_tools_that_cannot_be_found_are_refused(app, fields, needle):
    reply = app.post("/v1/chat/completions", {"messages": MESSAGES, **fields})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tool_choice"
    assert needle in reply.json()["error"]["message"]


def test_tools_reach_the_template_unless_they_are_to_be_left_out(make_app):
    body = {"messages": MESSAGES, "tools": [LOOK], "tool_choice": "none", "max_tokens": 1}
    body["return_prompt_text"] = True
    with_tools = make_app().post("/v1/chat/completions", body).json()["prompt_text"]
    without = make_app(exclude_tools_when_tool_choice_none=True)
    without = without.post("/v1/chat/completions", body).json()["prompt_text"]
    assert "look" in with_tools
    assert "look" not in without


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_told_apart(says, stream):
    text = "<think>let me see</think>the answer"
    found = says(text, {"reasoning_parser": "qwen3"}, stream=stream)
    message = joined(found) if stream else found["message"]
    assert message["reasoning"] == "let me see"
    assert message["content"] == "the answer"


def test_reasoning_is_left_out_on_request(says):
    text = "<think>let me see</think>the answer"
    config = {"reasoning_parser": "qwen3"}
    assert says(text, config, include_reasoning=False)["message"] == {
        "role": "assistant",
        "content": "the answer",
    }
    streamed = joined(says(text, config, include_reasoning=False, stream=True))
    assert (streamed["reasoning"], streamed["content"]) == ("", "the answer")


def test_calls_after_reasoning_are_found(says):
    config = {**AUTO, "reasoning_parser": "qwen3"}
    found = says(f"<think>hm</think>{TWO}", config, tools=[LOOK, REST])["message"]
    assert found["reasoning"] == "hm"
    assert len(found["tool_calls"]) == 2


def test_an_unknown_parser_is_found_at_the_start(make_app):
    with pytest.raises(EngineError, match="hermes"):
        make_app(enable_auto_tool_choice=True, tool_call_parser="hermas")
    with pytest.raises(EngineError, match="qwen3"):
        make_app(reasoning_parser="qwen4")


def test_a_constraint_holds_after_reasoning_that_the_template_opened():
    config = ServerConfig(reasoning_parser="deepseek_r1")
    wanted = {"messages": MESSAGES, "response_format": {"type": "json_object"}}
    opened = choose_parsers(ChatBody(**wanted), config, "user: hello<think>\n")
    assert opened.constrain_after == "</think>"
    message = opened.make_parser().message("hm</think>{}")
    assert (message["reasoning"], message["content"]) == ("hm", "{}")
    closed = choose_parsers(ChatBody(**wanted), config, "hello<think>\n\n</think>\n\n")
    assert closed.constrain_after == ""
    assert closed.make_parser is None
    free = choose_parsers(ChatBody(messages=MESSAGES), config, "user: hello<think>\n")
    assert free.constrain_after == ""
    assert free.make_parser is not None
