"""What a model is told of a function: OpenAI's form, from signature and docstring."""

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

from fornax.config.errors import ConfigError

__all__ = ["tool_schema"]

_KINDS: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}


def tool_schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """A function in OpenAI's form.

    Raises:
      ConfigError: a parameter without a type, or of one that JSON does not know.
    """
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY or parameter.name not in hints:
            raise ConfigError(
                f"the tool {name} needs a type for {parameter.name}, which must be a parameter by "
                "name: the model is told of both"
            )
        properties[parameter.name] = _kind(name, parameter.name, hints[parameter.name])
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    described = inspect.getdoc(function) or ""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": " ".join(described.split("\n\n")[0].split()),
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def _kind(tool: str, parameter: str, hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        kinds = [_kind(tool, parameter, each) for each in arguments if each is not type(None)]
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    kind = _KINDS.get(origin or hint)
    if kind is None:
        raise ConfigError(
            f"the tool {tool} takes {parameter} as {hint}, which JSON does not know; use str, int, "
            "float, bool, list, dict or a Literal"
        )
    if kind == "array" and arguments:
        return {"type": kind, "items": _kind(tool, parameter, arguments[0])}
    return {"type": kind}
