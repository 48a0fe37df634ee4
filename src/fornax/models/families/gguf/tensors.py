"""The tensors of a GGUF file by the names and in the order of a Hugging Face model's.

E: experts; R: rows of a matrix, its outputs; C: columns, its inputs; N: heads; H: their width.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from fornax.gguf import BlockIntegers, GGUFFile, GGUFTensor, dequantize, integers
from fornax.models.families.gguf.architectures import Architecture, architecture_of
from fornax.models.families.gguf.reading import Metadata
from fornax.models.families.quantized import CodeFormat, DequantizedTensor, StoredCodes

__all__ = ["OUTSIDE", "gguf_tensors", "interleaved"]

OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z_0-9]+)\.(weight|bias)")


def gguf_tensors(file: GGUFFile) -> dict[str, DequantizedTensor]:
    """Tensors as `config_from_hf(gguf_config(file))` describes them, none of them read yet.

    Where the architecture does not name a tensor it keeps its own name.

    Raises:
      CheckpointError: an architecture that is not read; rows that are not heads.
    """
    architecture = architecture_of(file)
    width = Metadata(file, architecture.name).head_dim
    dtype = _held_dtype(file)
    found: dict[str, DequantizedTensor] = {}
    for tensor in file.tensors.values():
        if tensor.name in architecture.factors:
            continue
        for name, index in _names(architecture, tensor):
            found[name] = _tensor(file, architecture, tensor, name, index, width, dtype)
    return found


def _held_dtype(file: GGUFFile) -> np.dtype:
    """What the values are held in unless told otherwise: the dtype of float matrices (vectors are
    float32 in every file); bfloat16 of quantized ones."""
    types = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if types <= {"F32"}:
        return np.dtype(np.float32)
    return np.dtype(np.float16 if types <= {"F32", "F16"} else ml_dtypes.bfloat16)


def _names(architecture: Architecture, tensor: GGUFTensor) -> Iterator[tuple[str, int | None]]:
    """Names that a tensor's values have, with the expert where each is one's."""
    match = _NAME.fullmatch(tensor.name)
    layer, part, ending = match.groups() if match else (None, "", "")
    known = OUTSIDE if layer is None else architecture.parts
    start = "" if layer is None else f"model.layers.{layer}."
    name = f"{start}{known[part]}.{ending}" if part in known else tensor.name
    if "{expert}" not in name:
        yield name, None
    elif len(tensor.shape) != 3:
        yield tensor.name, None
    else:
        for expert in range(tensor.shape[0]):
            yield name.format(expert=expert), expert


def _tensor(
    file: GGUFFile,
    architecture: Architecture,
    tensor: GGUFTensor,
    name: str,
    expert: int | None,
    width: int,
    dtype: np.dtype,
) -> DequantizedTensor:
    shape = tensor.shape if expert is None else tensor.shape[1:]
    if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
        shape = (1, *shape)
    part = tensor.name.split(".")[2:3]
    halves = bool(part) and part[0] in architecture.interleaved
    if halves and (shape[0] % width or width % 2):
        file.refuse(f"{tensor.name} has {shape[0]} rows, which are not heads of {width}")
    offset = architecture.norm_offset if name.endswith("norm.weight") else 0
    read = _rows(file, tensor, shape, expert or 0, width if halves else None, offset)
    quantized = tensor.type.values is not None
    computed = np.dtype(np.float32) if quantized else tensor.type.layout
    codes = functools.partial(_codes, file, tensor, width if halves else None)
    return DequantizedTensor(name, dtype, shape, computed, read, codes=codes, quantized=quantized)


def _codes(file: GGUFFile, tensor: GGUFTensor, width: int | None) -> StoredCodes | str:
    """See `DequantizedTensor.codes`; of heads of `width` rows in halves."""
    if tensor.type.values is None:
        return "not all its layers are quantized"
    if tensor.type.codes is None:
        return f"no product takes blocks of {tensor.type.name}"
    if len(tensor.shape) != 2:
        return "no product of experts takes blocks"

    def read(_: int) -> BlockIntegers:
        raw = file.raw(tensor)
        if width is not None:
            raw = raw[interleaved(np.arange(len(raw)), width)]
        with _refusing(file, tensor):
            return integers(raw, tensor.type)

    return StoredCodes(CodeFormat("blocks", None, kinds=(tensor.type.name,)), read)


@contextlib.contextmanager
def _refusing(file: GGUFFile, tensor: GGUFTensor) -> Iterator[None]:
    """Say of which tensor of the file a `ValueError` is."""
    try:
        yield
    except ValueError as error:
        file.refuse(f"{tensor.name} ({tensor.type.name}) holds {error}; download it again")


def _rows(
    file: GGUFFile,
    tensor: GGUFTensor,
    shape: tuple[int, ...],
    expert: int,
    width: int | None,
    offset: int,
) -> Callable[[int, int], np.ndarray]:
    """A function that reads entries of the first axis, from a start to a stop."""

    def read(start: int, stop: int) -> np.ndarray:
        raw, rows = file.raw(tensor), np.arange(start, stop)
        if width is not None:
            rows = interleaved(rows, width)
        if len(shape) == 1:
            return values(raw)[0, rows]
        first = expert * shape[0]
        if width is not None:
            return values(raw[rows])
        return values(raw[first + start : first + stop])

    def values(raw: np.ndarray) -> np.ndarray:
        with _refusing(file, tensor):
            made = dequantize(raw, tensor.type)
        return made - made.dtype.type(offset) if offset else made

    return read


def interleaved(rows: np.ndarray, width: int) -> np.ndarray:
    """Where the file has rows of heads that are in halves: row i of a head's first half, and row
    i of its second, lie together there."""
    head, row = rows // width, rows % width
    return head * width + 2 * (row % (width // 2)) + row // (width // 2)
