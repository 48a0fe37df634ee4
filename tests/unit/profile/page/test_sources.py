"""Excerpts of source in a page."""

import os
import time
from pathlib import Path

import pytest

import fornax
from fornax.profile.page.sources import excerpts


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text("\n".join(f"line {number}" for number in range(1, 21)))
    os.utime(path, (1000, 1000))
    return path


def test_lines_stand_around_the_place(module: Path) -> None:
    place, beginning = f"{module}:10 (step)", f"{module}:2"
    found = excerpts([place, beginning, place], before=2000, version="")
    assert found[place] == (6, [f"line {number}" for number in range(6, 15)])
    assert found[beginning] == (1, [f"line {number}" for number in range(1, 7)])


def test_paths_of_this_package_are_found() -> None:
    place = "fornax/profile/page/sources.py:1"
    before = time.time() + 1
    _, lines = excerpts([place], before=before, version=fornax.__version__)[place]
    assert lines[0].startswith('"""The lines of Python')
    assert excerpts([place], before=before, version="0.0.1") == {}


def test_what_is_newer_absent_or_no_python_is_left_out(module: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hidden")
    places = [f"{secret}:1", f"{tmp_path}/none.py:3", "", "nowhere", f"{module}:100"]
    assert excerpts(places, before=2000, version="") == {}
    assert excerpts([f"{module}:10"], before=999, version="") == {}


def test_a_capture_of_somebody_else_opens_fornax_alone(module: Path) -> None:
    own = "fornax/profile/page/sources.py:1"
    outside = os.path.relpath(module, Path(fornax.__file__).parents[1])
    places = [f"{module}:10", f"{outside}:10", f"fornax/../{outside}:10", own]
    told = {"before": time.time() + 1, "version": fornax.__version__}
    assert set(excerpts(places, **told, own_only=True)) == {own}
    assert set(excerpts(places, **told)) == {f"{module}:10", own}
