"""What is said of a drill that was got over: its limits, and that the guide has the same ones."""

from pathlib import Path
from typing import Any

import pytest

from fornax.cluster import DrillOutcome
from fornax.cluster.storm import LIMITS

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "recovery.md"


def outcome(**changes: Any) -> DrillOutcome:
    of = {"fault": "kill", "rank": 1, "step": 40, "verdict": "killed", "faulty": 1, "named": 0.4}
    return DrillOutcome(**{**of, "stepped": 2.0, "steps": 0, "again": 3, **changes})


@pytest.mark.parametrize(
    ("changes", "over", "late"),
    [
        ({}, "", ""),
        ({"faulty": 2}, "the verdict is killed of rank 2", ""),
        ({"verdict": "group"}, "the verdict is group of rank 1", ""),
        ({"steps": 2}, "named 2 steps later, limit 1", ""),
        ({"named": 1.1}, "", "named after 1.1 s, limit 1 s"),
        ({"stepped": 8.4}, "", "a step after 8.4 s, limit 8 s"),
        ({"fault": "preempt", "verdict": "preempted"}, "3 steps made again, limit 0", ""),
        ({"fault": "slow", "verdict": "slow", "again": 0, "steps": 20, "named": 60.0}, "", ""),
        (
            {"fault": "controller", "rank": None, "faulty": None, "verdict": "service"},
            "the verdict is service",
            "",
        ),
    ],
)
def test_what_is_over_a_limit_is_said(changes: dict[str, Any], over: str, late: str):
    found = outcome(**changes)
    assert "; ".join(found.over) == over
    assert "; ".join(found.late()) == late
    ending = f"OVER: {over or late}" if over or late else "within its limits"
    assert str(found).endswith(ending)


def test_a_slow_machine_has_more_seconds():
    assert outcome(named=1.9, stepped=15.9).late(2.0) == ()
    assert outcome(named=2.1).late(2.0) == ("named after 2.1 s, limit 2 s",)


@pytest.mark.parametrize("fault", LIMITS)
def test_the_guide_has_the_limits(fault: Any):
    limit = LIMITS[fault]
    begins = (f"| `--{fault} ", f"| `--{fault}` ")
    rows = [line for line in GUIDE.read_text().splitlines() if line.startswith(begins)]
    assert rows
    for row in rows:
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        for cell, seconds, steps in (
            (cells[2], limit.named, limit.steps),
            (cells[4], limit.stepped, None),
        ):
            if seconds is not None:
                assert cell == f"{seconds:g} s"
            elif steps is not None:
                assert cell == f"{steps} steps"
            else:
                assert "s" not in cell
