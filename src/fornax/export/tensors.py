"""Named arrays in one safetensors file: a header of JSON, then the bytes; numpy only."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fornax.config.errors import BundleError
from fornax.export.dtypes import numpy_dtype

__all__ = ["pack", "unpack"]

_CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_NAMES = {code: name for name, code in _CODES.items()}


def pack(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The file's bytes."""
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    at = 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": _CODES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [at, at + len(data)],
        }
        parts.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def unpack(data: bytes | memoryview, where: str) -> dict[str, np.ndarray]:
    """The arrays in a file's bytes: views of them, so that a mapped file is read where touched.

    Raises:
      BundleError: naming `where` when they are not such a file.
    """
    try:
        return _unpack(data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BundleError(f"{where} is no readable safetensors file ({error})") from None


def _unpack(data: bytes | memoryview) -> dict[str, np.ndarray]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise ValueError("it is shorter than its header says")
    header = json.loads(bytes(data[8 : 8 + size]))
    body = memoryview(data)[8 + size :]
    arrays = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = numpy_dtype(_NAMES[entry["dtype"]])
        shape = tuple(entry["shape"])
        start, stop = entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
            raise ValueError(f"{name!r} has sizes that are no numbers")
        if stop > len(body) or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name!r} has other bytes than its shape needs")
        arrays[name] = np.frombuffer(body[start:stop], dtype).reshape(shape)
    return arrays
