"""The container of a GGUF file: its header checked, its metadata read, its tensors found.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): a magic number, a version,
counts, metadata as typed keys and values, an entry for each tensor, then the aligned data. Every
number is little-endian. Nothing of a header is trusted: lengths and counts are compared with what
the file still has before anything is allocated.
"""

import functools
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from fornax.config.errors import CheckpointError
from fornax.config.suggest import first_few
from fornax.gguf.blocks import OTHER_TYPES, TYPES, BlockType

__all__ = ["GGUFFile", "GGUFTensor", "Value", "is_gguf", "open_gguf"]

Value = bool | int | float | str | list[str] | np.ndarray
"""Of a key: an array of numbers is a NumPy array, one of texts a list."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {
    0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i",
    6: "<f", 7: "B", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
"""Numbers of the format's types of values to how they are packed."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MAX_KEYS, _MAX_TENSORS = 2**16, 2**20
_MAX_TEXT, _MAX_ITEMS, _MAX_AXES = 2**24, 2**24, 4
"""Far above what files have, so that a damaged length is not read as gigabytes."""


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor in a file: what the header says, and where the data is."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    """In NumPy's order: the last axis lies together, and blocks divide it."""
    offset: int
    """From the start of the file, in bytes."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the last axis."""
        return self.shape[-1] // self.type.size * self.type.bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GGUFFile:
    """What the header of a GGUF file says."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GGUFTensor]

    def raw(self, tensor: GGUFTensor) -> np.ndarray:
        """The stored bytes of a tensor, uint8 [rows, bytes of a row], mapped and not read yet."""
        rows = math.prod(tensor.shape[:-1])
        return np.memmap(self.path, np.uint8, "r", tensor.offset, (rows, tensor.row_bytes))

    def refuse(self, what: str) -> NoReturn:
        """Raise `CheckpointError` about this file."""
        raise CheckpointError(f"{self.path}: {what}")


def is_gguf(path: str | Path) -> bool:
    """Whether `path` is a file that is called `.gguf`."""
    return Path(path).suffix.lower() == ".gguf" and Path(path).is_file()


def open_gguf(path: str | Path) -> GGUFFile:
    """Read the header of a GGUF file, version 2 or 3; no tensor's data is read.

    Raises:
      CheckpointError: a file that cannot be read, is not a GGUF, is damaged or cut short, has parts
          in
        other files, or holds a type of tensors that is not supported, naming the field.
    """
    path = Path(path)
    try:
        status = path.stat()
        return _read(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


@functools.lru_cache(maxsize=2)  # a model's config, tensors, tokenizer and template are read apart
def _read(path: Path, size: int, changed: int) -> GGUFFile:
    del changed  # of the key: a file that was written again is read again
    if size < 24:
        raise CheckpointError(
            f"{path} ({size} bytes) is not a GGUF file or is cut short: a header has 24 bytes at "
            "least; download or write it again"
        )
    with (
        path.open("rb") as handle,
        mmap.mmap(handle.fileno(), size, access=mmap.ACCESS_READ) as data,
    ):
        header = _Header(path, data, size)
        tensors, keys = header.start()
        metadata = _metadata(header, keys)
        _check_parts(header, metadata)
        return GGUFFile(path, metadata, _tensors(header, tensors, metadata))


class _Header:
    """A position in a header, from which values are taken one behind the other."""

    def __init__(self, path: Path, data: mmap.mmap, size: int):
        self.path, self._data, self.size, self.position = path, data, size, 0

    def refuse(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.path} {what}; download or write it again")

    def start(self) -> tuple[int, int]:
        """The counts of tensors and keys, behind the magic number and the version."""
        if self._data[:4] != _MAGIC:
            self.refuse(f"begins with {self._data[:4]!r} and no GGUF file does")
        self.position = 4
        raw = self.take(4, "the version")
        version = int.from_bytes(raw, "little")
        if version not in _VERSIONS and int.from_bytes(raw, "big") < 256:
            raise CheckpointError(
                f"{self.path} is a big-endian GGUF file; only little-endian ones are read: convert "
                "it with gguf-convert-endian of the package gguf"
            )
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self.path} is GGUF version {version}; Fornax reads versions 2 and 3: make the "
                "file again with a newer llama.cpp"
            )
        tensors = self.count(_MAX_TENSORS, 24, "tensors")
        return tensors, self.count(_MAX_KEYS, 13, "keys")

    def take(self, length: int, what: str) -> bytes:
        if length > self.size - self.position:
            self.refuse(
                f"is cut short or damaged: {what} takes {length} bytes at byte {self.position}, "
                f"and the file has {self.size}"
            )
        self.position += length
        return self._data[self.position - length : self.position]

    def number(self, code: str, what: str) -> int | float:
        return struct.unpack(code, self.take(struct.calcsize(code), what))[0]

    def count(self, most: int, least_bytes: int, what: str) -> int:
        """A count of things that take this many bytes each at least."""
        count = int(self.number("<Q", f"the number of {what}"))
        if count > min(most, (self.size - self.position) // least_bytes):
            self.refuse(f"is damaged: it says that it has {count} {what}, and cannot hold as many")
        return count

    def text(self, what: str) -> str:
        length = int(self.number("<Q", what))
        if length > _MAX_TEXT:
            self.refuse(f"is damaged: {what} is {length} bytes long, above {_MAX_TEXT}")
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.refuse(f"is damaged: {what} is not UTF-8 ({error.reason} at {error.start})")

    def value(self, kind: int, key: str) -> Value:
        """A value of the format's type number `kind`."""
        if kind == _STRING:
            return self.text(key)
        if kind == _BOOL:
            given = self.take(1, key)[0]
            if given > 1:
                self.refuse(f"is damaged: {key} is a truth value and has the byte {given}")
            return bool(given)
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], key)
        if kind != _ARRAY:
            self.refuse(f"is damaged: {key} is of type {kind}, which the format does not have")
        kind = int(self.number("<I", key))
        if kind == _STRING:
            count = self.count(_MAX_ITEMS, 8, f"texts in {key}")
            return [self.text(key) for _ in range(count)]
        if kind not in _SCALARS:
            self.refuse(f"is damaged: {key} is an array of type {kind}, which is not read")
        dtype = np.dtype(np.bool_) if kind == _BOOL else np.dtype(_SCALARS[kind])
        count = self.count(_MAX_ITEMS, dtype.itemsize, f"numbers in {key}")
        raw = np.frombuffer(self.take(count * dtype.itemsize, key), np.uint8)
        if kind == _BOOL and (raw > 1).any():
            self.refuse(f"is damaged: {key} is an array of truth values and has others")
        return raw.view(dtype)


def _metadata(header: _Header, count: int) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for number in range(count):
        key = header.text(f"the name of key {number}")
        if key in found:
            header.refuse(f"is damaged: it has the key {key!r} twice")
        kind = int(header.number("<I", f"the type of {key!r}"))
        found[key] = header.value(kind, repr(key))
    return found


def _check_parts(header: _Header, metadata: Mapping[str, Value]) -> None:
    parts = metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts > 1:
        raise CheckpointError(
            f"{header.path} is one of {parts} parts of a model; only whole files are read: merge "
            "them with `llama-gguf-split --merge`"
        )


def _tensors(header: _Header, count: int, metadata: Mapping[str, Value]) -> dict[str, GGUFTensor]:
    alignment = metadata.get("general.alignment", 32)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1:
        header.refuse(f"is damaged: general.alignment={alignment!r} must be a power of two")
    if alignment & (alignment - 1):
        header.refuse(f"is damaged: general.alignment={alignment} must be a power of two")
    found: dict[str, GGUFTensor] = {}
    for number in range(count):
        tensor = _tensor(header, number)
        if tensor.name in found:
            header.refuse(f"is damaged: it has the tensor {tensor.name!r} twice")
        found[tensor.name] = tensor
    _check_types(header, found)
    start = -(-header.position // alignment) * alignment
    end, before = start, ""
    placed = {}
    for tensor in sorted(found.values(), key=lambda tensor: tensor.offset):
        if tensor.offset % alignment:
            header.refuse(
                f"is damaged: {tensor.name!r} lies at {tensor.offset}, which is not a multiple of "
                f"general.alignment={alignment}"
            )
        offset = start + tensor.offset
        if offset < end:
            header.refuse(f"is damaged: the tensors {before!r} and {tensor.name!r} overlap")
        end, before = offset + tensor.nbytes, tensor.name
        if end > header.size:
            header.refuse(
                f"is cut short: {tensor.name!r} ends at byte {end} and the file has {header.size}"
            )
        placed[tensor.name] = GGUFTensor(tensor.name, tensor.type, tensor.shape, offset)
    return {name: placed[name] for name in found}


def _tensor(header: _Header, number: int) -> GGUFTensor:
    """An entry; its offset counts from the start of the data."""
    name = header.text(f"the name of tensor {number}")
    axes = int(header.number("<I", f"the number of axes of {name!r}"))
    if not 1 <= axes <= _MAX_AXES:
        header.refuse(f"is damaged: {name!r} has {axes} axes, and tensors have 1 to {_MAX_AXES}")
    sizes = [int(header.number("<Q", f"the shape of {name!r}")) for _ in range(axes)]
    kind = int(header.number("<I", f"the type of {name!r}"))
    offset = int(header.number("<Q", f"the offset of {name!r}"))
    if kind not in TYPES:
        # The reader of the message needs to know all of them: see `_check_types`.
        return GGUFTensor(name, BlockType(OTHER_TYPES.get(kind, str(kind)), 1, 0), (1,), offset)
    block = TYPES[kind]
    shape = tuple(reversed(sizes))
    if min(shape) < 1 or math.prod(shape) >= 2**62:
        header.refuse(f"is damaged: {name!r} has shape {list(shape)}")
    if shape[-1] % block.size:
        header.refuse(
            f"is damaged: {name!r} has rows of {shape[-1]}, and {block.name} has blocks of "
            f"{block.size}"
        )
    return GGUFTensor(name, block, shape, offset)


def _check_types(header: _Header, tensors: Mapping[str, GGUFTensor]) -> None:
    others = [f"{name} ({x.type.name})" for name, x in tensors.items() if not x.type.bytes]
    if others:
        raise CheckpointError(
            f"{header.path}: the type of {first_few(others)} is not read; Fornax reads "
            f"{', '.join(block.name for block in TYPES.values())}: quantize the model to one of "
            "these"
        )
