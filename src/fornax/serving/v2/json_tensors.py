"""A request's JSON, read strictly, and tensors as JSON: nothing is rounded or cut in silence.

JSON has no number for NaN and infinities: they are the strings "NaN", "Infinity" and "-Infinity",
as in Protobuf's JSON (numpy reads these too). BYTES elements are strings, as UTF-8.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from fornax.config import ServingCode, ServingError
from fornax.serving.v2.datatypes import count, datatype_of, dtype_of, refuse
from fornax.serving.v2.parameters import MAX_NAME

__all__ = [
    "MAX_JSON",
    "all_distinct",
    "from_json",
    "name_in",
    "object_in",
    "only_known",
    "parse",
    "to_json",
]

MAX_JSON = 16 * 2**20
"""Bytes of a request's JSON: lists of numbers take many times their text while they are read."""
_MAX_LISTS = 2**20
_MAX_QUOTES = 2**22
"""Lists, objects and texts of a request's JSON: each takes up to 30 times its text."""


def parse(text: bytes) -> dict[str, object]:
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
        raise refuse("the request is not a JSON object")
    return document


def _lenient(text: bytes, error: Exception) -> object:
    """JSON with NaN and Infinity as bare words, which several clients write."""
    if b"NaN" not in text and b"Infinity" not in text:
        raise refuse(f"the request is not JSON: {error}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise refuse(f"the request is not JSON: {error}") from None


def object_in(what: str, value: object, *, empty: bool = True) -> dict[str, object]:
    """An object; `empty`: null is an empty one. Raises ServingError."""
    if value is None and empty:
        return {}
    if type(value) is not dict:
        raise refuse(f"{what} is not a JSON object")
    return value


def name_in(what: str, document: Mapping[str, object]) -> str:
    """The name of a tensor. Raises ServingError."""
    name = document.get("name")
    if type(name) is not str or not 0 < len(name) <= MAX_NAME:
        raise refuse(f"{what} has no name; it is a string of 1 to {MAX_NAME} characters")
    return name


def only_known(what: str, document: Mapping[str, object], keys: frozenset[str]) -> None:
    """Refuse keys that have no meaning, by a ServingError."""
    if not document.keys() <= keys:
        extra = min(document.keys() - keys)[:80]
        raise refuse(f"{what} has the key {extra!r}; it may have {', '.join(sorted(keys))}")


def all_distinct(what: str, names: Sequence[str]) -> None:
    """Refuse a name that is there twice, by a ServingError."""
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise refuse(f"{what} has {twice[:80]!r} twice")


_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NUMBERS = frozenset({int, float})
_ALLOWED: dict[str, tuple[frozenset[type], str]] = {
    "b": (frozenset({bool}), "true or false"),
    "i": (frozenset({int}), "integers"),
    "u": (frozenset({int}), "integers"),
    "f": (_NUMBERS | {str}, "numbers"),
    "V": (_NUMBERS | {str}, "numbers"),
    "O": (frozenset({str}), "strings"),
}
"""What a list may hold, by numpy's kind of the dtype; bfloat16 is of kind V."""


def from_json(name: str, datatype: str, shape: Sequence[int], data: object) -> np.ndarray:
    """The tensor of `shape` whose elements `data` lists, in row-major order or nested.

    Raises ServingError for elements of another kind, out of the datatype's range, or of another
    number than the shape's.
    """
    dtype = dtype_of(name, datatype)
    flat = _flatten(name, shape, count(name, shape), data)
    allowed, words = _ALLOWED[dtype.kind]
    kinds = set(map(type, flat))
    if not kinds <= allowed:
        wrong = next(each for each in flat if type(each) not in allowed)
        shown = "a list" if isinstance(wrong, list) else repr(wrong)[:40]
        raise refuse(f"tensor {name!r}: {shown} is among its data; {datatype} takes {words}")
    try:
        if dtype.kind in "fV":
            return _floats(name, datatype, dtype, flat, str in kinds).reshape(shape)
        if dtype.kind == "O":
            array = np.empty(len(flat), np.object_)
            array[:] = [text.encode() for text in flat]
            return array.reshape(shape)
        return np.array(flat, dtype).reshape(shape)
    except OverflowError:
        raise refuse(f"tensor {name!r}: its data go beyond {datatype}'s range") from None
    except UnicodeEncodeError:
        raise refuse(f"tensor {name!r}: a string is not Unicode (a lone surrogate)") from None


def _flatten(name: str, shape: Sequence[int], elements: int, data: object) -> list[Any]:
    if type(data) is not list:
        if len(shape) == 0 and not isinstance(data, dict):
            return [data]
        raise refuse(f"tensor {name!r}: its data are not a list; send a flat or nested list")
    level, depth = data, 0
    while level and type(level[0]) is list:
        depth += 1
        if depth >= len(shape):
            raise refuse(f"tensor {name!r}: its data are nested deeper than shape {list(shape)}")
        if set(map(type, level)) != {list} or set(map(len, level)) != {shape[depth]}:
            raise refuse(
                f"tensor {name!r}: its data are ragged, or not nested as shape {list(shape)} says"
            )
        level = list(itertools.chain.from_iterable(level))
    if len(level) != elements:
        raise refuse(
            f"tensor {name!r}: its data have {len(level)} elements where shape {list(shape)} has "
            f"{elements}"
        )
    if level and depth not in (0, len(shape) - 1):
        raise refuse(f"tensor {name!r}: its data are neither flat nor nested as {list(shape)}")
    return level


def _floats(
    name: str, datatype: str, dtype: np.dtype, flat: list[Any], special: bool
) -> np.ndarray:
    if special:
        unknown = {text for text in flat if type(text) is str} - _SPECIAL.keys()
        if unknown:
            raise refuse(
                f"tensor {name!r}: {min(unknown)[:40]!r} is among its data; {datatype} takes "
                f"numbers, and the strings {', '.join(_SPECIAL)}"
            )
        flat = [_SPECIAL[each] if type(each) is str else each for each in flat]
    wide = np.array(flat, np.float64)
    if dtype == wide.dtype:
        return wide
    with np.errstate(over="ignore"):
        array = wide.astype(dtype)
    if not np.array_equal(np.isinf(array), np.isinf(wide)):
        raise OverflowError
    return array


def to_json(name: str, array: np.ndarray) -> list[Any] | np.ndarray:
    """The elements, flat: a list, or an array that orjson writes.

    Raises ServingError for BYTES that are not UTF-8.
    """
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "O":
        try:
            return [element.decode() for element in flat.tolist()]
        except UnicodeDecodeError:
            raise refuse(
                f"output {name!r} holds bytes that are not UTF-8, which JSON cannot carry; ask for "
                "it in binary, with the output's parameter binary_data"
            ) from None
    if flat.dtype.kind not in "fV":
        return flat
    if datatype_of(flat.dtype) == "BF16":
        flat = flat.astype(np.float32)
    if np.isfinite(flat).all():
        return flat
    shown = {math.inf: "Infinity", -math.inf: "-Infinity"}
    return [
        each if math.isfinite(each) else shown.get(each, "NaN")
        for each in flat.astype(np.float64).tolist()
    ]
