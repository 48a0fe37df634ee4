"""Disks that are full or read-only: one paragraph, exit code 2, and nothing written is harmed."""

import json
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fornax.checkpoint import Checkpointer

pytestmark = [pytest.mark.fault, pytest.mark.slow]

LOSSES = ("step", "loss", "grad_norm", "tokens")


def losses(records: list[dict[str, Any]]) -> list[tuple]:
    return [tuple(record[name] for name in LOSSES) for record in records]


def read(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def check_refusal(code: int, output: str, *parts: str) -> None:
    assert code == 2, output
    assert "Traceback" not in output
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, output
    for part in parts:
        assert part in errors[0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for two checkpoints of the small model."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1400k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root; test_a_file_size_limit covers the path")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.exhaustive
def test_a_full_disk_keeps_what_was_written_and_the_run_goes_on_with_room(
    finish: Any, small_disk: Path, uninterrupted: list[dict[str, Any]]
):
    run_dir = small_disk / "run"
    changes = {"checkpoint": {"keep_last": 10}}
    code, output = finish(run_dir, **changes)
    check_refusal(code, output, "no space left on the disk", "is intact")
    steps = Checkpointer(run_dir / "checkpoints").all_steps()
    assert steps
    assert steps[-1] < 20
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    code, output = finish(run_dir, **changes)
    assert code == 0, output
    assert losses(read(run_dir)) == losses(uninterrupted)


@pytest.mark.exhaustive
def test_a_file_size_limit_is_named_and_the_run_goes_on_without_it(
    start: Any, finish: Any, tmp_path: Path, uninterrupted: list[dict[str, Any]]
):
    run_dir = tmp_path / "run"
    process = start(run_dir, env={"FORNAX_COMPILATION_CACHE": "0"})
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (40_000, 40_000))
    output, _ = process.communicate(timeout=400)
    check_refusal(
        process.returncode, output, "raise the file-size limit", "No step is complete yet"
    )
    code, output = finish(run_dir)
    assert code == 0, output
    assert losses(read(run_dir)) == losses(uninterrupted)


def test_a_read_only_directory_is_refused_before_anything_is_computed(finish: Any, tmp_path: Path):
    shut = tmp_path / "shut"
    shut.mkdir()
    root = os.geteuid() == 0
    if root:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(shut)], check=True)
    else:
        shut.chmod(0o555)
    try:
        code, output = finish(shut / "run")
    finally:
        if root:
            subprocess.run(["umount", "-l", str(shut)], check=True)
    check_refusal(code, output, "cannot write the run directory", "--run-dir")


def test_a_run_directory_in_use_is_refused(start: Any, finish: Any, tmp_path: Path):
    run_dir = tmp_path / "run"
    process = start(run_dir, steps=100_000, eval={})
    try:
        while not (run_dir / "goodput.jsonl").exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        code, output = finish(run_dir, steps=100_000, eval={})
        check_refusal(code, output, "is in use", f"process {process.pid}")
    finally:
        process.kill()
        process.communicate()
