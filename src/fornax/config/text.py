"""YAML in and out: a strict subset of YAML 1.2 whose keys remember their line.

PyYAML speaks YAML 1.1, where `1e-4` is text, `no` is false and `1:30` is ninety. Here the scalars
are those of the YAML 1.2 core schema; tags, anchors and duplicate keys are errors.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from fornax.config.errors import ConfigError

KeyPath = tuple[str, ...]

_MAX_DEPTH = 64

_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^(?:[-+]?[0-9]+(?:_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_RESOLVERS = (
    ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", _BOOL, list("tTfF")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789")),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 - PyYAML reads a class attribute


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 - PyYAML reads a class attribute

    def ignore_aliases(self, data: object) -> bool:
        return True


for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    plain = float.__repr__(value)
    text = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(plain, plain)
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _represent_list(dumper: yaml.SafeDumper, value: list) -> yaml.SequenceNode:
    nested = any(isinstance(item, dict | list) for item in value)
    return dumper.represent_sequence(
        "tag:yaml.org,2002:seq", value, flow_style=None if nested else True
    )


def _represent_str(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    """Escape the characters that PyYAML writes bare and reads back as a line break or nothing."""
    style = '"' if set(value) & {"\x85", "\u2028", "\u2029", "\ufeff"} else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_str)
_Dumper.add_representer(float, _represent_float)
_Dumper.add_representer(list, _represent_list)


def write_yaml(value: object) -> str:
    """Write plain values as YAML text that `read_yaml` reads back equal."""
    return yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=False,
        width=100,
    )


def printable(text: str) -> str:
    """Escape what would break a line or stay unseen in a message."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def write_flow(value: object) -> str:
    """Write one plain value on one line, as it would be typed after a flag."""
    text = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=float("inf")
    )
    return text.removesuffix("\n").removesuffix("\n...")


def read_yaml(text: str, source: str) -> tuple[Any, dict[KeyPath, int]]:
    """Parse YAML text; return the value and the line of every key path.

    `source` names the text in errors. An empty text is an empty mapping. Raises ConfigError for a
    syntax error, a second document, a duplicate key, a key that is not text, a tag, an anchor or an
    alias, with the line.
    """
    lines: dict[KeyPath, int] = {}
    try:
        loader = _Loader(text)
        _check_events(text, source)
        node = loader.get_single_node()
        value = None if node is None else _value(node, (), lines, source)
        return ({} if value is None else value), lines
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax(error, source)) from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{source} is not YAML text: {reason}; save it as UTF-8") from error


def _syntax(error: yaml.MarkedYAMLError, source: str) -> str:
    mark = error.problem_mark or error.context_mark
    line = f", line {mark.line + 1}" if mark else ""
    problem = ", ".join(part for part in (error.context, error.problem) if part)
    return (
        f"{source}{line}: not valid YAML ({problem}); check the indentation, the colons "
        "and the quotes near this line"
    )


def _check_events(text: str, source: str) -> None:
    """Refuse what a config has no use for, before any value is made of it."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MAX_DEPTH:
            raise ConfigError(
                f"{source}, line {line}: more than {_MAX_DEPTH} levels of lists and mappings; "
                "check the brackets"
            )
        if getattr(event, "anchor", None):
            raise ConfigError(
                f"{source}, line {line}: anchors and aliases (&{event.anchor}) are not used in a "
                "config; write the values out"
            )
        if getattr(event, "tag", None):
            raise ConfigError(
                f"{source}, line {line}: the tag {event.tag} is not used in a config; write a "
                "plain value"
            )


def _value(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], source: str) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, lines, source)
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, child in enumerate(node.value):
            here = (*path, str(index))
            lines[here] = child.start_mark.line + 1
            items.append(_value(child, here, lines, source))
        return items
    assert isinstance(node, yaml.ScalarNode)
    return _scalar(node, source)


def _mapping(
    node: yaml.MappingNode, path: KeyPath, lines: dict[KeyPath, int], source: str
) -> dict[str, object]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = _scalar(key_node, source) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            scalar = isinstance(key_node, yaml.ScalarNode)
            shown = printable(key_node.value) if scalar else "a list or mapping"
            raise ConfigError(
                f"{source}, line {line}: the key {shown} is not text; put it in quotes"
            )
        here = (*path, key)
        if key in mapping:
            raise ConfigError(
                f"{source}: the key {printable('.'.join(here))} is given twice, on lines "
                f"{lines[here]} and {line}; keep one"
            )
        lines[here] = line
        mapping[key] = _value(value_node, here, lines, source)
    return mapping


def _scalar(node: yaml.ScalarNode, source: str) -> Any:
    kind = node.tag.rpartition(":")[2]
    text: str = node.value
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return _integer(text, f"{source}, line {node.start_mark.line + 1}")
    if kind == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _integer(text: str, where: str) -> int:
    try:
        return int(text, 0 if text[:2].lower() in ("0x", "0o") else 10)
    except ValueError as error:
        raise ConfigError(
            f"{where}: an integer of {len(text)} digits is too long to read; no key takes it"
        ) from error


def origins(lines: Mapping[KeyPath, int], source: str) -> dict[KeyPath, str]:
    """Name the place of every key path, for errors."""
    return {path: f"{source}, line {line}" for path, line in lines.items()}
