"""Worker processes: what they answer, how they end, and that nothing outlives who held it."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from fornax.config.worker_process import WorkerProcess, ending, receive, send

TARGET = "test_worker_process:serve"
SECONDS = 300


def serve(parent: Connection) -> None:
    """Do what is asked."""
    while True:
        match receive(parent):
            case {"echo": value}:
                sys.stdout.write("echoing\n")
                send(parent, value)
            case {"exit": code}:
                os._exit(code)
            case {"hang": file}:
                inner = subprocess.Popen(["sleep", "600"])
                Path(file).write_text(f"{os.getpid()} {inner.pid}")
                time.sleep(600)
            case _:
                os.kill(os.getpid(), signal.SIGABRT)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def test_it_answers_and_prints_to_its_log() -> None:
    with tempfile.TemporaryFile() as log, WorkerProcess(TARGET, log=log) as worker:
        for value in ("a", [1.5, None], {"ä": "\u2028"}):
            assert worker.ask({"echo": value}, SECONDS) == value
        log.seek(0)
        assert log.read() == b"echoing\n" * 3


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [({"exit": 3}, 3, "exit status 3"), ({"abort": 1}, -signal.SIGABRT, "SIGABRT")],
)
def test_its_end_is_told(request_: dict, code: int, words: str) -> None:
    with tempfile.TemporaryFile() as log, WorkerProcess(TARGET, log=log) as worker:
        with pytest.raises(EOFError):
            worker.ask(request_, SECONDS)
        assert worker.wait() == code
        assert ending(code) == words
        worker.send("nobody")
        with pytest.raises(EOFError):
            worker.receive(1)


def test_an_answer_over_the_limit_is_an_end() -> None:
    with WorkerProcess(TARGET) as worker, pytest.raises(EOFError):
        worker.ask({"echo": "x" * 1000}, SECONDS, longest=100)


def test_what_hangs_is_killed_with_what_it_began(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    with WorkerProcess(TARGET) as worker:
        worker.send({"hang": str(file)})
        _wait_until_written(file)
        with pytest.raises(TimeoutError):
            worker.receive(0.1)
        assert worker.kill() == -signal.SIGKILL
    _wait_until_dead(file)


@pytest.mark.parametrize(
    "stopped",
    [
        False,
        pytest.param(
            True, marks=pytest.mark.skipif(sys.platform != "linux", reason="by Linux's kernel")
        ),
    ],
)
def test_a_worker_that_hangs_ends_with_its_parent(tmp_path: Path, stopped: bool) -> None:
    file = tmp_path / "pids"
    program = f"""
        from fornax.config.worker_process import WorkerProcess
        WorkerProcess({TARGET!r}).ask({{"hang": {str(file)!r}}}, 600)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    _wait_until_written(file)
    assert parent.poll() is None
    if stopped:
        os.kill(int(file.read_text().split()[0]), signal.SIGSTOP)
    parent.kill()
    parent.wait()
    _wait_until_dead(file)


def _wait_until_written(file: Path) -> None:
    until = time.monotonic() + SECONDS
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < until
        time.sleep(0.02)


def _wait_until_dead(file: Path) -> None:
    for pid in map(int, file.read_text().split()):
        until = time.monotonic() + SECONDS
        while Path(f"/proc/{pid}").exists() and "Z" not in _state(pid):
            assert time.monotonic() < until, f"process {pid} lives on"
            time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2]
    except FileNotFoundError:
        return "Z"
