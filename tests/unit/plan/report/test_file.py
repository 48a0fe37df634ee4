"""The JSON of a plan reads back equal, and says the most wanted figures first."""

import json

import pytest

from fornax.config import ConfigError
from fornax.plan.report import read_json, write_json


@pytest.mark.parametrize("fits", [True, False])
def test_a_plan_survives_its_json(make_plan, tmp_path, fits):
    plan = make_plan(fits=fits)
    assert read_json(write_json(plan, tmp_path / "deep" / "plan.json")) == plan


def test_the_summary_says_what_scripts_ask_for(make_plan, tmp_path):
    found = json.loads(write_json(make_plan(fits=False), tmp_path / "plan.json").read_text())
    assert found["summary"] == {
        "fits": False,
        "total_bytes": make_plan().main.memory.total,
        "usable_bytes": 31 << 30,
        "step_seconds": 12.5,
        "bound": "compute",
        "mfu": 0.513,
    }


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2}', "{"])
def test_another_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json is no"):
        read_json(tmp_path / "x.json")
