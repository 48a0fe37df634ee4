"""Cases of parametrized tests."""

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["one_in"]


def one_in(every: int, cases: Iterable[Any]) -> list[Any]:
    """Of each `every` cases the first runs in `make test`, the others with the slow tests.

    A tuple is the values of several arguments.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=pytest.mark.slow if number % every else (),
        )
        for number, case in enumerate(cases)
    ]
