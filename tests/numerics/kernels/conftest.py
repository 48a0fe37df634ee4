"""Processors that the tests of several kernels pretend to have."""

import pytest

from fornax.kernels import _native


@pytest.fixture
def without_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors on which XLA's products are the slower ones."""
    has = _native.has_features
    monkeypatch.setattr(
        _native,
        "has_features",
        lambda *names: not any(name.startswith("avx512") for name in names) and has(*names),
    )
