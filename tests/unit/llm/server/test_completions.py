"""`/v1/completions`: shapes of answers, streams, echo, logprobs, several prompts and choices."""

import json

import pytest

PROMPT = "hello world"


def events(text):
    """The JSON objects of a stream, which must end with [DONE]."""
    blocks = [block for block in text.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block[len("data: ") :]) for block in blocks[:-1]]


def test_answers_with_text_and_usage(app):
    reply = app.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "model": "m"})
    body = reply.json()
    assert reply.status_code == 200
    assert body["object"] == "text_completion"
    assert body["model"] == "m"
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
    assert body["choices"][0]["text"] == "hello worldhello worldhello"
    assert body["choices"][0]["finish_reason"] == "length"


def test_a_stream_says_the_same_as_the_whole_answer(app):
    request = {"prompt": PROMPT, "max_tokens": 7}
    whole = app.post("/v1/completions", request).json()["choices"][0]
    reply = app.post("/v1/completions", {**request, "stream": True})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(reply.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * 6 + ["length"]
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_stream_ends_with_usage_when_asked(app):
    options = {"include_usage": True}
    request = {"prompt": PROMPT, "max_tokens": 3, "stream": True, "stream_options": options}
    *chunks, last = events(app.post("/v1/completions", request).text)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3


def test_continuous_usage_counts_up(app):
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = {"prompt": PROMPT, "max_tokens": 3, "stream": True, "stream_options": options}
    chunks = events(app.post("/v1/completions", request).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


def test_choices_are_numbered_over_prompts_and_n(app):
    request = {"prompt": ["hello", "world"], "n": 2, "max_tokens": 2, "temperature": 0.5}
    choices = app.post("/v1/completions", request).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in choices]
    assert texts[0] == texts[1] == "hellohello"
    assert texts[2] == texts[3] != texts[0]


def test_several_prompts_stream_each_its_own_choice(app):
    request = {"prompt": ["hello", "test"], "n": 2, "max_tokens": 3, "stream": True}
    texts = {0: "", 1: "", 2: "", 3: ""}
    for chunk in events(app.post("/v1/completions", {**request, "temperature": 1}).text):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts[0] == texts[1] == "hello" * 3
    assert texts[2] == texts[3] != texts[0]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_first(app, stream):
    request = {"prompt": PROMPT, "max_tokens": 2, "echo": True, "stream": stream}
    reply = app.post("/v1/completions", request)
    objects = events(reply.text) if stream else [reply.json()]
    text = "".join(each["choices"][0]["text"] for each in objects)
    assert text == PROMPT + "hello world"


def test_echo_with_logprobs_scores_prompt_and_completion_as_lm_eval_reads_them(app):
    ids = app.post("/tokenize", {"prompt": "this is a test"}).json()["tokens"]
    request = {"prompt": [ids], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    logprobs = app.post("/v1/completions", request).json()["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(ids) + 1
    assert logprobs["token_logprobs"] == [None, *[-1.0] * (len(ids) - 1), -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {logprobs["tokens"][1]: -1.0}
    text = "".join(logprobs["tokens"])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert text[offset:].startswith(token)


def test_echo_of_no_tokens_only_scores_the_prompt(app):
    request = {"prompt": PROMPT, "max_tokens": 0, "logprobs": 0, "echo": True}
    choice = app.post("/v1/completions", request).json()["choices"][0]
    assert choice["text"] == PROMPT
    assert len(choice["logprobs"]["tokens"]) == 2


def test_logprobs_can_name_token_ids(app):
    request = {"prompt": PROMPT, "max_tokens": 2, "logprobs": 0}
    request["return_tokens_as_token_ids"] = True
    tokens = app.post("/v1/completions", request).json()["choices"][0]["logprobs"]["tokens"]
    ids = app.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    assert tokens == [f"token_id:{number}" for number in ids]


def test_streamed_logprobs_cover_every_token_once(app):
    request = {"prompt": PROMPT, "max_tokens": 4, "logprobs": 0, "stream": True}
    chunks = events(app.post("/v1/completions", request).text)
    offsets = [o for c in chunks for o in c["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == [0, 5, 11, 16]


def test_token_ids_come_on_request(app):
    request = {"prompt": PROMPT, "max_tokens": 3, "return_token_ids": True}
    whole = app.post("/v1/completions", request).json()["choices"][0]
    chunks = events(app.post("/v1/completions", {**request, "stream": True}).text)
    assert whole["prompt_token_ids"] == chunks[0]["choices"][0]["prompt_token_ids"]
    assert "prompt_token_ids" not in chunks[1]["choices"][0]
    streamed = [number for chunk in chunks for number in chunk["choices"][0]["token_ids"]]
    assert streamed == whole["token_ids"]
    assert len(streamed) == 3


def test_a_stop_text_is_named(app):
    request = {"prompt": PROMPT, "max_tokens": 9, "stop": "world"}
    choice = app.post("/v1/completions", request).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "world")


def test_prompt_logprobs_are_by_token_id(app):
    request = {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 0}
    found = app.post("/v1/completions", request).json()["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    [entry] = found[1].values()
    assert entry == {"logprob": -1.0, "rank": 1, "decoded_token": " world"}


def test_a_stream_interval_joins_tokens(app):
    request = {"prompt": PROMPT, "max_tokens": 9, "stream": True, "stream_interval": 4}
    whole = app.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 9}).json()
    chunks = events(app.post("/v1/completions", request).text)
    assert len(chunks) == 3  # one token at once, then four, then the last four
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == whole["choices"][0]["text"]


def test_text_in_a_stream_survives_quotes_and_other_scripts(make_app, tokenizer):
    said = 'a "quote" \\ back\nline \x00 ünïcödé 日本 🙂 \u2028'
    app = make_app({"reply": said})
    count = len(tokenizer.encode(said))
    request = {"prompt": PROMPT, "max_tokens": count, "stream": True}
    whole = app.post("/v1/completions", {**request, "stream": False}).json()
    text = "".join(
        c["choices"][0]["text"] for c in events(app.post("/v1/completions", request).text)
    )
    assert text == whole["choices"][0]["text"]
    assert 'a "quote" \\ back\nline' in text


def test_truncation_keeps_the_end_that_was_asked_for(app):
    request = {"prompt": "hello world this is a test", "max_tokens": 1, "return_token_ids": True}
    ids = app.post("/tokenize", {"prompt": request["prompt"]}).json()["tokens"]
    left = app.post("/v1/completions", {**request, "truncate_prompt_tokens": 2}).json()
    right = {**request, "truncate_prompt_tokens": 2, "truncation_side": "right"}
    right = app.post("/v1/completions", right).json()
    assert left["choices"][0]["prompt_token_ids"] == ids[-2:]
    assert right["choices"][0]["prompt_token_ids"] == ids[:2]


def test_truncation_to_the_context_leaves_room_for_the_answer(app):
    request = {"prompt": "hello " * 500, "max_tokens": 4, "truncate_prompt_tokens": -1}
    usage = app.post("/v1/completions", request).json()["usage"]
    assert usage["prompt_tokens"] == app.engine.max_model_len - 4


def test_the_same_request_id_twice_at_once_is_no_clash(app):
    request = {"prompt": ["hello", "hello"], "max_tokens": 1, "request_id": "mine"}
    reply = app.post("/v1/completions", request).json()
    assert reply["id"] == "cmpl-mine"
    assert len(reply["choices"]) == 2
