"""The guide on installing names the extras that exist, and versions that CI pins."""

import re
import tomllib
from pathlib import Path

from fornax.cli.machine import EXTRAS

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "install.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FOR_FORNAX_ITSELF = {"docs", "dev", "parity"}


def test_every_extra_has_a_row_with_what_the_doctor_says_of_it():
    assert set(EXTRAS) | FOR_FORNAX_ITSELF == set(PROJECT["optional-dependencies"])
    section = GUIDE.partition("## Extras")[2].partition("## ")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE)) == EXTRAS


def test_extras_of_the_commands_exist():
    named = re.findall(r"(?:fornax-ai|-e '\.)\[([\w,]+)\]", GUIDE)
    assert len(named) >= 4
    for extras in named:
        assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_versions_that_were_tested_are_those_that_are_pinned():
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^(jax|libtpu)==(\S+) ; python_version < '3.12'", pins, re.MULTILINE))
    newest = re.findall(r"^jax==(\S+) ; python_version >= '3.12'", pins, re.MULTILINE)
    rows = dict(re.findall(r"^\| (Python 3\.\d+|libtpu) (.*?) \|", GUIDE, re.MULTILINE))
    assert rows["Python 3.11"] == f"with jax {pinned['jax']}"
    assert rows["Python 3.13"] == rows["Python 3.12"] == f"with jax {newest[0]}"
    assert rows["libtpu"] == f"{pinned['libtpu']} with jax {pinned['jax']}"
    bound = next(each for each in PROJECT["dependencies"] if each.startswith("jax>"))
    assert f"`{bound}`" in GUIDE
    assert "jax[cuda13]" in PROJECT["optional-dependencies"]["cuda"][0]
