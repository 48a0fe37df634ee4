"""Notebooks are stored without outputs and are listed; their runner does as Jupyter does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    stored = json.loads(path.read_text())
    assert (stored["nbformat"], stored["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in stored["cells"]]
    assert len(set(ids)) == len(ids)
    code = [cell for cell in stored["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_every_notebook_is_listed() -> None:
    page = (ROOT / "docs" / "tutorials" / "notebooks.md").read_text()
    assert len(NOTEBOOKS) == 3
    assert all(f"`{path.relative_to(ROOT)}`" in page for path in NOTEBOOKS)


def run(folder: Path, *cells: str) -> subprocess.CompletedProcess[str]:
    path = folder / "small.ipynb"
    stored = [{"cell_type": "markdown", "source": ["not ( code"]}]
    stored += [{"cell_type": "code", "source": text.splitlines(keepends=True)} for text in cells]
    path.write_text(json.dumps({"cells": stored}))
    command = [sys.executable, str(ROOT / "examples/notebooks/run.py"), str(path)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_cells_share_names_and_the_last_expression_is_shown(tmp_path: Path) -> None:
    source = "import inspect\n\n\ndef f(x):\n    return x + 1\n\n\nf(1)"
    done = run(tmp_path, source, "f(2)\nNone", "y = f(3)", "print(y)\ninspect.getsource(f)", "")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2", "4", repr("def f(x):\n    return x + 1\n")]


def test_an_error_names_its_cell_and_line_and_ends_the_notebook(tmp_path: Path) -> None:
    done = run(tmp_path, "x = 1", "y = 2\nassert x == y, 'differ'", "print('never')")
    assert done.returncode == 1
    assert done.stdout == ""
    assert 'File "small.ipynb, cell 2", line 2' in done.stderr
    assert "assert x == y, 'differ'" in done.stderr
