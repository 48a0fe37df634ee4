"""Engines whose calls decode as many steps as they may, however slow the machine is."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def long_calls() -> Iterator[None]:
    """Time does not bound the steps of a call."""
    from fornax.llm import engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "CALL_SECONDS", 1e6)
        yield
