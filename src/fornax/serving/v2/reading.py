"""Strict reading of a request's JSON: bounded, and every object, name and key as it should be."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from fornax.config import ServingCode, ServingError
from fornax.serving.v2.datatypes import refuse
from fornax.serving.v2.parameters import MAX_NAME

__all__ = ["MAX_JSON", "all_distinct", "name_in", "object_in", "only_known", "parse"]

MAX_JSON = 16 * 2**20
"""Bytes of a request's JSON: lists of numbers take many times their text while they are read."""
_MAX_LISTS = 2**20
_MAX_QUOTES = 2**22
"""Lists, objects and texts of a request's JSON: each takes up to 30 times its text."""


def parse(text: bytes) -> dict[str, Any]:
    """The object that a text is. Raises ServingError for any other text, and for one too large."""
    if len(text) > MAX_JSON:
        raise ServingError(
            ServingCode.TOO_LARGE,
            f"the JSON has {len(text)} bytes; at most {MAX_JSON} are read: send tensors in binary, "
            "as the binary-tensor extension has it",
        )
    lists = text.count(b"[") + text.count(b"{")
    if lists > _MAX_LISTS or text.count(b'"') > _MAX_QUOTES:
        raise ServingError(
            ServingCode.TOO_LARGE,
            "the JSON has more lists or texts than are read; send data flat, or in binary",
        )
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        document = _lenient(text, error)
    if type(document) is not dict:
        raise refuse("the request is no JSON object")
    return document


def _lenient(text: bytes, error: Exception) -> object:
    """JSON with NaN and Infinity as bare words, which several clients write."""
    if b"NaN" not in text and b"Infinity" not in text:
        raise refuse(f"the request is no JSON: {error}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise refuse(f"the request is no JSON: {error}") from None


def object_in(what: str, value: object, *, empty: bool = True) -> dict[str, Any]:
    """An object; `empty`: null is an empty one. Raises ServingError."""
    if value is None and empty:
        return {}
    if type(value) is not dict:
        raise refuse(f"{what} is no JSON object")
    return value


def name_in(what: str, document: Mapping[str, Any]) -> str:
    """The name of a tensor. Raises ServingError."""
    name = document.get("name")
    if type(name) is not str or not 0 < len(name) <= MAX_NAME:
        raise refuse(f"{what} has no name; it is a string of 1 to {MAX_NAME} characters")
    return name


def only_known(what: str, document: Mapping[str, Any], keys: frozenset[str]) -> None:
    """Refuse keys that have no meaning, by a ServingError."""
    if not document.keys() <= keys:
        extra = min(document.keys() - keys)[:80]
        raise refuse(f"{what} has the key {extra!r}; it may have {', '.join(sorted(keys))}")


def all_distinct(what: str, names: Sequence[str]) -> None:
    """Refuse a name that is there twice, by a ServingError."""
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise refuse(f"{what} has {twice[:80]!r} twice")
