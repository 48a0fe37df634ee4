"""Rollouts as a few arrays, and trees of arrays as plain JSON: what a checkpoint holds of them."""

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fornax.config.errors import DataError
from fornax.tune.rollout.types import Completion

__all__ = [
    "TOKEN_ARRAYS",
    "array_state",
    "concatenated",
    "from_array_state",
    "parted",
    "rollouts_from_arrays",
    "rollouts_to_arrays",
    "routed_from_arrays",
    "routed_to_arrays",
]

StateTree = dict[str, Any]
"""What a position holds: JSON and arrays."""

TOKEN_ARRAYS: Mapping[str, type[np.generic]] = {
    "tokens": np.int32,
    "logprobs": np.float32,
    "versions": np.int32,
    "mask": np.int8,
}
"""The fields of a completion with an element for each token, and their types."""


def concatenated(
    records: Sequence[object], dtypes: Mapping[str, type[np.generic]]
) -> dict[str, np.ndarray]:
    """The array fields of records, each as one array over all of them."""
    return {
        name: np.concatenate([np.zeros(0, dtype), *(getattr(r, name) for r in records)])
        for name, dtype in dtypes.items()
    }


def parted(array: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """What `concatenated` joined, for records of these sizes."""
    return np.split(array, np.cumsum(sizes)[:-1]) if len(sizes) else []


class HasExperts(Protocol):
    """What may know the experts of its tokens."""

    @property
    def routed_experts(self) -> np.ndarray | None:
        """[tokens, L, k]."""


def routed_to_arrays(records: Sequence[HasExperts]) -> dict[str, np.ndarray]:
    """The experts that records have, of one model: `routed_experts`, one after the other, and
    `routed_lengths` int32, -1 for none. Nothing where no record has any."""
    given = [each.routed_experts for each in records]
    some = [each for each in given if each is not None]
    if not some:
        return {}
    return {
        "routed_experts": np.concatenate(some),
        "routed_lengths": np.array([-1 if x is None else len(x) for x in given], np.int32),
    }


def routed_from_arrays(arrays: Mapping[str, np.ndarray], count: int) -> Sequence[np.ndarray | None]:
    """What `routed_to_arrays` took of `count` records."""
    if "routed_lengths" not in arrays:
        return [None] * count
    lengths = arrays["routed_lengths"]
    parts = iter(parted(arrays["routed_experts"], np.maximum(lengths, 0).tolist()))
    return [part if length >= 0 else None for part, length in zip(parts, lengths, strict=True)]


def rollouts_to_arrays(rollouts: Sequence[Sequence[Completion]]) -> dict[str, np.ndarray]:
    """Completions of several prompts as a few arrays, for a checkpoint.

    Returns:
      Concatenated `tokens`, `logprobs`, `versions`, `mask`; `lengths` int32 of each completion;
      `counts` int32, completions of each prompt; `notes` uint8, JSON of the rest; and those of
      `routed_to_arrays`.
    """
    flat = [completion for group in rollouts for completion in group]
    notes = [(each.finish_reason, each.text, each.seed) for each in flat]
    return {
        **concatenated(flat, TOKEN_ARRAYS),
        **routed_to_arrays(flat),
        "lengths": np.array([len(each) for each in flat], np.int32),
        "counts": np.array([len(group) for group in rollouts], np.int32),
        "notes": np.frombuffer(json.dumps(notes).encode(), np.uint8).copy(),
    }


def rollouts_from_arrays(arrays: Mapping[str, np.ndarray]) -> list[list[Completion]]:
    """What `rollouts_to_arrays` took apart."""
    sizes = arrays["lengths"].tolist()
    columns = {name: parted(arrays[name], sizes) for name in TOKEN_ARRAYS}
    notes = json.loads(np.asarray(arrays["notes"], np.uint8).tobytes())
    routed = routed_from_arrays(arrays, len(notes))
    flat = [
        Completion(
            **{name: column[number] for name, column in columns.items()},
            finish_reason=reason,
            text=text,
            seed=seed,
            routed_experts=routed[number],
        )
        for number, (reason, text, seed) in enumerate(notes)
    ]
    ends = np.cumsum(arrays["counts"])
    return [flat[stop - n : stop] for n, stop in zip(arrays["counts"], ends, strict=True)]


_ARRAY = "__array__"
_NUMBER = "__float__"


def array_state(tree: object) -> Any:
    """Dicts, lists, tuples, numbers, text and numpy arrays as plain JSON.

    Arrays are compressed and spelled in base64, bit for bit; numpy's numbers become Python's, and
    tuples lists. Numbers that JSON has no word for (NaN, infinities) are spelled out.

    Raises:
      DataError: for anything else.
    """
    if isinstance(tree, np.generic):
        tree = tree.item()
    if tree is None or isinstance(tree, bool | int | str):
        return tree
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else {_NUMBER: repr(tree)}
    if isinstance(tree, np.ndarray) and tree.dtype.kind in "biuf":
        data = zlib.compress(np.ascontiguousarray(tree).tobytes(), 1)
        return {
            _ARRAY: base64.b64encode(data).decode(),
            "dtype": tree.dtype.str,
            "shape": list(tree.shape),
        }
    if isinstance(tree, dict):
        return {_key(key): array_state(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [array_state(value) for value in tree]
    raise DataError(f"a position cannot hold a {type(tree).__name__}; make it plain data")


def _key(key: object) -> str:
    if not isinstance(key, str) or key in (_ARRAY, _NUMBER):
        raise DataError(f"a position cannot hold the key {key!r}; use text")
    return key


def from_array_state(value: Any) -> Any:
    """What `array_state` was given, tuples as lists."""
    if isinstance(value, list):
        return [from_array_state(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _NUMBER in value:
        return float(value[_NUMBER])
    if _ARRAY in value:
        data = zlib.decompress(base64.b64decode(value[_ARRAY]))
        return np.frombuffer(data, np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    return {key: from_array_state(item) for key, item in value.items()}
