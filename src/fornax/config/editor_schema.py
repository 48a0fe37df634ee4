"""A config dataclass as a JSON Schema (draft 7, which editors' YAML servers read)."""

import inspect
import typing
from pathlib import Path
from typing import Any

from fornax.config import schema
from fornax.config.write import to_plain

__all__ = ["json_schema"]

_TYPES: dict[object, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    Path: {"type": "string"},
    type(None): {"type": "null"},
}


def json_schema(cls: type) -> dict[str, Any]:
    """The files that `load` reads for a config dataclass, as a JSON Schema of draft 7.

    It says what can be said of keys one at a time: names, types, choices, defaults, documentation.
    What a dataclass refuses of several keys together, `load` alone knows.

    Raises:
      TypeError: an annotation that no config field may have.
    """
    definitions: dict[str, Any] = {}
    names = _names(cls)
    for each, name in names.items():
        definitions[name] = _object(each, names)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": cls.__name__,
        **_used(cls, schema.REQUIRED, names, typed=False),
        "definitions": definitions,
    }


def _names(cls: type) -> dict[type, str]:
    """Every dataclass below one with a name of its own, in the order in which they are met."""
    names: dict[type, str] = {}
    level = [cls]
    while level:
        each = level.pop(0)
        if each in names:
            continue
        alike = sum(known.__name__ == each.__name__ for known in names)
        names[each] = each.__name__ + (str(alike + 1) if alike else "")
        for key in schema.keys_of(each).values():
            level += _configs(key.annotation)
    return names


def _configs(annotation: object) -> list[type]:
    found: list[type] = []
    for member in schema.members(annotation):
        if schema.is_config(member):
            found.append(member)
        elif schema.is_tuple(member) or schema.is_dict(member):
            for inner in typing.get_args(member):
                found += _configs(inner)
    return found


def _object(cls: type, names: dict[type, str]) -> dict[str, Any]:
    """The keys of one dataclass, wherever it stands."""
    docs = schema.field_docs(cls)
    properties = {}
    for name, key in schema.keys_of(cls).items():
        default = key.make_default()
        stands: dict[str, Any] = _value(key.annotation, default, names)
        if docs.get(name):
            stands["description"] = docs[name]
        if default is not schema.REQUIRED:
            stands["default"] = to_plain(default)
        properties[name] = stands
    rest = schema.rest_of(cls)
    if rest:
        properties["type"] = {"type": "string", "pattern": ":", "description": "FILE.py:NAME"}
    return {
        "type": "object",
        "description": inspect.getdoc(cls) or "",
        "properties": properties,
        "additionalProperties": rest is not None,
    }


def _used(cls: type, base: object, names: dict[type, str], *, typed: bool) -> dict[str, Any]:
    """A dataclass where it stands: what it lacks of its keys comes from `base`, if that is one.

    `typed` where the key `type` must choose it among others.
    """
    required = [
        name for name, key in schema.keys_of(cls).items() if key.required and type(base) is not cls
    ]
    if typed and "type" not in required:
        required.append("type")
    used: dict[str, Any] = {"$ref": f"#/definitions/{names[cls]}"}
    # A validator of draft 7 ignores what is beside $ref.
    return {"allOf": [used], "required": required} if required else {"allOf": [used]}


def _value(annotation: object, default: object, names: dict[type, str]) -> dict[str, Any]:
    configs = schema.variants(annotation)
    choices = []
    for member in schema.members(annotation):
        if schema.is_config(member):
            typed = len(configs) > 1 and type(default) is not member
            choices.append(_used(member, default, names, typed=typed))
        elif schema.is_literal(member):
            choices.append({"enum": list(typing.get_args(member))})
        elif schema.is_tuple(member):
            choices.append(_array(typing.get_args(member), names))
        elif schema.is_dict(member):
            inner = _value(typing.get_args(member)[1], schema.REQUIRED, names)
            choices.append({"type": "object", "additionalProperties": inner})
        else:
            choices.append(dict(_TYPES[member]))
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def _array(kinds: tuple[object, ...], names: dict[type, str]) -> dict[str, Any]:
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return {"type": "array", "items": _value(kinds[0], schema.REQUIRED, names)}
    items = [_value(each, schema.REQUIRED, names) for each in kinds]
    length = len(items)
    return {"type": "array", "items": items, "minItems": length, "maxItems": length}
