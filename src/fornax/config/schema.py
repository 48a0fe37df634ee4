"""What a config dataclass says: its keys, their types, defaults and documentation.

A config is a frozen, keyword-only dataclass. The annotations that a field may have are bool,
int, float, str, Path, None-unions, Literal, tuple[X, ...], dict[str, X], dataclasses and unions of
dataclasses told apart by their `type` field. The line of documentation is the string literal that
follows the field. One variant of a union may be open: its `type` is a str, FILE.py:NAME, and its
field with the metadata `rest` (a dict) takes whatever other keys are given.
"""

import ast
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

SCALARS: tuple[type, ...] = (bool, int, float, str, Path)


class _Required:
    """The default of a field that has none."""

    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """One field of a config dataclass; `make_default` returns REQUIRED where there is none."""

    name: str
    annotation: Any
    make_default: Callable[[], Any]

    @property
    def required(self) -> bool:
        return self.make_default() is REQUIRED


@functools.cache
def keys_of(cls: type) -> Mapping[str, Key]:
    """Return the keys of a config dataclass in order; TypeError for an annotation not allowed."""
    hints = typing.get_type_hints(cls)
    keys = {}
    for field in dataclasses.fields(cls):
        if not field.init or field.name == rest_of(cls):
            continue
        annotation = hints[field.name]
        _check_annotation(annotation, f"{cls.__qualname__}.{field.name}")
        keys[field.name] = Key(
            name=field.name, annotation=annotation, make_default=_default_maker(field)
        )
    return types.MappingProxyType(keys)


def _default_maker(field: dataclasses.Field) -> Callable[[], object]:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    value = REQUIRED if field.default is dataclasses.MISSING else field.default
    return lambda: value


def is_config(annotation: object) -> bool:
    """Whether an annotation is a dataclass."""
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def members(annotation: object) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(m for arg in typing.get_args(annotation) for m in members(arg))
    return (annotation,)


def variants(annotation: object) -> tuple[type, ...]:
    """The dataclasses among the members of an annotation."""
    return tuple(member for member in members(annotation) if is_config(member))


def rest_of(cls: type) -> str | None:
    """The field of an open variant that takes the keys that are not fields; None of any other."""
    return next((f.name for f in dataclasses.fields(cls) if f.metadata.get("rest")), None)


def is_tuple(annotation: object) -> bool:
    return typing.get_origin(annotation) is tuple


def is_dict(annotation: object) -> bool:
    return typing.get_origin(annotation) is dict


def is_literal(annotation: object) -> bool:
    return typing.get_origin(annotation) is Literal


def element_annotations(annotation: object, length: int) -> tuple[object, ...] | None:
    """One annotation for each element of a tuple, or None where the length cannot be right."""
    args = typing.get_args(annotation)
    if len(args) == 2 and args[1] is Ellipsis:
        return (args[0],) * length
    return args if len(args) == length else None


def type_names(variant: type) -> tuple[str, ...]:
    """The values of `type:` that choose a variant; of an open one, what they look like."""
    if rest_of(variant):
        return ("FILE.py:NAME",)
    key = keys_of(variant).get("type")
    return tuple(typing.get_args(key.annotation)) if key and is_literal(key.annotation) else ()


def type_text(annotation: Any) -> str:
    """Write an annotation for a reader of the help."""
    parts = members(annotation)
    if len(parts) > 1:
        return " | ".join(type_text(part) for part in parts)
    if annotation is type(None):
        return "null"
    if is_literal(annotation):
        return " | ".join(str(choice) for choice in typing.get_args(annotation))
    if is_tuple(annotation):
        args = typing.get_args(annotation)
        inner = ["..." if arg is Ellipsis else type_text(arg) for arg in args]
        return f"tuple[{', '.join(inner)}]"
    if is_dict(annotation):
        return f"dict[str, {type_text(typing.get_args(annotation)[1])}]"
    return "path" if annotation is Path else annotation.__name__


def _check_annotation(annotation: object, where: str) -> None:
    parts = members(annotation)
    configs = variants(annotation)
    if len(configs) > 1:
        _check_union(configs, where)
    if configs and any(is_dict(part) for part in parts):
        raise TypeError(f"{where}: a union of a dataclass and a dict cannot be told apart")
    for part in parts:
        if is_tuple(part) or is_dict(part):
            inner = typing.get_args(part)
            if is_dict(part) and inner[0] is not str:
                raise TypeError(f"{where}: the keys of a dict are str, not {inner[0]}")
            for arg in inner[1:] if is_dict(part) else inner:
                if arg is not Ellipsis:
                    _check_annotation(arg, where)
        elif not (part in SCALARS or part is type(None) or is_literal(part) or is_config(part)):
            raise TypeError(f"{where}: {part!r} cannot annotate a config field")


def _check_union(configs: tuple[type, ...], where: str) -> None:
    seen: dict[str, type] = {}
    for variant in configs:
        hint = typing.get_type_hints(variant).get("type")
        if rest_of(variant) and hint is str:
            continue
        if not is_literal(hint):
            raise TypeError(f"{where}: {variant.__qualname__} needs a field type: Literal[...]")
        for name in typing.get_args(hint):
            if name in seen:
                raise TypeError(f"{where}: two variants have type {name!r}")
            seen[name] = variant


def field_docs(cls: type) -> dict[str, str]:
    """The string literal after each field, inherited fields included; no source, no docs."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            docs.update(_class_docs(base.__module__).get(base.__qualname__, {}))
    return docs


@functools.cache
def _class_docs(module_name: str) -> dict[str, dict[str, str]]:
    module = sys.modules.get(module_name)
    try:
        tree = ast.parse(inspect.getsource(module)) if module else ast.Module([], [])
    except (OSError, TypeError):
        return {}
    found: dict[str, dict[str, str]] = {}
    _collect(tree, "", found)
    return found


def _collect(node: ast.AST, prefix: str, found: dict[str, dict[str, str]]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            found[prefix + child.name] = _docs_in(child)
            _collect(child, f"{prefix}{child.name}.", found)
        elif isinstance(child, ast.FunctionDef):
            _collect(child, f"{prefix}{child.name}.<locals>.", found)


def _docs_in(node: ast.ClassDef) -> dict[str, str]:
    docs = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        match following:
            case ast.Expr(value=ast.Constant(value=str(text))):
                docs[statement.target.id] = " ".join(text.split())
    return docs
