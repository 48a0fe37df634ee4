"""What the native CPU kernels of this folder (`_native/layer.cc`, `sampling.cc`) share."""

import jax

from fornax.kernels import _native

__all__ = ["declines", "is_open"]

_DTYPES = ("float32", "bfloat16")


def declines(devices: int, *dtypes: str, unit: str = "layer") -> str | None:
    """Say why those of a unit cannot run a call over this many devices, of these dtypes."""
    for dtype in dtypes:
        if dtype not in _DTYPES:
            return f"it takes float32 and bfloat16, not {dtype}"
    if devices != 1:
        return f"XLA divides the call over {devices} devices"
    return _native.unavailable(unit)


def is_open(*arrays: jax.Array) -> bool:
    """Whether a size is open, as in an exported function, or 0: then XLA's formula runs."""
    return not all(isinstance(size, int) and size > 0 for x in arrays for size in x.shape)
