"""Conversations become prompts; what a template cannot take is refused in words."""

import json
from pathlib import Path
from typing import Any

import pytest

from fornax.config.errors import EngineError
from fornax.llm.text import ChatTemplate

_PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
_PARTS = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
_BOTH = (
    "{% for m in messages %}{% set content = m['content'] %}{% if content is string %}{{ content }}"
    "{% else %}{% for p in content %}[{{ p['text'] }}]{% endfor %}{% endif %}{% endfor %}"
)
_TWO = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]


def _user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (_PLAIN, "a", "<user>a"),
        (_PLAIN, _TWO, "<user>a\nb"),
        (_PARTS, "ab", "[ab]"),
        (_PARTS, _TWO, "[a][b]"),
        (_BOTH, "ab", "ab"),
        (_BOTH, _TWO, "[a][b]"),
    ],
)
def test_content_comes_as_the_template_reads_it(source: str, content: Any, expected: str) -> None:
    assert ChatTemplate(source).render(_user(content)) == expected


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        (_user([{"type": "image_url", "image_url": {"url": "x"}}]), "image_url is not supported"),
        (_user([{"type": "text"}]), "text=None"),
        (_user([7]), "type None"),
        ([{"content": "a"}], "with a role"),
        (_user({1, 2}), "given a set"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "arguments of 'f' are not JSON",
        ),
    ],
)
def test_messages_that_cannot_be_read_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        ChatTemplate(_PLAIN).render(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system') }}",
        "{{ messages + 1 }}",
        "{{ 1 // 0 }}",
        "{{ missing.attribute }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ],
)
def test_a_template_that_fails_or_breaks_out_refuses_the_conversation(source: str) -> None:
    with pytest.raises(EngineError, match="refuses this conversation"):
        ChatTemplate(source).render(_user("a"))


def test_a_template_that_is_no_jinja_is_refused() -> None:
    with pytest.raises(EngineError, match="is not Jinja"):
        ChatTemplate("{% for %}")


def test_arguments_of_calls_become_objects() -> None:
    source = "{% for c in messages[0].tool_calls %}{{ c.function.arguments.x }}{% endfor %}"
    calls = [{"function": {"name": "f", "arguments": text}} for text in ('{"x": "ü"}', "")]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
    assert ChatTemplate(source).render(messages) == "ü"
    assert calls[0]["function"]["arguments"] == '{"x": "ü"}'


def test_the_final_message_is_left_open() -> None:
    messages = [*_user("q"), {"role": "assistant", "content": "so far "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    source = _PLAIN + "</s>"
    assert ChatTemplate(source).render(messages, **options) == "<user>q<assistant>so far "
    trimmed = source.replace("m.content", "m.content | trim")
    assert ChatTemplate(trimmed).render(messages, **options) == "<user>q<assistant>so far"
    with pytest.raises(EngineError, match="does not show"):
        ChatTemplate("{{ messages[0].content }}").render(messages, **options)
    with pytest.raises(EngineError, match="no content"):
        ChatTemplate(source).render([{"role": "assistant"}], **options)
    with pytest.raises(EngineError, match="add_generation_prompt"):
        ChatTemplate(source).render(messages, continue_final_message=True)


def test_one_of_several_templates_is_picked() -> None:
    template = ChatTemplate({"default": "d", "tool_use": "t"})
    assert template.render(_user("a")) == "d"
    assert template.render(_user("a"), tools=[{"type": "function"}]) == "t"
    with pytest.raises(EngineError, match="named 'default'; it has rag, tool_use"):
        ChatTemplate({"tool_use": "t", "rag": "r"}).render(_user("a"))


def test_files_are_found_in_their_order(tmp_path: Path) -> None:
    assert ChatTemplate.find(tmp_path) is None
    config = {"chat_template": "config {{ eos_token }}", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = ChatTemplate.find(tmp_path)
    assert found is not None
    assert found.render(_user("a")) == "config </s>"
    assert found.with_source("own {{ eos_token }}").render(_user("a")) == "own </s>"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "older"}))
    (tmp_path / "chat_template.jinja").write_text("newest {{ eos_token }}")
    found = ChatTemplate.find(tmp_path)
    assert found is not None
    assert found.render(_user("a")) == "newest </s>"
    (tmp_path / "chat_template.jinja").unlink()
    found = ChatTemplate.find(tmp_path)
    assert found is not None
    assert found.render(_user("a")) == "older"


@pytest.mark.parametrize("text", ["{", "[]", '{"chat_template": [1]}'])
def test_damaged_files_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(EngineError, match=r"tokenizer_config\.json"):
        ChatTemplate.find(tmp_path)


def test_marks_of_generation_are_told_by_their_spans() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "A:{% generation %}{{ m.content }}.{% endgeneration %}"
        "{% else %}U:{{ m.content }}.{% endif %}{% endfor %}"
    )
    template = ChatTemplate(source)
    chat = [*_user("a"), {"role": "assistant", "content": "bc"}, *_user("d")]
    text, spans = template.render_marked(chat)
    assert text == template.render(chat, add_generation_prompt=False) == "U:a.A:bc.U:d."
    assert [text[a:b] for a, b in spans] == ["bc."]
    assert ChatTemplate("{{ messages[0].content }}").render_marked(chat) == ("a", [])
