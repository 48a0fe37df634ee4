"""Programs of these tests are not optimised for seconds to run for milliseconds."""

from tests.quick import pytest_runtest_setup, pytest_runtest_teardown

__all__ = ["pytest_runtest_setup", "pytest_runtest_teardown"]
