"""One compiled step for many runs."""

import pytest
from tests.unit.tune.rl.toy import BASE, Run


@pytest.fixture(scope="package")
def base(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose compiled step others take over."""
    return Run(BASE, tmp_path_factory.mktemp("base"))
