"""What an agent sees of a worker in the kernel's figures."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fornax.cluster.process_state import ProcessState
from fornax.config import worker_record
from fornax.config.worker_record import WorkerState

BUSY = "import os; os.sched_setaffinity(0, {{{cpu}}}); os.nice({nice})\nwhile True: pass"
CROWD = 4
THREAD = """
import threading, time
def report():
    print(threading.get_native_id(), flush=True)
    time.sleep(600)
thread = threading.Thread(target=report, daemon=True)
thread.start()
{then}
"""
PTRACE_SEIZE, WALL = 0x4206, 0x40000000


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """One that waits for a processor most of the time, and those that have it."""
    cpu = min(os.sched_getaffinity(0))
    nice = [19, *[0] * CROWD]
    found = [
        subprocess.Popen([sys.executable, "-c", BUSY.format(cpu=cpu, nice=each)]) for each in nice
    ]
    found.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
    yield found
    for process in found:
        process.kill()
        process.wait()


@pytest.fixture
def state(tmp_path: Path) -> WorkerState:
    worker_record.create(tmp_path / "record", rank=0, hosts=1, epoch=1)
    found = worker_record.read(tmp_path / "record")
    assert found is not None
    return found


@pytest.mark.slow
def test_a_worker_that_waits_for_a_processor_is_told_from_one_that_hangs(
    processes: list[subprocess.Popen[bytes]], state: WorkerState
):
    """Neither gives a sign of life; one would if it was let."""
    starved, *_, hangs = (process.pid for process in processes)
    waits, idle = ProcessState(starved), ProcessState(hangs)
    waits.look(state)
    deadline = time.monotonic() + 60
    while waits.starved < 1.0:
        assert time.monotonic() < deadline, waits.starved
        time.sleep(0.03)
        waits.look(state)
        idle.look(state)
    assert idle.starved < 0.5 * waits.starved
    waits.look(replace(state, beat_ns=state.beat_ns + 1))
    assert waits.starved == 0.0  # since the sign of life
    waits.close()
    idle.close()


@pytest.mark.fault
@pytest.mark.parametrize(
    ("then", "code"), [("time.sleep(600)", -signal.SIGKILL), ("time.sleep(0.5); exit(3)", 3)]
)
def test_a_process_that_one_thread_keeps_from_ending_has_its_exit_code(then: str, code: int):
    """As one whose thread waits for a disk: the kernel tells its parent when the last is gone. Here
    it is a thread that is traced, whose end the tracer has not taken note of."""
    process = subprocess.Popen(
        [sys.executable, "-c", THREAD.format(then=then)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    thread = int(process.stdout.readline())
    assert ctypes.CDLL(None, use_errno=True).ptrace(PTRACE_SEIZE, thread, 0, 0) == 0
    state = ProcessState(process.pid)
    state.look(None)
    assert state.ending is None
    if code < 0:
        process.kill()
    deadline = time.monotonic() + 60
    while state.ending is None:
        assert time.monotonic() < deadline
        time.sleep(0.03)
        state.look(None)
    assert state.ending == code
    assert process.poll() is None
    os.waitpid(thread, WALL)
    assert process.wait(60) == code
    process.stdout.close()
    state.close()
