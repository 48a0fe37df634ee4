"""Native CPU kernels: C++ compiled on first use, called through XLA's foreign function calls."""

from fornax.kernels._native.build import (
    build_all,
    compiled,
    compiler,
    has_features,
    library_path,
    unavailable,
)

__all__ = ["build_all", "compiled", "compiler", "has_features", "library_path", "unavailable"]
