"""Every test sees eight virtual CPU devices; NPROC keeps XLA from a deadlock on fewer cores."""

import os

from tests.xla_flags import xla_flags

os.environ["NPROC"] = "16"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    # A test's program runs for milliseconds: compiled with few of XLA's optimizations, in processes
    # that a test starts too, its numbers are the same up to rounding in half of the time.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {xla_flags(8)}".strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a name that is not a path is not asked for outside

import logging
import time
from collections.abc import Iterator

import hypothesis
import pytest
from tests.browser import browser, open_page
from tests.memory import (
    cache_left_as_found,
    programs_let_go,
    pytest_collection_finish,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
    small_process,
)

__all__ = [
    "browser",
    "cache_left_as_found",
    "open_page",
    "programs_let_go",
    "pytest_collection_finish",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
    "pytest_testnodedown",
    "small_process",
]

# A shared machine is slow at times; what a property says does not depend on it. The examples are
# the same on every machine and in every run.
hypothesis.settings.register_profile(
    "fornax",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("fornax")


_UNTIL = float(os.environ.get("TESTS_UNTIL", "inf"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what would begin after TESTS_UNTIL, in seconds since 1970."""
    if time.time() > _UNTIL:
        pytest.skip(f"TESTS_UNTIL has passed; by hand: python -m pytest '{item.nodeid}'")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the tests of the packages that TESTS_FIRST names, between spaces."""
    first = set(os.environ.get("TESTS_FIRST", "").split())
    items.sort(key=lambda item: first.isdisjoint(item.path.parts))


@pytest.fixture(autouse=True)
def logging_left_as_found() -> Iterator[None]:
    """Commands that serve or search send what Fornax logs to their own streams alone."""
    names = ("fornax", "fornax.llm.access", "fornax.quant", "grpc", "opentelemetry", "uvicorn")
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers[:] = handlers
        logger.propagate = propagate
        if logger.level != level:
            logger.setLevel(level)


@pytest.fixture(scope="module")
def optimized() -> Iterator[None]:
    """Compile a file's programs as a user's are: for tests of what the compiler makes of them."""
    import jax

    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, False)
    yield
    jax.config.update(name, before)
