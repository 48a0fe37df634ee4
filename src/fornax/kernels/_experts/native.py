"""Whether the native CPU kernels for experts (`_native/experts.cc`) can take an array."""

import jax

from fornax.kernels import _native
from fornax.kernels._grouped.call import free_devices
from fornax.kernels.registry import current_platform

__all__ = ["takes"]


def takes(x: jax.Array) -> bool:
    """Whether they can: on one CPU with a C++ compiler, where no size is open or 0."""
    return (
        current_platform() == "cpu"
        and all(isinstance(size, int) and size > 0 for size in x.shape)
        and free_devices() == 1
        and _native.unavailable("experts") is None
    )
