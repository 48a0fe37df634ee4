"""The dtypes of a bundle's tensors by name, without jax."""

from typing import Protocol

import ml_dtypes
import numpy as np

from fornax.config.errors import BundleError

__all__ = ["BYTES", "TENSORS", "Shaped", "is_wide", "numpy_dtype"]


class Shaped(Protocol):
    """An array of numpy or jax, a tracer, or a ShapeDtypeStruct."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """As numpy has it."""
        ...


BYTES = "bytes"
TENSORS = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
)
"""What a client can send or get: the datatypes of the V2 protocol. `bytes` is the other one."""

_EXTENDED = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3b11fnuz",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "int4",
    "uint4",
    "int2",
    "uint2",
    "float4_e2m1fn",
)
_WEIGHTS = {
    **{name: np.dtype(name) for name in TENSORS if name != "bfloat16"},
    "complex64": np.dtype("complex64"),
    "complex128": np.dtype("complex128"),
    **{n: np.dtype(getattr(ml_dtypes, n)) for n in _EXTENDED if hasattr(ml_dtypes, n)},
}


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of that name; `bytes` is uint8, as the function sees it.

    Raises:
      BundleError: for a name that a bundle cannot hold.
    """
    if name == BYTES:
        return np.dtype("uint8")
    if name not in _WEIGHTS:
        raise BundleError(f"dtype {name!r} is none of {', '.join([*_WEIGHTS, BYTES])}")
    return _WEIGHTS[name]


def is_wide(name: str) -> bool:
    """Whether jax computes with this dtype only under `jax.enable_x64`."""
    return name in ("int64", "uint64", "float64", "complex128")
