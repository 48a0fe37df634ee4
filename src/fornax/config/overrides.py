"""The command line as a patch: flags become a tree that is laid over the mapping from the file.

`--model.num-layers 4`, `--model.num_layers=4`, `--model.tie-embeddings` and
`--no-model.tie-embeddings` are flags. A tuple takes every word up to the next flag, and those after
the same flag again. A word that begins with `[` or `{` is YAML where the key takes a list or a
mapping; it replaces the file's.
"""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from fornax.config import schema
from fornax.config.errors import ConfigError
from fornax.config.place import COMMAND_LINE, Place, Words, shorten
from fornax.config.text import KeyPath, printable


class Patch(dict[str, Any]):
    """A mapping that changes keys one by one; any other value replaces what stood before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """A parsed command line: the patch, the flag behind every key path, the loose words."""

    patch: Patch
    origins: Mapping[KeyPath, str]
    positional: tuple[str, ...]


def resolve(cls: type, dotted: str) -> tuple[KeyPath, tuple[object, ...]]:
    """Find the key path that a flag names and the annotations it may have in any variant.

    Dashes stand for underscores in field names and for themselves in the keys of a dict. Nothing
    found: no annotations, and the path with underscores.
    """
    current: tuple[Any, ...] = (cls,)
    path: list[str] = []
    for segment in dotted.split("."):
        name = segment.replace("-", "_")
        fields, items = _step(current, name, segment)
        path.append(segment if items and not fields else name)
        current = (*fields, *items)
    return tuple(path), current


def _step(
    current: tuple[object, ...], name: str, segment: str
) -> tuple[list[object], list[object]]:
    fields: list[Any] = []
    items: list[Any] = []
    for member in (m for annotation in current for m in schema.members(annotation)):
        if schema.is_config(member) and name in schema.keys_of(member):
            fields.append(schema.keys_of(member)[name].annotation)
        elif schema.is_dict(member):
            items.append(typing.get_args(member)[1])
        elif schema.is_tuple(member) and segment.isdigit():
            args = typing.get_args(member)
            items.append(args[0] if args[1:] == (Ellipsis,) else args[int(segment) % len(args)])
    return fields, items


def parse_flags(cls: type, arguments: Sequence[str]) -> Flags:
    """Read the words of a command line against a config dataclass.

    Raises ConfigError for a flag given twice or without its value. A flag that names no key stays
    in the patch, so that building the config reports it with what is allowed there.
    """
    patch, origins, positional = Patch(), {}, []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            positional.append(word)
            continue
        flag, has_value, inline = word[2:].partition("=")
        path, annotations, negated = _name(cls, flag)
        origin = f"--{printable(flag)} {COMMAND_LINE}"
        if has_value:
            value = Words((inline,))
        else:
            value = _take(flag, annotations, words)
        if negated:
            if value != ("true",):
                raise ConfigError(
                    f"--{flag}={shorten(value)} is not a switch; write --{flag} alone"
                )
            value = Words(("false",))
        _insert(patch, path, value, origins, origin, more=_takes_many(annotations))
    return Flags(patch=patch, origins=origins, positional=tuple(positional))


def names_key(cls: type, flag: str) -> bool:
    """Whether a flag, without its dashes and value, names a key."""
    return bool(_name(cls, flag)[1])


def _name(cls: type, flag: str) -> tuple[KeyPath, tuple[object, ...], bool]:
    path, annotations = resolve(cls, flag)
    if annotations:
        return path, annotations, False
    head, _, tail = flag.rpartition(".")
    for positive in (
        flag[3:] if flag.startswith(("no-", "no_")) else "",
        f"{head}.{tail[3:]}" if head and tail.startswith(("no-", "no_")) else "",
    ):
        found, its_annotations = resolve(cls, positive) if positive else ((), ())
        if _takes_bool(its_annotations):
            return found, its_annotations, True
    return path, annotations, False


def _takes_bool(annotations: tuple[object, ...]) -> bool:
    return any(bool in schema.members(annotation) for annotation in annotations)


def _fits_switch(word: str, annotations: tuple[object, ...]) -> bool:
    """Whether the word after a switch is its value: one that takes other things too takes any."""
    kinds = {member for annotation in annotations for member in schema.members(annotation)}
    return bool(kinds - {bool, type(None)}) or word.lower() in ("true", "false", "none", "null")


def _takes_many(annotations: tuple[object, ...]) -> bool:
    return any(
        schema.is_tuple(member)
        for annotation in annotations
        for member in schema.members(annotation)
    )


def _take(flag: str, annotations: tuple[object, ...], words: list[str]) -> Words:
    """Take the value of a flag off the front of the words that follow it."""
    following = 0
    while following < len(words) and not words[following].startswith("--"):
        following += 1
    if _takes_bool(annotations) and not (following and _fits_switch(words[0], annotations)):
        return Words(("true",))
    if not following:
        if not annotations:
            return Words()
        kinds = " or ".join(dict.fromkeys(schema.type_text(each) for each in annotations))
        raise ConfigError(f"--{flag} needs a value ({kinds}); write --{flag}=VALUE")
    count = following if _takes_many(annotations) else 1
    taken, words[:count] = words[:count], []
    return Words(taken)


def split_arguments(
    own: type, other: type, arguments: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Part a command line into the words of a program itself and the flags of its config.

    A flag goes with its value; loose words, and flags that both have, are the program's own.
    """
    parts: dict[type, list[str]] = {own: [], other: []}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            parts[own].append(word)
            continue
        flag, has_value, _ = word[2:].partition("=")
        target = own if names_key(own, flag) else other
        before = list(words)
        if not has_value:
            _take(flag, _name(target, flag)[1], words)
        parts[target] += [word, *before[: len(before) - len(words)]]
    return parts[own], parts[other]


def patch_from_mapping(cls: type, overrides: Mapping[str, object]) -> Flags:
    """Turn dotted keys with plain values into a patch; a mapping as value replaces the file's."""
    patch, origins = Patch(), {}
    for dotted, value in overrides.items():
        path, _ = resolve(cls, dotted)
        _insert(patch, path, value, origins, f"override {printable(dotted)}")
    return Flags(patch=patch, origins=origins, positional=())


def _insert(
    patch: Patch,
    path: KeyPath,
    value: Any,
    origins: dict[KeyPath, str],
    origin: str,
    *,
    more: bool = False,
) -> None:
    """Put a value into the patch; with `more` the words of a flag given again join the first's."""
    name = printable(".".join(path))
    node = patch
    for depth, segment in enumerate(path[:-1], 1):
        node = node.setdefault(segment, Patch())
        if not isinstance(node, Patch):
            whole = printable(".".join(path[:depth]))
            raise ConfigError(f"{whole} and {name} are both given; put {name} inside {whole}")
    if path[-1] in node:
        before = node[path[-1]]
        if isinstance(before, Patch):
            inner = printable(f"{name}.{next(iter(before))}")
            raise ConfigError(f"{name} and {inner} are both given; put {inner} inside {name}")
        if more and isinstance(before, Words) and not any(w[:1] in "[{" for w in (*before, *value)):
            node[path[-1]] = Words((*before, *value))
            return
        raise ConfigError(
            f"{name} is given twice, as {shorten(before)} and {shorten(value)}; give it once"
        )
    node[path[-1]] = value
    origins[path] = origin


def overlay(base: object, patch: object, place: Place) -> Any:
    """Lay a patch over the plain values of a file; the file's values are not changed."""
    if not isinstance(patch, Patch) or base is None:
        return patch
    if isinstance(base, Mapping):
        merged = dict(base)
        for name, value in patch.items():
            inner = place.child(name)
            merged[name] = overlay(base[name], value, inner) if name in base else value
        return merged
    if isinstance(base, list):
        items = list(base)
        for name, value in patch.items():
            index = index_of(name, len(items), place)
            items[index] = overlay(items[index], value, place.child(name))
        return items
    raise place.error(f"is not a mapping, so its key {next(iter(patch))} cannot be changed", base)


def index_of(name: str, length: int, place: Place) -> int:
    """Read one segment of a key path as the index of a list element."""
    if not (name.isdecimal() and int(name) < length):
        allowed = f"the indexes 0 to {length - 1}" if length else "no elements yet"
        raise place.error(f"has {allowed}, not {name}; to replace the list give it whole")
    return int(name)
