"""The guide for users of other stacks names keys that exist."""

import re
from pathlib import Path

import pytest

from fornax.cli.commands.schema import configs
from fornax.config import describe

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "coming-from.md"
HEADS = {
    "fornax train": ("train",),
    "fornax tune": ("tune sft",),
    "fornax tune grpo": ("tune grpo",),
    "fornax serve": ("serve",),
}


@pytest.mark.parametrize("head", HEADS)
def test_keys_of_the_tables_exist(head):
    known = {field.path for name in HEADS[head] for field in describe(configs()[name][1]())}
    # A group such as `lora` or `log.wandb` may be named as a whole.
    known |= {path.rpartition(".")[0] for path in known}
    found = 0
    table = False
    for line in GUIDE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 4:
            table = False
        elif cells[2] == f"`{head}`":
            table = True
        elif table:
            for key in re.findall(r"`([\w.]+)`", cells[2]):
                assert key in known, f"{key} is not a key of {head}"
                found += 1
    assert found >= 6
