"""Typed contents: a tensor as a list of numbers of the message, for clients without raw tensors."""

from typing import Any

import numpy as np

from fornax.config.errors import ServingCode, ServingError
from fornax.serving.v2.datatypes import count, dtype_of, refuse

__all__ = ["decode_contents"]

_FIELDS: dict[str, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def decode_contents(tensor: Any, max_bytes: int) -> np.ndarray:
    """The array of an input that carries its own contents.

    Raises:
      ServingError: a datatype that has no contents (FP16, BF16), contents of another datatype, not
        as many elements as the shape has, a number outside of the datatype's range.
    """
    name, datatype = tensor.name, tensor.datatype
    dtype = dtype_of(name, datatype)
    shape = tuple(tensor.shape)
    elements = count(name, shape)
    field = _FIELDS.get(datatype)
    if field is None:
        raise refuse(f"input {name[:80]!r}: {datatype} has no typed contents; send it raw")
    for other, _ in tensor.contents.ListFields():
        if other.name != field:
            raise refuse(f"input {name[:80]!r}: {datatype} goes in {field}, not in {other.name}")
    values = getattr(tensor.contents, field)
    if len(values) != elements:
        raise refuse(
            f"input {name[:80]!r}: {field} has {len(values)} elements where shape {list(shape)} "
            f"has {elements}"
        )
    size = sum(map(len, values)) if datatype == "BYTES" else elements * dtype.itemsize
    if size > max_bytes:
        raise ServingError(
            ServingCode.TOO_LARGE,
            f"input {name[:80]!r} has {size} bytes; at most {max_bytes} are allowed",
        )
    if datatype == "BYTES":
        array = np.empty(elements, np.object_)
        array[:] = list(values)
        return array.reshape(shape)
    if field in ("int_contents", "uint_contents") and dtype.itemsize < 4 and elements:
        _check_range(name, datatype, dtype, values)
    return np.array(values, dtype).reshape(shape)


def _check_range(name: str, datatype: str, dtype: np.dtype[Any], values: Any) -> None:
    info = np.iinfo(dtype)
    low, high = min(values), max(values)
    if low < info.min or high > info.max:
        wrong = low if low < info.min else high
        raise refuse(
            f"input {name[:80]!r}: {wrong} is no {datatype}; its range is {info.min} to {info.max}"
        )
