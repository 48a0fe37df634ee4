"""The run directory: one process at a time, no stale locks, clear refusals."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fornax.config.errors import ConfigError
from fornax.train.run_dir import RunDirectory

HOLD = """
import sys, time
from fornax.train.run_dir import RunDirectory
with RunDirectory(sys.argv[1]):
    print("locked", flush=True)
    time.sleep(60)
"""


def hold(path: Path) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path: Path):
    process = hold(tmp_path / "run")
    try:
        with (
            pytest.raises(ConfigError, match=f"is in use: process {process.pid} on .* trains"),
            RunDirectory(tmp_path / "run"),
        ):
            pass
    finally:
        process.kill()
        process.communicate()


def test_the_lock_of_a_killed_process_is_no_lock(tmp_path: Path):
    process = hold(tmp_path / "run")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    with RunDirectory(tmp_path / "run"):
        pass


def test_a_forked_worker_does_not_keep_the_lock_of_its_killed_parent(tmp_path: Path):
    script = HOLD.replace(
        'print("locked"', "child = os.fork() or time.sleep(60)\n    print(child"
    ).replace("import sys", "import os, sys")
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    try:
        with RunDirectory(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_unlock_lets_the_next_one_in(tmp_path: Path):
    with RunDirectory(tmp_path):
        pass
    with RunDirectory(tmp_path):
        pass


def test_a_path_that_is_a_file_is_refused(tmp_path: Path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(
        ConfigError, match=r"cannot write the run directory .*run: .*exists; choose"
    ):
        RunDirectory(tmp_path / "run").create()


def test_config_is_replaced_whole(tmp_path: Path):
    directory = RunDirectory(tmp_path)
    directory.save_config("a: 1\n")
    directory.save_config("a: 2\n")
    assert directory.config.read_text() == "a: 2\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml"]
