"""Reasoning and answer come apart, however the text is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fornax.config.errors import EngineError
from fornax.llm.text.reasoning import REASONING_PARSERS, reasoning_style

_CASES = [
    ("qwen3", "<think>\na\n\nb\n</think>\n\nanswer\n", ("a\n\nb", "answer\n")),
    ("qwen3", "no thought", ("", "no thought")),
    ("qwen3", "\n<think>\n\n</think>\n\nanswer", ("", "answer")),
    ("qwen3", "<think> cut", ("cut", "")),
    ("qwen3", " <thi", ("", " <thi")),
    ("qwen3", "<think>a</thin", ("a</thin", "")),
    ("deepseek_r1", "a < b\n</think>c </think> d", ("a < b", "c </think> d")),
    ("deepseek_r1", "<think>a</think>b", ("a", "b")),
    ("deepseek_r1", "never ends", ("never ends", "")),
    ("mistral", "[THINK]a[/THINK]b", ("a", "b")),
]


@pytest.mark.parametrize(("name", "text", "expected"), _CASES)
@settings(max_examples=15)
@given(data=st.data())
def test_parts_do_not_depend_on_the_pieces(
    name: str, text: str, expected: tuple[str, str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    parser = reasoning_style(name).parser()
    ends = [*cuts, len(text)]
    found = [parser.push(text[start:end]) for start, end in zip([0, *cuts], ends, strict=True)]
    found.append(parser.finish())
    assert ("".join(f.reasoning for f in found), "".join(f.content for f in found)) == expected


def test_the_prompt_may_have_opened_or_closed_the_reasoning() -> None:
    qwen, deepseek = reasoning_style("qwen3"), reasoning_style("deepseek_r1")
    assert qwen.opened_by("user: hi\nassistant: <think>\n")
    assert not qwen.opened_by("user: hi\nassistant: <think>\n\n</think>\n\n")
    assert not deepseek.opened_by("user: hi\nassistant: <think>\n\n</think>\n\n")
    assert not qwen.opened_by("user: what does <think> mean?\nassistant:")
    assert deepseek.opened_by("user: hi")
    assert deepseek.opened_by("<think>old</think>answer\nuser: more\nassistant:")
    assert qwen.parser(opened=True).push("a</think>b") == ("a", "b")


def test_an_answer_streams_as_it_comes() -> None:
    parser = reasoning_style("qwen3").parser()
    assert parser.push("<think>so ") == ("so", "")
    assert parser.push("it") == (" it", "")
    assert not parser.ended
    assert parser.push("</think>\n") == ("", "")
    assert parser.ended
    assert parser.push("\nyes <") == ("", "yes <")


def test_an_unknown_parser_is_refused() -> None:
    with pytest.raises(EngineError, match="use deepseek_r1"):
        reasoning_style("other")
    assert all(style.begin and style.end for style in REASONING_PARSERS.values())
