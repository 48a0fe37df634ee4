"""Compile with few of XLA's optimizations: a test's program runs for milliseconds.

A folder's conftest.py takes the two hooks over; they hold for its tests and the fixtures those
ask for. The numbers are the same up to rounding; compilation takes about half of the time.
"""

from collections.abc import Iterator
from typing import Any

import jax
import pytest

__all__ = ["pytest_runtest_setup", "pytest_runtest_teardown"]

_NAME = "jax_disable_most_optimizations"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[Any]:
    """From before the first fixture."""
    del item
    jax.config.update(_NAME, True)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[Any]:
    """Until after the last one."""
    del item
    try:
        return (yield)
    finally:
        jax.config.update(_NAME, False)
