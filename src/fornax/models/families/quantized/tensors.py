"""What readers of quantized files share: a tensor that is dequantized when it is read, its parts.

O: rows of a stored matrix, its outputs; I: columns, its inputs.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from fornax.checkpoint.safetensors_file import StoredTensor
from fornax.config.errors import CheckpointError
from fornax.models.families.quantized.codes import NO_PRODUCT, StoredCodes

__all__ = [
    "BYTES",
    "FLOAT32",
    "FLOATS",
    "DequantizedTensor",
    "Module",
    "Tensor",
    "blocks_of",
    "finite",
    "modules",
    "over_blocks",
    "refuse",
    "scalar",
    "times",
]

_CHUNK = 2**20
"""Numbers dequantized at a time, so that what lies between codes and values stays in caches."""
FLOAT32 = np.dtype(np.float32)
BYTES = np.dtype(np.uint8)
FLOATS = ("float32", "bfloat16", "float16")
"""Names of the dtypes of scales."""


@dataclass(frozen=True)
class DequantizedTensor:
    """A tensor whose numbers are made from stored codes and scales each time it is viewed."""

    name: str
    """That of a float tensor in its place, as the file's module is called."""
    dtype: np.dtype
    """The model's: what its values are held in unless told otherwise."""
    shape: tuple[int, ...]
    computed: np.dtype
    """Of the values: what the format's library multiplies in, not rounded further."""
    rows: Callable[[int, int], np.ndarray]
    """Values of the first axis from a start to a stop, as they lie in the file."""
    transposed: bool = False
    """Whether the file has the last two axes exchanged; `rows` counts as the file does."""
    codes: Callable[[], StoredCodes | str] = lambda: NO_PRODUCT
    """What packed products take of a matrix [O, I], or of each expert's of a tensor of all, or why
    they cannot; may read its indices."""
    quantized: bool = True
    """False for what a file stores as floats, to be changed in other ways as it is read."""

    def view(self) -> np.ndarray:
        """The values, a new array of dtype `computed`.

        Raises:
          CheckpointError: scales that are not finite, or an index outside its table.
        """
        shape = self.shape
        if self.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        values = np.empty(shape, self.computed)
        step = max(1, _CHUNK // max(1, math.prod(shape[1:])))
        with np.errstate(over="ignore"):  # what a file makes infinite is so in its library too
            for start in range(0, shape[0], step):
                stop = min(start + step, shape[0])
                values[start:stop] = self.rows(start, stop)
        return values.swapaxes(-1, -2) if self.transposed else values


Tensor = StoredTensor | DequantizedTensor


@dataclass(frozen=True)
class Module:
    """The tensors of one quantized module."""

    name: str
    """As in the model: without the ending of a tensor."""
    parts: Mapping[str, StoredTensor]
    """By ending."""

    def __contains__(self, part: str) -> bool:
        """Whether the file has such a tensor."""
        return part in self.parts

    def take(self, part: str, *dtypes: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """One of its tensors.

        Args:
          part: its ending.
          dtypes: of which it must have one.
          shape: that it must have; None for any matrix.

        Raises:
          CheckpointError: it is not there, or is of another dtype or shape.
        """
        if part not in self.parts:
            there = next(iter(self.parts.values()))
            refuse(there, f"is there and {self.name}.{part} is not")
        tensor = self.parts[part]
        if tensor.dtype.name not in dtypes:
            refuse(tensor, f"is {tensor.dtype.name}, and this format has {' or '.join(dtypes)}")
        if shape is None and (len(tensor.shape) != 2 or 0 in tensor.shape):
            refuse(tensor, f"has shape {list(tensor.shape)}, and is a matrix in this format")
        if shape is not None and tensor.shape != shape:
            refuse(tensor, f"has shape {list(tensor.shape)}, and {list(shape)} belongs there")
        return tensor


def refuse(tensor: StoredTensor, what: str) -> NoReturn:
    """Raise `CheckpointError` about a tensor."""
    raise CheckpointError(
        f"{tensor.file}: {tensor.name} {what}; check that quantization_config in config.json is "
        "that of these files, or download them again"
    )


def modules(
    stored: Mapping[str, StoredTensor],
    key: str | Sequence[str],
    parts: Sequence[str],
    unused: Sequence[str] = (),
) -> tuple[list[Module], dict[str, StoredTensor]]:
    """The quantized modules of a file, and its other tensors.

    Args:
      stored: the decoder's tensors by name.
      key: endings that only quantized modules have, after a dot.
      parts: further endings of such modules' tensors.
      unused: endings of tensors that no weight is made from, left out everywhere.
    """
    keys = (key,) if isinstance(key, str) else tuple(key)
    kept = {name: x for name, x in stored.items() if not _ends(name, unused)}
    owners = dict.fromkeys(found for name in kept for found in _owner(name, keys))
    grouped: dict[str, dict[str, StoredTensor]] = {owner: {} for owner in owners}
    others: dict[str, StoredTensor] = {}
    for name, tensor in kept.items():
        endings = (*keys, *parts)
        owner = next(((o, e) for e in endings for o in _owner(name, (e,)) if o in grouped), None)
        if owner is None:
            others[name] = tensor
        else:
            grouped[owner[0]][owner[1]] = tensor
    return [Module(name, found) for name, found in grouped.items()], others


def _ends(name: str, endings: Sequence[str]) -> bool:
    return name.endswith(tuple(f".{ending}" for ending in endings))


def _owner(name: str, endings: Sequence[str]) -> Iterator[str]:
    for ending in endings:
        if name.endswith(f".{ending}"):
            yield name.removesuffix(f".{ending}")


def finite(values: np.ndarray, tensor: StoredTensor) -> np.ndarray:
    """The values, of a tensor of scales, in float32.

    Raises:
      CheckpointError: when one is infinite or no number.
    """
    scales = values.astype(np.float32)
    if not np.isfinite(scales).all():
        refuse(tensor, "holds scales that are infinite or no numbers")
    return scales


def scalar(tensor: StoredTensor) -> np.float32:
    """The one number of a tensor, finite.

    Raises:
      CheckpointError: when it holds another number of them, or one that is not finite.
    """
    if math.prod(tensor.shape) != 1:
        refuse(tensor, f"has shape {list(tensor.shape)}, and is one number in this format")
    return finite(tensor.view().reshape(1), tensor)[0]


def times(codes: np.ndarray, scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Products of numbers that `dtype` has exactly, rounded to it once, as if multiplied in it."""
    return (codes.astype(np.float32) * scales).astype(dtype, copy=False)


def blocks_of(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """How many blocks cover a matrix, those at its ends perhaps in part."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def over_blocks(
    held: np.ndarray, block: tuple[int, int], start: int, stop: int, columns: int
) -> np.ndarray:
    """What blocks hold, for each number of the rows from `start` to `stop`.

    Args:
      held: by block: the rows of blocks that hold these rows, all columns of blocks.
      block: rows and columns of each.
      start: first row.
      stop: the row after the last.
      columns: of the matrix.

    Returns:
      [stop - start, columns].
    """
    rows = held[np.arange(start, stop) // block[0] - start // block[0]]
    return np.repeat(rows, block[1], axis=1)[:, :columns]
