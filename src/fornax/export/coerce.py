"""What a user calls a function with to numpy arrays of its dtypes: lists, numbers, jax arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fornax.export.dtypes import BYTES, numpy_dtype
from fornax.export.spec import Signature

__all__ = ["as_arrays"]


def as_arrays(signature: Signature, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Arrays by name. What is an array already keeps its dtype, right or wrong."""
    return {
        name: _array(value, signature.inputs[name].dtype if name in signature.inputs else None)
        for name, value in inputs.items()
    }


def _array(value: Any, dtype: str | None) -> np.ndarray:
    if dtype == BYTES:
        return np.asarray(value, object)
    if dtype is None or hasattr(value, "dtype"):
        return np.asarray(value)
    array, wanted = np.asarray(value), numpy_dtype(dtype)
    if not _kind_fits(array, wanted):
        return array
    return array.astype(wanted)


def _kind_fits(array: np.ndarray, wanted: np.dtype) -> bool:
    """Whether numbers of Python mean the same in a dtype: whole ones anywhere that they fit."""
    kind = array.dtype.kind
    if kind == "b":
        return wanted.kind == "b"
    if kind in "iu" and wanted.kind in "iu":
        limits = np.iinfo(wanted)
        return not array.size or bool(array.min() >= limits.min and array.max() <= limits.max)
    return kind in "iuf" and wanted.kind in "fV"
