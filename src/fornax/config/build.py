"""Plain values into typed ones: every key, type and combination is checked, and named in errors."""

import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from fornax.config import schema
from fornax.config.errors import ConfigError, FornaxError
from fornax.config.overrides import Patch, index_of
from fornax.config.place import COMMAND_LINE, Place, Words, kind_of
from fornax.config.suggest import nearest
from fornax.config.text import read_yaml, write_flow

ABSENT = schema.REQUIRED


def build(annotation: object, value: object, place: Place, default: object = ABSENT) -> Any:
    """Return `value` as the annotation says; `default` is what a patch or sparse mapping fills."""
    if isinstance(value, Words):
        return _from_words(annotation, value, place, default)
    for member in _by_fit(annotation, value):
        if schema.is_literal(member):
            for choice in typing.get_args(member):
                if choice == value and type(choice) is type(value):
                    return choice
        elif schema.is_tuple(member):
            if isinstance(value, list | tuple):
                return _tuple(member, value, place)
            if isinstance(value, Patch) and isinstance(default, tuple):
                return _patched_tuple(member, value, place, default)
        elif schema.is_dict(member):
            if isinstance(value, Mapping):
                return _dict(member, value, place, default)
        elif schema.is_config(member):
            if isinstance(value, Mapping):
                return _config(_variant(annotation, value, place, default), value, place, default)
        elif (converted := _scalar(member, value)) is not ABSENT:
            return converted
    if isinstance(value, float) and math.isnan(value):
        raise place.error("is not a number, and no key takes it; write a number", value)
    raise _rejection(annotation, value, place)


def _by_fit(annotation: object, value: object) -> list[Any]:
    """The members of a union, the exact type first: 3 stays an int where int | float is allowed."""
    return sorted(schema.members(annotation), key=lambda member: member is not type(value))


def _scalar(kind: type, value: Any) -> Any:
    """Convert without loss, or return ABSENT; bool is not a number here."""
    if kind is type(None):
        return None if value is None else ABSENT
    if kind is float and type(value) in (int, float):
        try:
            return ABSENT if value != value else float(value)
        except OverflowError:
            return ABSENT
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    return value if kind in (bool, int, str) and type(value) is kind else ABSENT


def _tuple(annotation: object, value: list | tuple, place: Place) -> tuple:
    annotations = schema.element_annotations(annotation, len(value))
    if annotations is None:
        wanted = len(typing.get_args(annotation))
        raise place.error(f"has {len(value)} elements, not the {wanted} this key takes", value)
    return tuple(
        build(each, item, place.child(str(index)))
        for index, (each, item) in enumerate(zip(annotations, value, strict=True))
    )


def _patched_tuple(annotation: object, patch: Patch, place: Place, default: tuple) -> tuple:
    annotations = schema.element_annotations(annotation, len(default)) or ()
    items = list(default)
    for name, value in patch.items():
        index = index_of(name, len(items), place)
        items[index] = build(annotations[index], value, place.child(name), items[index])
    return tuple(items)


def _dict(annotation: object, value: Mapping, place: Place, default: object) -> dict[str, Any]:
    inner = typing.get_args(annotation)[1]
    old = default if isinstance(value, Patch) and isinstance(default, Mapping) else {}
    result = dict(old)
    for name, item in value.items():
        if not isinstance(name, str):
            raise place.error(f"has the key {name!r}, which is not text; put it in quotes")
        result[name] = build(inner, item, place.child(name), old.get(name, ABSENT))
    return result


def _variant(annotation: object, value: Mapping, place: Place, default: object) -> type:
    """Choose the dataclass of a union by the `type` key, else the default's."""
    variants = schema.variants(annotation)
    if len(variants) == 1:
        return variants[0]
    by_name = {name: each for each in variants for name in schema.type_names(each)}
    if "type" not in value:
        if type(default) in variants:
            return type(default)
        raise place.error(f"needs the key type: one of {', '.join(by_name)}")
    chosen = value["type"]
    here = place.child("type")
    name = chosen[0] if isinstance(chosen, Words) and len(chosen) == 1 else chosen
    if isinstance(name, str) and ":" in name:
        name = next((label for label, each in by_name.items() if schema.rest_of(each)), name)
    if not isinstance(name, str) or name not in by_name:
        raise here.error(_choices(name, by_name), chosen)
    return by_name[name]


def _config(cls: type, value: Mapping, place: Place, default: object) -> Any:
    keys, rest = schema.keys_of(cls), schema.rest_of(cls)
    unknown = [name for name in value if name not in keys]
    if unknown and rest is None:
        _reject_unknown(cls, unknown, place)
    base = default if type(default) is cls else ABSENT
    arguments: dict[str, Any] = {}
    if rest is not None:
        base = ABSENT if "type" in value else base
        old = {} if base is ABSENT else getattr(base, rest)
        arguments[rest] = {**old, **{str(n): _untyped(value[n], place.child(n)) for n in unknown}}
    missing = []
    for name, key in keys.items():
        old = key.make_default() if base is ABSENT else getattr(base, name)
        if name in value:
            arguments[name] = build(key.annotation, value[name], place.child(name), old)
        elif old is ABSENT:
            missing.append(place.name(name))
        else:
            arguments[name] = old
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise place.error(
            f"lacks {', '.join(missing)}, which {verb} required ({cls.__name__}); give "
            f"{'it' if len(missing) == 1 else 'them'} in the file or as --{missing[0]}=VALUE"
        )
    try:
        return cls(**arguments)
    except FornaxError as error:
        source = _named(error, value, place).source
        where = f"{place.name()}{source}" if place.name() else place.origin
        raise type(error)(f"{where}: {error}" if where else str(error)) from error


def _named(error: FornaxError, given: Iterable[str], place: Place) -> Place:
    """The place of the given key that a message names first, as `key=`, else that of them all."""
    found = ((re.search(rf"\b{re.escape(key)}=", str(error)), key) for key in given)
    first = min(((match.start(), key) for match, key in found if match), default=None)
    return place.child(first[1]) if first else place


def _untyped(value: object, place: Place) -> object:
    """A value of a key that no dataclass declares, as YAML has it."""
    if isinstance(value, Words):
        plain = [read_yaml(word, place.origin)[0] for word in value]
        return plain[0] if len(plain) == 1 else (plain or True)
    if isinstance(value, Mapping):
        return {str(name): _untyped(item, place.child(str(name))) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_untyped(item, place.child(str(n))) for n, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise place.error(f"is {kind_of(value)}; this key takes text, numbers, lists and mappings")


def _reject_unknown(cls: type, unknown: list[Any], place: Place) -> NoReturn:
    keys = schema.keys_of(cls)
    name = str(unknown[0])
    here = place.child(name)
    if COMMAND_LINE in place.child("type").origin and COMMAND_LINE not in here.origin:
        chosen = schema.type_names(cls)
        raise place.child("type").error(
            f"chose {' or '.join(chosen)}, which has no {', '.join(unknown)} "
            f"({here.origin or 'in the base config'}); it takes {', '.join(keys)}. Remove what it "
            f"lacks from the file, or replace the whole: --{place.name()} '{{type: {chosen[0]}}}'"
        )
    guess = nearest(name, keys)
    if guess:
        hint = f"did you mean {place.name(guess)}? "
    else:
        found = nearest_path(cls, name)
        hint = f"did you mean {place.name(found)}? " if found else ""
    allowed = f"{place.name() or cls.__name__} takes {', '.join(keys)}"
    raise here.error(f"is not a key of {cls.__name__}; {hint}{allowed}")


def nearest_path(cls: type, name: str) -> str | None:
    """The dotted path of a deeper key that has this very name, the shallowest first."""
    level: list[tuple[str, type]] = [("", cls)]
    for _ in range(4):
        deeper: list[tuple[str, type]] = []
        for prefix, each in level:
            for key in schema.keys_of(each).values():
                if key.name == name and prefix:
                    return prefix + key.name
                deeper += [(f"{prefix}{key.name}.", v) for v in schema.variants(key.annotation)]
        level = deeper
    return None


def _from_words(annotation: object, words: Words, place: Place, default: object) -> Any:
    """Give the words of a flag the type that the annotation asks for."""
    parts = schema.members(annotation)
    if len(words) == 1:
        [word] = words
        structured = any(
            schema.is_tuple(part) or schema.is_dict(part) or schema.is_config(part)
            for part in parts
        )
        if structured and word[:1] in ("[", "{"):
            plain, _ = read_yaml(word, place.origin)
            return build(annotation, plain, place, default)
        for kind, parse in _PARSERS.items():
            if kind in parts and (parsed := parse(word)) is not ABSENT:
                return parsed
            if kind is type(None) and (found := _literal(parts, word)) is not ABSENT:
                return found
    for part in parts:
        if schema.is_tuple(part):
            return _tuple(part, [Words((word,)) for word in words], place)
    raise _rejection(annotation, words, place)


def _literal(parts: tuple[object, ...], word: str) -> object:
    for part in filter(schema.is_literal, parts):
        for choice in typing.get_args(part):
            if str(choice) == word:
                return choice
    return ABSENT


def _number(kind: Callable[[str], object]) -> Callable[[str], object]:
    def parse(word: str) -> Any:
        try:
            number = kind(word)
        except ValueError:
            return ABSENT
        return ABSENT if number != number else number

    return parse


_PARSERS: dict[type, Callable[[str], Any]] = {
    type(None): lambda word: None if word.lower() in ("none", "null") else ABSENT,
    bool: lambda word: {"true": True, "false": False}.get(word.lower(), ABSENT),
    int: _number(int),
    float: _number(float),
    Path: Path,
    str: lambda word: word,
}


def _rejection(annotation: object, value: object, place: Place) -> ConfigError:
    parts = schema.members(annotation)
    choices = [c for part in parts if schema.is_literal(part) for c in typing.get_args(part)]
    others = [part for part in parts if not schema.is_literal(part)]
    shown = dict(value) if isinstance(value, Mapping) else value
    if choices and not others:
        return place.error(_choices(shown, choices), shown)
    wanted = " or ".join(
        [_EXPECTED.get(part) or _expected_structure(part) for part in others]
        + ([f"one of {', '.join(map(str, choices))}"] if choices else [])
    )
    kind = "does not fit: " if isinstance(value, Words) else f"is {kind_of(value)}, but "
    return place.error(f"{kind}this key takes {wanted}{_hint(parts, value)}", shown)


def _choices(value: object, allowed: typing.Iterable[object]) -> str:
    names = [str(choice) for choice in allowed]
    guess = nearest(str(value), names)
    hint = f"; did you mean {guess}?" if guess else ""
    return f"is not one of {', '.join(names)}{hint}"


_EXPECTED: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Path: "a path",
    type(None): "null",
}


def _expected_structure(part: Any) -> str:
    if schema.is_config(part):
        return f"a mapping with the keys of {part.__name__}"
    return f"a {'mapping' if schema.is_dict(part) else 'list'} ({schema.type_text(part)})"


def _hint(parts: tuple[object, ...], value: object) -> str:
    if str in parts and isinstance(value, bool | int | float):
        return f"; put it in quotes: '{write_flow(value)}'"
    if bool in parts and str(value).lower() in ("yes", "on", "no", "off", "1", "0"):
        return f"; write {'true' if str(value).lower() in ('yes', 'on', '1') else 'false'}"
    if int in parts and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if value is None:
        return "; leave the key out to keep its default"
    if any(map(schema.is_tuple, parts)) and isinstance(value, str):
        return f"; write [{write_flow(value)}]"
    return ""
