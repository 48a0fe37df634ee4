"""A client's id is kept where a header, a log and a profile can hold it."""

import re

import pytest

from fornax.config.request_id import request_id


@pytest.mark.parametrize("given", ["a", "abc-1", "~!" * 64, b"bytes:7"])
def test_what_is_fit_is_kept(given):
    assert request_id(given) == (given if isinstance(given, str) else given.decode())


@pytest.mark.parametrize(
    "given", [None, "", b"", "a b", "a\n", "a\r\nx-admin: 1", "\x00", "é", b"\xff", "x" * 129]
)
def test_what_is_not_is_replaced(given):
    first, second = request_id(given), request_id(given)
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert first != second
