"""Line files: whole lines survive, torn ones go, nothing is written twice."""

import json
import os
from pathlib import Path

import pytest

from fornax.config.errors import FornaxError
from fornax.config.jsonl import JsonLines, keep_json_lines, read_json_lines


def test_lines_are_readable_before_close(tmp_path: Path):
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.write({"step": 1, "loss": 0.1})
    assert read_json_lines(tmp_path / "a.jsonl") == [{"step": 1, "loss": 0.1}]
    lines.close()


def test_numbers_that_are_not_finite_become_null(tmp_path: Path):
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.write({"loss": float("nan"), "norm": float("inf"), "ok": 1.5})
    lines.close()
    text = (tmp_path / "a.jsonl").read_text()
    assert json.loads(text) == {"loss": None, "norm": None, "ok": 1.5}


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3}', "\x00\x00\x00", '{"a\n'])
def test_a_torn_last_line_is_dropped_on_reopening(tmp_path: Path, torn: str):
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + torn)
    lines = JsonLines(path)
    lines.write({"step": 3})
    lines.close()
    assert [r["step"] for r in read_json_lines(path)] == [1, 2, 3]
    assert path.read_text().count("\n") == 3


def test_keep_rewrites_to_the_accepted_lines(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"step": {n}}}\n' for n in range(1, 6)))
    keep_json_lines(path, lambda record: record["step"] <= 3)
    assert [r["step"] for r in read_json_lines(path)] == [1, 2, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_lines_wait_for_room_on_a_full_disk(tmp_path: Path):
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.write({"step": 1})
    file, full = os.dup(lines._descriptor), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, lines._descriptor)
    for step in (2, 3):
        lines.write({"step": step})
    os.dup2(file, lines._descriptor)
    lines.write({"step": 4})
    assert [r["step"] for r in read_json_lines(tmp_path / "a.jsonl")] == [1, 2, 3, 4]
    os.dup2(full, lines._descriptor)
    with pytest.raises(FornaxError, match=r"cannot write .*a.jsonl: No space left on device; make"):
        lines.write({"text": "x" * (1 << 24)})
    with pytest.raises(FornaxError, match=r"cannot write .*a.jsonl: No space left on device; make"):
        lines.close()
    os.close(full)
    os.close(file)
