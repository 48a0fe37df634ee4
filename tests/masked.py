"""A pytest plugin that hides instructions of the processor from the native kernels.

    INSTRUCTION_SET=avx2 python -m pytest -p tests.masked tests/numerics/kernels/test_packed.py

INSTRUCTION_SET is one of `units.PREBUILT`: kernels are compiled for it, and what asks which
features the processor has sees only those that it needs.
"""

import os

from fornax.kernels._native import build, units

_FLAGS, _FEATURES = units.PREBUILT[os.environ["INSTRUCTION_SET"]]
units.NATIVE = _FLAGS
build._features = lambda: _FEATURES


def pytest_report_header() -> str:
    """Say what the kernels are compiled for."""
    return f"native kernels: {' '.join(units.NATIVE)}"
