"""One codec for all tests of encoding."""

import pytest
from tests.unit.tune.data.chats import codec

from fornax.tune.data import Codec


@pytest.fixture(scope="session")
def plain() -> Codec:
    """ChatML without marks."""
    return codec()
