"""The guide's table of drills says of each test when it runs, as its markers do."""

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def drills(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The rows of the table, and what writes it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import _drills

    return _drills


def test_the_guide_names_each_drills_tests_and_when_they_run(drills: ModuleType):
    guide = (ROOT / "docs" / "guides" / "recovery.md").read_text()
    table = guide.partition("<!-- drills -->")[2].partition("<!-- /drills -->")[0]
    lines = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    said = {cells[0]: cells[-1] for cells in lines}
    rows = (*drills.ROWS, drills.FULL)
    assert said == {row.title or row.name: drills.tested(row) for row in rows}


def test_a_test_runs_when_the_first_of_its_parameters_does(
    drills: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "test_some.py").write_text(
        "pytestmark = pytest.mark.fault\n"
        "def test_always(): ...\n"
        "@pytest.mark.slow\n"
        "@pytest.mark.parametrize('n', [1, pytest.param(2, marks=pytest.mark.exhaustive)])\n"
        "def test_in_ci(n): ...\n"
        "@pytest.mark.parametrize('n', [pytest.param(2, marks=pytest.mark.exhaustive)])\n"
        "def test_all_exhaustive(n): ...\n"
        "@pytest.mark.slow\n"
        "@pytest.mark.exhaustive\n"
        "def test_exhaustive(): ...\n"
    )
    (tmp_path / "test_other.py").write_text("def test_no_fault(): ...\n")
    monkeypatch.setattr(drills, "TESTS", tmp_path)
    names = ("always", "in_ci", "all_exhaustive", "exhaustive")
    found = [drills.runs(f"test_some.py::test_{name}") for name in names]
    assert found == ["always", "CI", "exhaustive", "exhaustive"]
    with pytest.raises(ValueError, match="has no test"):
        drills.runs("test_some.py::test_none")
    with pytest.raises(ValueError, match="lacks the marker"):
        drills.runs("test_other.py::test_no_fault")
