"""Weights from safetensors files, by a map from our names to theirs.

Tensors are mapped from the file and copied once, into the array asked for.
"""

import dataclasses
import fnmatch
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fornax.checkpoint.safetensors_file import DTYPES, open_file
from fornax.config.errors import BundleError, CheckpointError

__all__ = ["Tensor", "read_safetensors"]

_INDEX = "*.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One of our arrays out of theirs; the steps apply in the order of the fields."""

    name: str
    """Their name; with `stack`, a `{}` in it stands for the index."""
    _: dataclasses.KW_ONLY
    transpose: bool | tuple[int, ...] = False
    """True reverses the axes (PyTorch keeps [outputs, inputs]); a tuple orders them."""
    reshape: tuple[int, ...] | None = None
    """The shape to give it after that; one -1 is worked out."""
    stack: int | None = None
    """How many tensors are stacked along a new first axis, for layers that are scanned."""
    dtype: str | None = None
    """What to convert to; None keeps theirs."""


def read_safetensors(
    path: str | Path,
    names: Mapping[str, str | Tensor],
    *,
    like: object = None,
    ignore: Sequence[str] = (),
) -> Any:
    """Arrays for `export.save(params=...)`, or a module with its arrays filled in.

    Args:
      path: a .safetensors file, or a folder of them, with its index where there are several.
      names: our path, such as `layers/q/kernel`, to their tensor.
      like: what `names` must fill, whole: a pytree or an `nnx.Module`, of arrays or of shapes
        (`nnx.eval_shape`). The result is the same with the arrays in it; dtypes are its own.
      ignore: patterns of their names that are left behind on purpose.

    Returns:
      With `like`, the same structure; without, nested dicts, one level a `/`.

    Raises:
      BundleError: a file that is missing or damaged, a tensor that is not there, is of another
        shape, or is neither named nor ignored.

    Example:
      >>> encoder = read_safetensors(
      ...     "model.safetensors",
      ...     {"table": "embeddings.weight", "head/kernel": Tensor("cls.weight", transpose=True)},
      ...     ignore=("pooler.*",),
      ... )
    """
    found = _find(Path(path))
    wanted = {
        ours: source if isinstance(source, Tensor) else Tensor(source)
        for ours, source in names.items()
    }
    _check_all_used(Path(path), found, wanted, ignore)
    arrays = {ours: _make(ours, source, found) for ours, source in wanted.items()}
    return _nest(arrays) if like is None else _fill(like, arrays)


def _check_all_used(
    path: Path, found: Mapping[str, object], wanted: Mapping[str, Tensor], ignore: Sequence[str]
) -> None:
    used = {name for source in wanted.values() for name in _their_names(source)}
    spare = [
        name
        for name in found
        if name not in used and not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore)
    ]
    if spare:
        raise BundleError(
            f"{path} has {len(spare)} tensors that the map does not name, such as "
            f"{', '.join(spare[:3])}; map them, or give patterns for them in ignore="
        )


def _their_names(source: Tensor) -> list[str]:
    if source.stack is None:
        return [source.name]
    return [source.name.format(index) for index in range(source.stack)]


def _make(ours: str, source: Tensor, found: Mapping[str, np.ndarray]) -> np.ndarray:
    parts = []
    for name in _their_names(source):
        if name not in found:
            raise BundleError(
                f"{ours!r} is to come from tensor {name!r}, which the file does not have; it has "
                f"{', '.join(sorted(found)[:5])}{', ...' if len(found) > 5 else ''}"
            )
        parts.append(_shaped(ours, source, found[name]))
    if any(part.shape != parts[0].shape for part in parts):
        raise BundleError(f"{ours!r} stacks tensors of different shapes: {source.name}")
    whole = parts[0] if source.stack is None else np.stack(parts)
    dtype = whole.dtype if source.dtype is None else _dtype(source.dtype)
    return np.array(whole, dtype=dtype, order="C")


def _shaped(ours: str, source: Tensor, tensor: np.ndarray) -> np.ndarray:
    try:
        if source.transpose:
            order = source.transpose if isinstance(source.transpose, tuple) else None
            tensor = np.transpose(tensor, order)
        return tensor if source.reshape is None else tensor.reshape(source.reshape)
    except ValueError as error:
        raise BundleError(
            f"{ours!r}: {source.name!r} of shape {tensor.shape} cannot be turned so: {error}"
        ) from error


def _dtype(name: str) -> np.dtype:
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError as error:
        raise BundleError(f"dtype {name!r} is not known; use float32, bfloat16, int8, ...") from (
            error
        )


def _nest(arrays: Mapping[str, np.ndarray]) -> dict[str, object]:
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        *folders, last = path.split("/")
        node: Any = tree
        for folder in folders:
            node = node.setdefault(folder, {})
            if not isinstance(node, dict):
                raise BundleError(f"{path!r} lies below {folder!r}, which is an array itself")
        if last in node:
            raise BundleError(f"{path!r} is named twice, or is the folder of another name")
        node[last] = array
    return tree


def _fill(like: object, arrays: Mapping[str, np.ndarray]) -> object:
    from fornax.export.modules import take_apart

    parts = take_apart(like, abstract=True)
    missing = [name for name in parts.params if name not in arrays]
    extra = [name for name in arrays if name not in parts.params]
    if missing or extra:
        what = f"does not fill {', '.join(missing[:3])}" if missing else f"names {extra[0]!r}"
        raise BundleError(
            f"the map {what}; the parameters are {', '.join(sorted(parts.params)[:8])}"
            f"{', ...' if len(parts.params) > 8 else ''}"
        )
    filled = {}
    for name, slot in parts.params.items():
        if arrays[name].shape != tuple(slot.shape):
            raise BundleError(
                f"{name!r} has shape {arrays[name].shape} and {tuple(slot.shape)} is needed; "
                "transpose or reshape it in its Tensor(...)"
            )
        filled[name] = arrays[name].astype(slot.dtype, copy=False)
    return parts.rebuild(filled)


def _find(path: Path) -> dict[str, np.ndarray]:
    if path.is_file():
        return _open(path)
    if not path.is_dir():
        raise BundleError(f"{path} is neither a .safetensors file nor a folder of them")
    files = sorted(path.glob("*.safetensors"))
    for index in path.glob(_INDEX):
        files = [path / name for name in _files_of(index)]
    if not files:
        raise BundleError(f"{path} holds no .safetensors file")
    found: dict[str, np.ndarray] = {}
    for file in files:
        if not file.is_file():
            raise BundleError(f"{file} is missing, and the folder's index names it")
        for name, tensor in _open(file).items():
            if name in found:
                raise BundleError(f"tensor {name!r} lies in two files of {path}; name one file")
            found[name] = tensor
    return found


def _files_of(index: Path) -> list[str]:
    """The files that an index names: plain names, so that it cannot reach other folders."""
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{index} is not an index of safetensors files: {error}") from error
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise BundleError(f"{index} names {file!r}; only files in its own folder are read")
    return files


def _open(file: Path) -> dict[str, np.ndarray]:
    """The tensors of one file, mapped and not read until touched."""
    try:
        return {name: tensor.view() for name, tensor in open_file(file, DTYPES).items()}
    except CheckpointError as error:
        raise BundleError(f"{file} is not a readable safetensors file: {error}") from error
