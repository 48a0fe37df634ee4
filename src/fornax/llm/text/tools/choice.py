"""Which parser reads a model's tool calls, and the JSON schema that makes it write one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fornax.config.errors import EngineError
from fornax.llm.text.tools.events import ToolParser
from fornax.llm.text.tools.json_calls import JsonToolParser, JsonToolStyle, NamedToolParser
from fornax.llm.text.tools.python_calls import PythonToolParser

__all__ = ["NEEDS_SPECIAL_TOKENS", "TOOL_PARSERS", "forced_parser", "forced_schema", "tool_parser"]

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
