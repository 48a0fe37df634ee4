"""Arrays inside plain JSON, for positions that hold more than numbers."""

import base64
import math
import zlib
from typing import Any

import numpy as np

from fornax.config.errors import DataError

__all__ = ["array_state", "from_array_state"]

_ARRAY = "__array__"
_NUMBER = "__float__"


def array_state(tree: Any) -> Any:
    """Dicts, lists, tuples, numbers, text and numpy arrays as plain JSON.

    Arrays are compressed and spelled in base64, bit for bit; numpy's numbers become Python's, and
    tuples lists. Numbers that JSON has no word for (NaN, infinities) are spelled out.

    Raises:
      DataError: for anything else.
    """
    if isinstance(tree, np.generic):
        tree = tree.item()
    if tree is None or isinstance(tree, bool | int | str):
        return tree
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else {_NUMBER: repr(tree)}
    if isinstance(tree, np.ndarray) and tree.dtype.kind in "biuf":
        data = zlib.compress(np.ascontiguousarray(tree).tobytes(), 1)
        return {
            _ARRAY: base64.b64encode(data).decode(),
            "dtype": tree.dtype.str,
            "shape": list(tree.shape),
        }
    if isinstance(tree, dict):
        return {_key(key): array_state(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [array_state(value) for value in tree]
    raise DataError(f"a position cannot hold a {type(tree).__name__}; make it plain data")


def _key(key: Any) -> str:
    if not isinstance(key, str) or key in (_ARRAY, _NUMBER):
        raise DataError(f"a position cannot hold the key {key!r}; use text")
    return key


def from_array_state(value: Any) -> Any:
    """What `array_state` was given, tuples as lists."""
    if isinstance(value, list):
        return [from_array_state(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _NUMBER in value:
        return float(value[_NUMBER])
    if _ARRAY in value:
        data = zlib.decompress(base64.b64decode(value[_ARRAY]))
        return np.frombuffer(data, np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    return {key: from_array_state(item) for key, item in value.items()}
