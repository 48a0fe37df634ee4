"""Which parser reads a model's tool calls, and the JSON schema that makes it write one."""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fornax.config.errors import EngineError
from fornax.llm.text.parsing import Arguments, Content, Event, Start, ToolParser, split
from fornax.llm.text.tool_json import JsonToolParser, JsonToolStyle, NamedToolParser

__all__ = ["NEEDS_SPECIAL_TOKENS", "TOOL_PARSERS", "forced_parser", "forced_schema", "tool_parser"]


_LIST = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(")
_MAY_BE_LIST = re.compile(r"\s*(\[\s*([A-Za-z_][\w.]*\s*)?)?")


class PythonToolParser:
    """Holds calls back until they are complete: a call can only be read whole.

    With markers, calls stand between them, one per line; without, the whole text is a list of
    calls.
    """

    def __init__(self, begin: str = "", end: str = ""):
        self._begin = begin
        self._end = end
        self._held = ""
        self._in_calls = False
        self._said = False
        self._count = 0

    def push(self, text: str) -> list[Event]:
        """What new text yields."""
        text, self._held = self._held + text, ""
        return self._between_markers(text) if self._begin else self._as_list(text)

    def finish(self) -> list[Event]:
        """What was held back: calls if they can be read, else content."""
        text, self._held = self._held, ""
        if not self._in_calls:
            return [Content(text)] if text else []
        self._in_calls = False
        return self._calls(text, self._begin + text)

    def _as_list(self, text: str) -> list[Event]:
        if self._said:
            return [Content(text)] if text else []
        self._in_calls = self._in_calls or _LIST.match(text) is not None
        if self._in_calls or _MAY_BE_LIST.fullmatch(text):
            self._held = text
            return []
        self._said = True
        return [Content(text)]

    def _between_markers(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            found = split(text, [self._end if self._in_calls else self._begin])
            if found.marker is None:
                held = text if self._in_calls else found.after
                if found.before and not self._in_calls:
                    events.append(Content(found.before))
                self._held = held
                return events
            if self._in_calls:
                events += self._calls(found.before, self._begin + found.before + self._end)
            elif found.before and not (self._count and found.before.isspace()):
                events.append(Content(found.before))
            self._in_calls = not self._in_calls
            text = found.after
        return events

    def _calls(self, text: str, otherwise: str) -> list[Event]:
        try:
            calls = _read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return [Content(otherwise)]
        events: list[Event] = []
        for name, arguments in calls:
            events += [Start(self._count, name), Arguments(self._count, arguments)]
            self._count += 1
        return events


def _read(text: str) -> list[tuple[str, str]]:
    """Names and arguments as JSON; ValueError or SyntaxError for anything but calls."""
    calls: list[tuple[str, str]] = []
    for statement in ast.parse(text.strip()).body:
        value = statement.value if isinstance(statement, ast.Expr) else None
        for call in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
            if not isinstance(call, ast.Call) or call.args:
                raise ValueError("not a call with named arguments")
            if not all(keyword.arg for keyword in call.keywords):
                raise ValueError("not a call with named arguments")
            given = {str(k.arg): _value(k.value) for k in call.keywords}
            try:
                calls.append((ast.unparse(call.func), json.dumps(given, ensure_ascii=False)))
            except TypeError as error:
                raise ValueError("arguments that JSON has not") from error
    if not calls:
        raise ValueError("no calls")
    return calls


def _value(node: ast.expr) -> object:
    """A literal, JSON's own names among them."""
    names = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_value, node.values), strict=True))
    return ast.literal_eval(node)


_HERMES = JsonToolStyle(begin="<tool_call>", end="</tool_call>")

TOOL_PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": lambda: JsonToolParser(_HERMES),
    "llama3_json": lambda: JsonToolParser(JsonToolStyle(begin="<|python_tag|>", bare=True)),
    "mistral": lambda: JsonToolParser(
        JsonToolStyle(begin="[TOOL_CALLS]", named=True, separator="[ARGS]")
    ),
    "olmo3": lambda: PythonToolParser("<function_calls>", "</function_calls>"),
    "phi4_mini_json": lambda: JsonToolParser(JsonToolStyle(begin="functools")),
    "pythonic": PythonToolParser,
}
"""By vLLM's names. Qwen and SmolLM write hermes."""

NEEDS_SPECIAL_TOKENS = frozenset({"llama3_json", "mistral", "hermes", "olmo3"})
"""Parsers whose markers may be special tokens: generate with skip_special_tokens=False."""


def tool_parser(name: str) -> ToolParser:
    """A parser for one text. Raises `EngineError` for an unknown name."""
    if name not in TOOL_PARSERS:
        raise EngineError(
            f"tool_call_parser={name!r} is unknown; use {', '.join(sorted(TOOL_PARSERS))}"
        )
    return TOOL_PARSERS[name]()


def forced_parser(name: str | None = None) -> ToolParser:
    """A parser of text that `forced_schema` made."""
    return JsonToolParser(JsonToolStyle(bare=True)) if name is None else NamedToolParser(name)


def forced_schema(
    tools: Sequence[Mapping[str, Any]], name: str | None = None, *, parallel: bool = True
) -> dict[str, Any]:
    """JSON schema of a text that calls tools and does nothing else.

    `tools` as in OpenAI's requests. With `name` the text is that function's arguments; without
    (tool_choice=required) a list of calls, one if not `parallel`. Raises `EngineError` when there
    is no such tool.
    """
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if name is not None:
        if name not in functions:
            raise EngineError(f"tool_choice: {name} is not among the tools ({list(functions)})")
        return _parameters(functions[name])
    if not functions:
        raise EngineError("tool_choice=required needs tools")
    definitions: dict[str, Any] = {}
    calls = []
    for function in functions.values():
        parameters = dict(_parameters(function))
        for key in ("$defs", "definitions"):
            for defined, schema in parameters.pop(key, {}).items():
                known = definitions.setdefault(key, {}).setdefault(defined, schema)
                if known != schema:
                    raise EngineError(
                        f"tools define {defined} in different ways; give each its own name"
                    )
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **definitions}
    return schema if parallel else {**schema, "maxItems": 1}


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}}
