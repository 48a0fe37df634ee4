"""Blocks of the pages whose commands are run say what they are, and why one is not run."""

import re

import pytest
from tests.integration.guides.test_commands_run import GIVEN
from tests.pages import REASONS, ROOT, blocks


@pytest.mark.parametrize("page", GIVEN)
def test_every_block_has_a_language_and_every_reason_is_known(page):
    for block in blocks(ROOT / "docs" / page):
        assert block.language, f"{block}: say sh (which runs), text, or another language"
        assert block.options.get("skip", "needs a GPU") in REASONS, str(block)
        if block.is_commands and "skip" not in block.options:
            assert not re.search(r"\b(pip|make|docker|kubectl|ssh)\b", block.text), str(block)
