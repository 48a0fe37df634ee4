"""Configs of runs as flat keys, and where they differ.

Hundreds of runs have nearly the same text, so it is cut into the blocks of its keys, and what a
block says is remembered.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fornax.config.errors import ConfigError
from fornax.config.text import read_yaml

__all__ = ["difference", "flat_config"]

_MOST_KEYS = 2000
_SECTION = re.compile(r"([A-Za-z_][\w-]*):\Z")

Flat = dict[str, Any]


def flat_config(text: str) -> Flat:
    """The values of a config by dotted keys; lists are values. Empty where it cannot be read."""
    found: Flat = {}
    try:
        for key, value in _flat_text(text, ""):
            found[key] = value
            if len(found) == _MOST_KEYS:
                break
    except (ConfigError, RecursionError):
        return {}
    return found


def difference(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each key with its value in each config, None where it has none; different ones first."""
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = []
    for key in keys:
        values = [config.get(key) for config in configs]
        alike = all(key in config for config in configs) and all(v == values[0] for v in values)
        rows.append({"key": key, "values": values, "same": alike})
    return sorted(rows, key=lambda row: row["same"])


def _flat_text(text: str, prefix: str) -> Iterator[tuple[str, Any]]:
    for block in _blocks(text.split("\n")):
        head, body = block[0], block[1:]
        section = _SECTION.fullmatch(head)
        if section and body and not body[0].lstrip().startswith("-"):
            indent = len(body[0]) - len(body[0].lstrip(" "))
            if all(not line.strip() or line[:indent].isspace() for line in body):
                inner = "\n".join(line[indent:] for line in body)
                yield from _flat_text(inner, f"{prefix}{section[1]}.")
                continue
        for key, value in _block("\n".join(block)):
            yield prefix + key, value


def _blocks(lines: Sequence[str]) -> Iterator[Sequence[str]]:
    """Lines from one that is not indented up to the next."""
    begin = 0
    for number in range(1, len(lines) + 1):
        if number == len(lines) or lines[number][:1] not in ("", " ", "#", "-", "}", "]"):
            block = [line for line in lines[begin:number] if line.strip()]
            begin = number
            if block:
                yield block


@functools.lru_cache(maxsize=8192)
def _block(text: str) -> tuple[tuple[str, Any], ...]:
    value, _ = read_yaml(text, "config.yaml")
    return tuple(_flat(value, "")) if isinstance(value, dict) else ()


def _flat(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, each in value.items():
        if isinstance(each, dict) and each:
            yield from _flat(each, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", each
