"""Calls and content come apart, however the text is cut; arguments arrive as they are written."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fornax.config.errors import EngineError
from fornax.data import train_bpe
from fornax.llm.sampling_params import StructuredOutputsParams
from fornax.llm.structured import GrammarCompiler
from fornax.llm.text.parsing import Arguments, Call, Content, Event, Start, ToolParser, gather
from fornax.llm.text.tools import forced_parser, forced_schema, tool_parser

_F = Call("f", '{"a": 1}')
_G = Call("g", '{"b": {"c": "}\\"]"}}')
_FT = '{"name": "f", "arguments": {"a": 1}}'
_GT = '{"name": "g", "arguments": {"b": {"c": "}\\"]"}}}'

_CASES: list[tuple[str, str, tuple[str, list[Call]]]] = [
    ("hermes", "just < text", ("just < text", [])),
    ("hermes", "a <tool_call>\n" + _FT + "\n</tool_call>", ("a ", [_F])),
    (
        "hermes",
        f"<tool_call>\n{_FT}\n</tool_call>\n<tool_call>{_GT}</tool_call>\n",
        ("", [_F, _G]),
    ),
    ("hermes", f"<tool_call>{_FT}</tool_call>\nand", ("\nand", [_F])),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", [_F])),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", [Call("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}', ("", [Call("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', ("", [_F])),
    ("hermes", '<tool_call>{"x": 1}</tool_call>', ('{"x": 1}', [])),
    ("hermes", "<tool_call>oops</tool_call>", ("oops</tool_call>", [])),
    ("hermes", '<tool_call>{"nam', ('{"nam', [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a"', ("", [Call("f", '{"a"')])),
    ("hermes", "ends <tool_", ("ends <tool_", [])),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', ("", [_F])),
    ("llama3_json", f"<|python_tag|>{_FT}; {_GT}", ("", [_F, _G])),
    ("llama3_json", "Well, {" + "}", ("Well, {}", [])),
    ("llama3_json", ' {"answer": 3}', ('{"answer": 3}', [])),
    ("mistral", f"[TOOL_CALLS] [{_FT}, {_GT}]", ("", [_F, _G])),
    ("mistral", f"[TOOL_CALLS] [{_FT}][TOOL_CALLS][{_GT}]", ("", [_F, _G])),
    ("phi4_mini_json", f"functools[{_FT}]\nDone", ("Done", [_F])),
    (
        "mistral",
        'so [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}',
        ("so ", [_F, Call("g", '{"b": 2}')]),
    ),
    ("mistral", "[TOO", ("[TOO", [])),
    ("phi4_mini_json", f"functools[{_FT}, {_GT}]", ("", [_F, _G])),
    ("pythonic", '[f(a=1), g(b={"c": "}\\"]"})]', ("", [_F, _G])),
    ("pythonic", "[x.y(a=[true, None, -1.5])]", ("", [Call("x.y", '{"a": [true, null, -1.5]}')])),
    ("pythonic", "[f(a=open('x'))]", ("[f(a=open('x'))]", [])),
    ("pythonic", "[1, 2] is a list", ("[1, 2] is a list", [])),
    ("pythonic", "text [f(a=1)]", ("text [f(a=1)]", [])),
    ("pythonic", "[f(a=1", ("[f(a=1", [])),
    ("olmo3", 'a<function_calls>\nf(a=1)\ng(b={"c": "}\\"]"})\n</function_calls>', ("a", [_F, _G])),
    ("olmo3", "<function_calls>f(</function_calls>b", ("<function_calls>f(</function_calls>b", [])),
]


def _read(parser: ToolParser, pieces: list[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return [*events, *parser.finish()]


def _pieces(text: str, cuts: set[int]) -> list[str]:
    places = [0, *sorted(cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(places)]


@pytest.mark.parametrize(("name", "text", "expected"), _CASES)
@settings(max_examples=15)
@given(data=st.data())
def test_calls_do_not_depend_on_the_pieces(
    name: str, text: str, expected: tuple[str, list[Call]], data: st.DataObject
) -> None:
    for cuts in (set(), set(range(len(text))), data.draw(st.sets(st.integers(0, len(text))))):
        assert gather(_read(tool_parser(name), _pieces(text, cuts))) == expected


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_CALLS = st.lists(
    st.tuples(st.text("fgh_", min_size=1), st.dictionaries(st.text(), _JSON, max_size=3)),
    min_size=1,
    max_size=3,
)


@given(calls=_CALLS, indent=st.sampled_from([None, 1]), cuts=st.sets(st.integers(0, 200)))
@example(calls=[("f", {"name": "g", "arguments": {}})], indent=None, cuts=set())
def test_any_arguments_come_back(
    calls: list[tuple[str, dict[str, Any]]], indent: int | None, cuts: set[int]
) -> None:
    written = [{"name": name, "arguments": arguments} for name, arguments in calls]
    texts = [json.dumps(call, indent=indent, ensure_ascii=False) for call in written]
    forms = {
        "hermes": "".join(f"<tool_call>\n{text}\n</tool_call>\n" for text in texts),
        "llama3_json": ";".join(texts),
        "mistral": f"[TOOL_CALLS][{', '.join(texts)}]",
    }
    for name, text in forms.items():
        pieces = _pieces(text, {cut for cut in cuts if cut < len(text)})
        content, found = gather(_read(tool_parser(name), pieces))
        assert content == ""
        assert [(call.name, json.loads(call.arguments)) for call in found] == calls


def test_names_and_arguments_stream() -> None:
    parser = tool_parser("hermes")
    assert parser.push("hi <tool") == [Content("hi ")]
    assert parser.push('_call>{"name": "f", "argu') == [Start(0, "f")]
    assert parser.push('ments": {"a": ') == [Arguments(0, '{"a":')]
    assert parser.push("12") == [Arguments(0, " 12")]
    assert parser.push("}}</tool_call>") == [Arguments(0, "}")]
    assert parser.finish() == []


def test_an_unknown_parser_is_refused() -> None:
    with pytest.raises(EngineError, match="use hermes"):
        tool_parser("other")


_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/n"}},
                "required": ["a"],
                "additionalProperties": False,
                "$defs": {"n": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "g"}},
]


def _takes(schema: dict[str, Any], text: str) -> bool:
    tokenizer = train_bpe(['[{"name": "f", "parameters": {"a": 1}}]'], 300)
    compiler = GrammarCompiler(tokenizer.backend, 300, [tokenizer.eos_id or 0], seconds=240)
    grammar = compiler.compile(StructuredOutputsParams(json=schema))
    compiler.close()
    ids = [*map(int, tokenizer.encode(text)), tokenizer.eos_id or 0]
    return all(grammar.advance(token) for token in ids)


def test_a_forced_call_is_one_of_the_tools() -> None:
    schema = forced_schema(_TOOLS)
    one = '{"name": "f", "parameters": {"a": 1}}'
    both = f'[{one}, {{"name": "g", "parameters": {{}}}}]'
    assert _takes(schema, both)
    assert not _takes(schema, "[]")
    assert not _takes(schema, '[{"name": "h", "parameters": {}}]')
    assert not _takes(schema, '[{"name": "f", "parameters": {"a": "x"}}]')
    single = forced_schema(_TOOLS, parallel=False)
    assert _takes(single, f"[{one}]")
    assert not _takes(single, both)
    content, calls = gather(_read(forced_parser(), list(both)))
    assert (content, calls) == ("", [_F, Call("g", "{}")])


def test_a_named_call_is_the_functions_arguments() -> None:
    schema = forced_schema(_TOOLS, "f")
    assert _takes(schema, '{"a": 1}')
    assert not _takes(schema, "{}")
    assert gather(_read(forced_parser("f"), list('{"a": 1}'))) == ("", [_F])


def test_tools_that_cannot_be_called_are_refused() -> None:
    with pytest.raises(EngineError, match="not among the tools"):
        forced_schema(_TOOLS, "h")
    with pytest.raises(EngineError, match="needs tools"):
        forced_schema([])
    other = json.loads(json.dumps(_TOOLS[0]).replace("integer", "string").replace('"f"', '"k"'))
    with pytest.raises(EngineError, match="define n in different ways"):
        forced_schema([*_TOOLS, other])
