"""`kill -9` while a directory is written, then the same command: the files of a run without it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.quant.conftest import kill_after

from fornax.quant import quantize

pytestmark = [pytest.mark.fault, pytest.mark.slow]
OPTIONS = {"scheme": "w4a16-gptq", "length": 64, "samples": 16}


@pytest.fixture(scope="module")
def model(write_model: Callable[[int, int], Path]) -> Path:
    return write_model(512, 6)


def kill(lines: int, model: Path, out: Path, work: Path) -> None:
    flags = [word for key, value in OPTIONS.items() for word in (f"--{key}", str(value))]
    data = ["--data", str(model.parent / "texts.jsonl")]
    words = ["quantize", str(model), "--out", str(out), *data, *flags]
    kill_after(lines, words, work / "journal.jsonl")


def test_a_killed_run_goes_on_where_it_was(model: Path, tmp_path: Path) -> None:
    data = str(model.parent / "texts.jsonl")
    quantize(model, tmp_path / "whole", data=data, **OPTIONS)
    out, work = tmp_path / "out", tmp_path / ".out.quantizing"
    for lines in (1, 3):
        kill(lines, model, out, work)
        assert not out.exists()
        kept = {file.name: file.stat().st_mtime_ns for file in work.glob("model-*.safetensors")}
        assert kept
    quantize(model, out, data=data, **OPTIONS)
    for name, changed in sorted(kept.items())[:-1]:
        assert (out / name).stat().st_mtime_ns == changed, "done again"
    wanted = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    assert {file.name: file.read_bytes() for file in out.iterdir()} == wanted
    assert not work.exists()


def test_other_arguments_start_again(model: Path, tmp_path: Path) -> None:
    work = tmp_path / ".out.quantizing"
    kill(1, model, tmp_path / "out", work)
    assert list(work.glob("model-*.safetensors"))
    quantize(model, tmp_path / "out", scheme="w8a8")
    quantize(model, tmp_path / "whole", scheme="w8a8")
    wanted = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir()}
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == wanted
