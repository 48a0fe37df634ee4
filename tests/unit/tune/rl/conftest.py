"""One compiled step for many runs, and none optimised for seconds to run for milliseconds."""

from collections.abc import Iterator

import jax
import pytest
from tests.unit.tune.rl.toy import BASE, Run


@pytest.fixture(scope="package")
def quick_compiles() -> Iterator[None]:
    """Compile with few of XLA's optimizations: the same numbers up to rounding."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="package")
def base(quick_compiles: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose compiled step others take over."""
    return Run(BASE, tmp_path_factory.mktemp("base"))
