"""The files of each release load, and what comes out of them is what came out then.

Written by tests/data/releases/write.py, once a release.
"""

import importlib.util
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[1] / "data" / "releases"
RELEASES = sorted(FOLDER.glob("*.tar.xz"))
KINDS = {"run", "hf", "adapter", "quantized", "diffusion", "resumed"}


def test_the_files_of_a_release_are_small_and_name_no_home(tmp_path: Path) -> None:
    assert RELEASES
    for path in RELEASES:
        assert path.stat().st_size < 300_000
        with tarfile.open(path) as archive:
            archive.extractall(tmp_path / path.name, filter="data")
    for file in tmp_path.rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        assert b"/home/" not in content, file
        assert b"/root/" not in content, file


@pytest.mark.slow
@pytest.mark.parametrize("path", RELEASES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def test_files_of_a_release_give_what_they_gave(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("write_release", FOLDER / "write.py")
    assert spec is not None
    assert spec.loader is not None
    writer = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "write_release", writer)
    spec.loader.exec_module(writer)
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)  # the run's config names its dataset beside it
    found = writer.answers()
    with np.load("answers.npz") as stored:
        expected = dict(stored)
    assert KINDS <= set(found) == set(expected)
    for name, array in expected.items():
        # float32, summed in another order by another version of XLA or another processor.
        np.testing.assert_allclose(found[name], array, rtol=2e-4, atol=2e-4, err_msg=name)
    assert np.abs(expected["adapter"] - expected["hf"]).max() > 0.01  # the adapter is in use
