"""Typed configs back into plain values, YAML text, and lists of what differs."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fornax.config.place import shorten
from fornax.config.schema import rest_of
from fornax.config.text import write_yaml


class _Absent:
    """What a change shows on the side that lacks the key."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One key that differs between two configs, with its plain values; ABSENT where it lacks."""

    path: str
    old: Any
    new: Any

    def __str__(self) -> str:
        old, new = (repr(v) if v is ABSENT else shorten(v) for v in (self.old, self.new))
        return f"{self.path}: {old} -> {new}"


def to_mapping(config: object) -> dict[str, Any]:
    """Return every key of a config dataclass as plain values that `from_mapping` reads back equal.

    Raises TypeError for a value no config key can hold.
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"{config!r} is not a config; to_mapping takes a dataclass instance")
    return to_plain(config)


def to_plain(value: object, path: str = "") -> Any:
    """Return any config value as plain values; `path` names it in errors."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {
            field.name: to_plain(getattr(value, field.name), f"{path}.{field.name}")
            for field in dataclasses.fields(value)
            if field.init
        }
        rest = rest_of(type(value))
        return plain if rest is None else plain | plain.pop(rest)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item, f"{path}.{index}") for index, item in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{path.lstrip('.')}={value!r} is not a value that a config can hold")


def dump_yaml(config: object) -> str:
    """Write the whole config as YAML text that loads back equal."""
    return write_yaml(to_mapping(config))


def diff(old: object, new: object) -> list[Change]:
    """List the keys in which two configs differ, in the order of the old one."""
    return _diff(to_mapping(old), to_mapping(new), "")


def _diff(old: object, new: object, path: str) -> list[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            change
            for name in dict.fromkeys([*old, *new])
            for change in _diff(
                old.get(name, ABSENT), new.get(name, ABSENT), f"{path}.{name}" if path else name
            )
        ]
    lists = isinstance(old, list) and isinstance(new, list) and len(old) == len(new)
    if lists and any(isinstance(item, dict) for item in (*old, *new)):
        return [
            change
            for index, (a, b) in enumerate(zip(old, new, strict=True))
            for change in _diff(a, b, f"{path}.{index}")
        ]
    same = old == new and isinstance(old, bool) == isinstance(new, bool)
    return [] if same else [Change(path=path, old=old, new=new)]
