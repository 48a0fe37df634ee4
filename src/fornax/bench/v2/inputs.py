"""The tensors that the load consists of: drawn at random by a model's metadata, or from a file."""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fornax.config import ConfigError, DataError, ServingError
from fornax.serving.types import TensorMetadata
from fornax.serving.v2.datatypes import DTYPES
from fornax.serving.v2.json_tensors import from_json

__all__ = ["Tensors", "generate", "read_inputs"]

Tensors = dict[str, np.ndarray]

_VARYING = 16
_INTEGERS = 100
_BYTES = 16


def generate(
    inputs: Sequence[TensorMetadata],
    *,
    rows: int,
    shapes: Mapping[str, tuple[int, ...]],
    count: int,
    seed: int,
) -> list[Tensors]:
    """Draw `count` requests: whole numbers from 0 to 99, normal floats, letters.

    A size that varies is `rows` where it is the first, else 16, unless `shapes` says otherwise.

    Raises ConfigError for a shape of no input, or one that does not fit its input.
    """
    names = {tensor.name: tensor for tensor in inputs}
    for name, shape in shapes.items():
        if name not in names:
            raise ConfigError(f"shape: {name!r} is not an input; the model has {', '.join(names)}")
        _check(names[name], shape)
    rng = np.random.default_rng(seed)
    chosen = {t.name: shapes.get(t.name) or _shape(t.shape, rows) for t in inputs}
    return [
        {tensor.name: _values(rng, tensor.datatype, chosen[tensor.name]) for tensor in inputs}
        for _ in range(count)
    ]


def _shape(shape: Sequence[int], rows: int) -> tuple[int, ...]:
    return tuple(
        size if size >= 0 else rows if place == 0 else _VARYING for place, size in enumerate(shape)
    )


def _check(tensor: TensorMetadata, shape: tuple[int, ...]) -> None:
    fits = len(shape) == len(tensor.shape) and all(
        size in (-1, given) for size, given in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        raise ConfigError(
            f"shape {list(shape)} does not fit {tensor.name}, which has {list(tensor.shape)} (-1: "
            "varies)"
        )


def _values(rng: np.random.Generator, datatype: str, shape: tuple[int, ...]) -> np.ndarray:
    dtype = DTYPES[datatype]
    if dtype == np.object_:
        letters = rng.integers(ord("a"), ord("z") + 1, (*shape, _BYTES), np.uint8)
        flat = [row.tobytes() for row in letters.reshape(-1, _BYTES)]
        array = np.empty(len(flat), np.object_)
        array[:] = flat
        return array.reshape(shape)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if np.issubdtype(dtype, np.integer):
        return rng.integers(0, _INTEGERS, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def read_inputs(path: Path, inputs: Sequence[TensorMetadata]) -> list[Tensors]:
    """Read requests from a file; each has every input of the model.

    Raises DataError for a file that is not there or has something else in it.
    """
    readers = {".npz": _npz, ".safetensors": _safetensors, ".json": _json}
    if path.suffix not in readers:
        raise DataError(f"{path}: inputs are read from {', '.join(readers)}; name such a file")
    try:
        requests = readers[path.suffix](path)
    except (OSError, ValueError, KeyError, TypeError, ServingError, struct.error) as error:
        raise DataError(f"{path}: cannot be read as {path.suffix[1:]}: {error}") from error
    if not requests:
        raise DataError(f"{path} has no request in it")
    return [_fit(path, request, inputs) for request in requests]


def _fit(path: Path, request: Tensors, inputs: Sequence[TensorMetadata]) -> Tensors:
    wanted = [tensor.name for tensor in inputs]
    missing = [name for name in wanted if name not in request]
    unknown = [name for name in request if name not in wanted]
    if missing or unknown:
        raise DataError(
            f"{path} has {', '.join(request)}, and the model takes {', '.join(wanted)}; "
            "name the arrays as the inputs"
        )
    return {t.name: np.asarray(request[t.name]).astype(DTYPES[t.datatype]) for t in inputs}


def _npz(path: Path) -> list[Tensors]:
    with np.load(path, allow_pickle=False) as arrays:
        return [{name: arrays[name] for name in arrays.files}]


def _safetensors(path: Path) -> list[Tensors]:
    from safetensors.numpy import load_file

    return [load_file(path)]


def _json(path: Path) -> list[Tensors]:
    found = json.loads(path.read_text(encoding="utf-8"))
    bodies = found if isinstance(found, list) else [found]
    return [
        {
            each["name"]: from_json(each["name"], each["datatype"], each["shape"], each["data"])
            for each in body["inputs"]
        }
        for body in bodies
    ]
