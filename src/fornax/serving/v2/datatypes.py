"""The dtypes of the V2 protocol, and tensors in its raw binary form.

Raw: little-endian, row-major; BYTES is each element's size as uint32, then the element. Sizes are
checked against what was sent before anything is allocated.
"""

import struct
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from fornax.config import ServingCode, ServingError

__all__ = [
    "DTYPES",
    "MAX_ELEMENTS",
    "MAX_RANK",
    "Raw",
    "count",
    "datatype_of",
    "decode_raw",
    "dtype_of",
    "encode_raw",
    "raw_size",
    "refuse",
]

Raw = bytes | bytearray | memoryview
"""Bytes that a transport hands over."""

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(np.object_),
}
"""Every dtype of the protocol, and the array that carries it; BYTES: objects that are `bytes`."""

MAX_RANK = 16
"""Most dimensions of a tensor."""
MAX_ELEMENTS = 2**34
"""Most elements of a tensor, sizes of 0 counted as 1."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH = struct.Struct("<I")


def refuse(message: str) -> ServingError:
    """The error of a request that is wrong."""
    return ServingError(ServingCode.INVALID_ARGUMENT, message)


def dtype_of(name: str, datatype: object) -> np.dtype:
    """The numpy dtype of the tensor `name`; ServingError for a datatype that V2 lacks."""
    try:
        return DTYPES[datatype]  # pyrefly: ignore[bad-index]
    except (KeyError, TypeError):
        shown = repr(datatype)[:40]
        raise refuse(
            f"tensor {name!r}: datatype {shown} is not of the V2 protocol; it is one of "
            f"{', '.join(DTYPES)}"
        ) from None


def datatype_of(dtype: np.dtype) -> str:
    """The V2 name of a numpy dtype; ValueError where there is none."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise ValueError(f"dtype {dtype} has no name in the V2 protocol") from None


def count(name: str, shape: Sequence[int]) -> int:
    """How many elements `shape` has; ServingError for one that no tensor can have."""
    if len(shape) > MAX_RANK:
        raise refuse(f"tensor {name!r} has {len(shape)} dimensions; at most {MAX_RANK} are allowed")
    elements = bound = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise refuse(
                f"tensor {name!r}: its shape holds {repr(size)[:40]}; sizes are integers from 0"
            )
        elements *= size
        bound *= size or 1
    if bound > MAX_ELEMENTS:
        shown = list(shape) if bound < 10**30 else "given"
        raise refuse(f"tensor {name!r}: shape {shown} is over {MAX_ELEMENTS} elements")
    return elements


def decode_raw(name: str, datatype: str, shape: Sequence[int], data: Raw) -> np.ndarray:
    """The tensor in `data`, without a copy (BYTES apart): read-only where `data` is, and perhaps
    not aligned. ServingError where the size is not that of the shape."""
    dtype = dtype_of(name, datatype)
    elements = count(name, shape)
    if datatype == "BYTES":
        return _split(name, elements, data).reshape(shape)
    size = memoryview(data).nbytes
    if size != elements * dtype.itemsize:
        raise refuse(
            f"tensor {name!r}: {size} bytes were sent where {datatype} of shape {list(shape)} "
            f"takes {elements * dtype.itemsize}"
        )
    if elements == 0:
        return np.empty(shape, dtype)
    if datatype == "BOOL" and np.frombuffer(data, np.uint8).max() > 1:
        raise refuse(f"tensor {name!r}: BOOL holds a byte that is neither 0 nor 1")
    return np.frombuffer(data, dtype).reshape(shape)


def _split(name: str, elements: int, data: Raw) -> np.ndarray:
    """The elements of a BYTES tensor, [elements]."""
    view = memoryview(data).cast("B")
    end = view.nbytes
    if elements * _LENGTH.size > end:
        raise refuse(
            f"tensor {name!r}: {end} bytes were sent, too few for {elements} BYTES elements with "
            f"their sizes"
        )
    array = np.empty(elements, np.object_)
    at = 0
    for index in range(elements):
        start = at + _LENGTH.size
        if start > end:
            raise refuse(f"tensor {name!r}: it ends after {index} of {elements} BYTES elements")
        (length,) = _LENGTH.unpack_from(view, at)
        at = start + length
        if at > end:
            raise refuse(
                f"tensor {name!r}: BYTES element {index} says it has {length} bytes, of which "
                f"{end - start} were sent"
            )
        array[index] = bytes(view[start:at])
    if at != end:
        raise refuse(f"tensor {name!r}: {end - at} bytes follow its {elements} BYTES elements")
    return array


def encode_raw(array: np.ndarray) -> bytes | memoryview:
    """The raw form of a tensor; large ones as a view of the array."""
    if array.dtype == np.object_:
        parts: list[bytes] = []
        for element in array.ravel().tolist():
            parts.append(_LENGTH.pack(len(element)))
            parts.append(element)
        return b"".join(parts)
    if array.nbytes < 65536:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def raw_size(array: np.ndarray) -> int:
    """How many bytes the raw form has."""
    if array.dtype == np.object_:
        return sum(map(len, array.ravel().tolist())) + _LENGTH.size * array.size
    return array.nbytes
