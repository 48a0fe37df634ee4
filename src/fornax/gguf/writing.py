"""A GGUF file written: its header first, since all sizes are known, then tensor by tensor."""

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fornax.gguf.blocks import TYPES, BlockType
from fornax.gguf.file import Value

__all__ = ["NewTensor", "write_gguf"]

_ALIGNMENT = 32
_VERSION = 3
_NUMBERS = {kind.name: number for number, kind in TYPES.items()}
_ARRAYS = {"uint32": 4, "int32": 5, "float32": 6, "bool": 7}
"""The format's numbers of the dtypes of arrays."""


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    """In NumPy's order; blocks divide the last axis."""
    parts: Callable[[], Iterator[np.ndarray]]
    """Its stored bytes from the first to the last, each part an array of uint8."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return math.prod(self.shape) // self.type.size * self.type.bytes


def write_gguf(path: Path, metadata: Mapping[str, Value], tensors: Sequence[NewTensor]) -> None:
    """Write a file of version 3, little-endian; one part of a tensor is in memory at a time.

    Args:
      path: of the file.
      metadata: int is written as uint32, float as float32.
      tensors: in the order in which they lie.

    Raises:
      OSError: it cannot be written.
      ValueError: parts of another size than the tensor's.
    """
    header = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        header += [_text(key), _value(value)]
    offset = 0
    for tensor in tensors:
        sizes = tuple(reversed(tensor.shape))
        header.append(_text(tensor.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
        header.append(struct.pack("<IQ", _NUMBERS[tensor.type.name], offset))
        offset += _aligned(tensor.nbytes)
    start = b"".join(header)
    with path.open("wb") as file:
        file.write(start.ljust(_aligned(len(start)), b"\0"))
        for tensor in tensors:
            written = sum(file.write(part.data) for part in tensor.parts())
            if written != tensor.nbytes:
                raise ValueError(f"{tensor.name} has {written} bytes, not {tensor.nbytes}")
            file.write(bytes(_aligned(written) - written))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    return struct.pack("<IIQ", 9, _ARRAYS[value.dtype.name], len(value)) + value.tobytes()
