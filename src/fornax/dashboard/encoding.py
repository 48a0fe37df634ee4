"""JSON as it is sent: numbers that are not finite become null."""

import json
from typing import Any

import orjson

__all__ = ["encode"]


def encode(value: object) -> bytes:
    """Plain values as UTF-8 JSON on one line."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # integers of any size, halves of surrogate pairs: what files may hold
        return json.dumps(_plain(value), allow_nan=False).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4000:
        return None
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
