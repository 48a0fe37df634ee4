"""What the native CPU kernels of this folder (`_native/layer.cc`) have in common."""

import jax

from fornax.kernels import _native

__all__ = ["DTYPES", "declines", "is_open"]

DTYPES = ("float32", "bfloat16")


def declines(devices: int, *dtypes: str) -> str | None:
    """Say why they cannot run a call over so many devices, of these dtypes."""
    for dtype in dtypes:
        if dtype not in DTYPES:
            return f"it takes float32 and bfloat16, not {dtype}"
    if devices != 1:
        return f"XLA divides the call over {devices} devices"
    return _native.unavailable("layer")


def is_open(*arrays: jax.Array) -> bool:
    """Whether a size is open, as in an exported function, or 0: then XLA's formula runs."""
    return not all(isinstance(size, int) and size > 0 for x in arrays for size in x.shape)
