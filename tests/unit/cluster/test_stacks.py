"""Stacks of processes that cannot write them themselves."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fornax.cluster.process_state import is_stopped
from fornax.cluster.stacks import ask, py_spy, read

SLEEPS = """
import faulthandler, signal, sys, threading, time
faulthandler.register(signal.SIGUSR1, file=open(sys.argv[1], "a"), all_threads=True)
there = threading.Event()
def deep():
    print("ready", flush=True)
    time.sleep(600)
def aside():
    there.set()
    time.sleep(600)
threading.Thread(target=aside, name="beside", daemon=True).start()
there.wait()
deep()
"""


@pytest.fixture
def process(tmp_path: Path):
    words = [sys.executable, "-c", SLEEPS, str(tmp_path / "stacks")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as found:
        assert found.stdout is not None
        found.stdout.readline()
        yield found
        found.kill()


def innermost(text: str) -> str:
    """The first line of the main thread, which is the last."""
    return text.rpartition("(most recent call first):")[2].strip().splitlines()[0]


@pytest.mark.skipif(py_spy() is None, reason="needs py-spy, of the extra [cluster]")
def test_a_stopped_process_is_read_and_stays_stopped(process: subprocess.Popen):
    os.kill(process.pid, signal.SIGSTOP)
    while not is_stopped(process.pid):
        time.sleep(0.01)
    text, why_not = read(process.pid)
    assert why_not == ""
    assert innermost(text).endswith(" in deep")
    assert " in aside" in text
    assert is_stopped(process.pid)


def test_what_cannot_be_read_says_why(process: subprocess.Popen, monkeypatch: pytest.MonkeyPatch):
    process.kill()
    process.wait()
    text, why_not = read(process.pid)
    assert text == ""
    assert why_not.startswith("shows no stack: py-spy")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "not installed" in read(process.pid)[1]


def test_a_running_process_adds_its_stacks_to_those_of_before(
    process: subprocess.Popen, tmp_path: Path
):
    for _ in range(2):
        text = ask(process.pid, tmp_path / "stacks")
        assert innermost(text).endswith(" in deep")
        assert text.count(" in deep") == 1
