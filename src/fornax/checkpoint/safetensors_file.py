"""Reading safetensors files as views: the header checked, the data mapped, nothing copied.

The format: eight bytes of header length (little-endian), a JSON header of dtype, shape and offsets
for each tensor, then the data (https://github.com/huggingface/safetensors). The package's own
reader copies a whole tensor before its slices can be cut; a view lets each device's part be cut and
converted in one pass.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from fornax.config.errors import CheckpointError

__all__ = ["DTYPES", "FLOATS", "StoredTensor", "find_tensors", "open_file"]

FLOATS: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""What weights of a model are stored as, by the format's names."""
DTYPES: Mapping[str, np.dtype] = {
    **FLOATS,
    "BOOL": np.dtype(np.bool_),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""All dtypes of arrays in such files."""
_MAX_HEADER = 100_000_000
"""The format's own limit, so that a damaged length is not read as gigabytes."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: what the header says, and where the data is."""

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    def view(self) -> np.ndarray:
        """The data, mapped from the file and not read until touched."""
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype)
        mapped = np.memmap(
            self.file, np.uint8, "r", self.offset, (math.prod(self.shape) * self.dtype.itemsize,)
        )
        return mapped.view(self.dtype).reshape(self.shape)


def find_tensors(
    folder: Path, dtypes: Mapping[str, np.dtype] = FLOATS, *, stem: str = "model"
) -> dict[str, StoredTensor]:
    """Every tensor of a Hugging Face directory by name, from one file or a sharded set.

    A directory that holds only a variant, as `model.fp16.safetensors`, is read from that.

    Args:
      folder: the directory.
      dtypes: of which all tensors are.
      stem: of the files' names.

    Raises:
      CheckpointError: no safetensors files, those of several variants, a missing or damaged one,
        or an index that does not agree with its files.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a directory; give one with config.json and weights")
    index = folder / f"{stem}.safetensors.index.json"
    if index.exists():
        return _from_index(folder, index, dtypes)
    single = folder / f"{stem}.safetensors"
    if single.exists():
        return open_file(single, dtypes)
    variants = [
        path
        for pattern in (f"{stem}.*.safetensors", f"{stem}.safetensors.index.*.json")
        for path in sorted(folder.glob(pattern))
        if "-of-" not in path.name
    ]
    if len(variants) > 1:
        raise CheckpointError(
            f"{folder} holds {' and '.join(path.name for path in variants)}; which to read is not "
            f"known: move all but one out, or name that {single.name}"
        )
    if variants and variants[0].suffix == ".json":
        return _from_index(folder, variants[0], dtypes)
    if variants:
        return open_file(variants[0], dtypes)
    pickled = sorted(path.name for path in folder.glob("*.bin")) + sorted(
        path.name for path in folder.glob("*.pt*")
    )
    if pickled:
        raise CheckpointError(
            f"{folder} holds {pickled[0]} and no safetensors file; loading it would unpickle, "
            "which can run code: convert it to safetensors where you trust it (transformers' "
            "save_pretrained writes it)"
        )
    raise CheckpointError(
        f"{folder} has neither {single.name} nor {index.name}; download the weights again, or name "
        "the directory that holds them"
    )


def _from_index(
    folder: Path, index: Path, dtypes: Mapping[str, np.dtype]
) -> dict[str, StoredTensor]:
    places = _read_index(index)
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(places.values())):
        if not (folder / file).is_file():
            lost = [name for name, place in places.items() if place == file]
            more = f" and {len(lost) - 1} more tensors" if len(lost) > 1 else ""
            raise CheckpointError(f"{folder / file} is missing; it holds {lost[0]}{more}")
        found.update(open_file(folder / file, dtypes))
    for name, file in places.items():
        if name not in found or found[name].file.name != file:
            raise CheckpointError(f"{index} says that {name} is in {file}, and it is not")
    return found


def _read_index(index: Path) -> dict[str, str]:
    """Tensor to file, every file a plain name, so that an index cannot reach other directories."""
    try:
        places = dict(json.loads(index.read_text())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files: {error}") from error
    if not places:
        raise CheckpointError(f"{index} is not an index of safetensors files: it names no tensor")
    for name, file in places.items():
        if not isinstance(file, str) or not file or Path(file).name != file or "\0" in file:
            raise CheckpointError(
                f"{index} puts {name} into {file!r}; only files in its own directory are read"
            )
    return places


def open_file(file: Path, dtypes: Mapping[str, np.dtype] = FLOATS) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, all of these dtypes.

    Raises:
      CheckpointError: a file that is not safetensors or is cut short, naming the first tensor
        that is incomplete.
    """
    size = file.stat().st_size
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(
                f"{file} ({size} bytes) is cut short or not a safetensors file: its header should "
                f"be {length} bytes; download or write it again"
            )
        raw = handle.read(length)
    try:
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {n: _tensor(n, file, entry, 8 + length, dtypes) for n, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} has a damaged header: {error}") from error
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        end = tensor.offset + math.prod(tensor.shape) * tensor.dtype.itemsize
        if end > size:
            raise CheckpointError(
                f"{file} is cut short: {tensor.name} ends at byte {end} and the file has {size}; "
                "download or write it again"
            )
    return tensors


def _tensor(
    name: str, file: Path, entry: Mapping, start: int, dtypes: Mapping[str, np.dtype]
) -> StoredTensor:
    if entry["dtype"] not in dtypes:
        raise CheckpointError(
            f"{file}: {name} is stored as {entry['dtype']}; Fornax loads {', '.join(dtypes)}"
        )
    dtype, shape = dtypes[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize or begin < 0 or min(shape, default=0) < 0:
        raise CheckpointError(
            f"{file}: {name} of shape {shape} and dtype {dtype} does not fill bytes {begin} to "
            f"{end}"
        )
    return StoredTensor(name, file, dtype, shape, start + begin)
