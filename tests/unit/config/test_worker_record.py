"""The record of a worker: what others read while it runs, is stopped, and after it was killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fornax.config import ClusterError, worker_record
from fornax.config.worker_record import WorkerRecord, create, read

WRITER = """
import sys, time
from pathlib import Path
from fornax.config.worker_record import WorkerRecord
record = WorkerRecord(Path(sys.argv[1]))
record.change("step", 0)
for step in range(1, 10**9):
    record.change("wait_for_data", step)
    record.change("step", step)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "rank-3.record"
    create(file, rank=3, hosts=4, epoch=7)
    return file


def test_a_record_says_who_writes_it_and_what_it_does(path: Path):
    before = read(path)
    assert before is not None
    assert (before.rank, before.hosts, before.epoch, before.pid) == (3, 4, 7, 0)
    record = WorkerRecord(path)
    record.change("wait_for_data", 41)
    began = time.monotonic_ns()
    record.change("step", 41)
    entered = time.monotonic_ns()
    since = time.time()
    record.change("checkpoint", 41)
    until = time.time()
    state = read(path)
    assert state is not None
    assert (state.pid, state.phase, state.step, state.entered_step) == (
        os.getpid(),
        "checkpoint",
        41,
        41,
    )
    assert began <= state.entered_ns <= entered
    assert state.changed_ns >= state.entered_ns
    assert since - 1 <= state.changed_at <= until + 1  # the clock may be set meanwhile


def test_a_record_says_on_which_data_it_works(path: Path):
    record = WorkerRecord(path)
    before = read(path)
    record.set_batch(0)
    record.set_transformed("code of " + "many " * 9, 2**40)
    during = read(path)
    record.set_transformed("", -1)
    record.set_kept(3)
    after = read(path)
    assert before is not None
    assert during is not None
    assert after is not None
    assert (before.batch, before.record, before.part) == (-1, -1, "")
    assert (during.batch, during.record, during.part) == (0, 2**40, ("code of " + "many " * 9)[:32])
    assert (after.batch, after.record, after.part, after.kept) == (0, -1, "", 3)


def test_going_back_into_a_step_is_not_entering_it_again(path: Path):
    """An evaluation ends in the phase of the step before it."""
    record = WorkerRecord(path)
    record.change("step", 5)
    first = read(path)
    record.change("evaluate", 5)
    record.change("step", 5)
    again = read(path)
    assert first is not None
    assert again is not None
    assert again.entered_ns == first.entered_ns
    assert again.changed_ns > first.changed_ns


def test_a_step_is_divided_into_data_code_and_what_ran_in_programs(path: Path):
    """Waiting in a program, as in a collective, belongs to none of them; working in it does."""
    record, began = WorkerRecord(path), time.monotonic_ns()
    record.change("wait_for_data", 1)
    time.sleep(0.2)
    record.change("step", 1)
    time.sleep(0.1)
    used = time.process_time_ns()
    with record.program():
        inside = read(path)
        time.sleep(0.5)
        busy = time.process_time()
        while time.process_time() - busy < 0.05:
            pass
    used = time.process_time_ns() - used
    record.change("checkpoint", 1)
    time.sleep(0.1)
    record.change("wait_for_data", 2)
    before = read(path)
    record.change("step", 2)
    after = read(path)
    assert inside is not None
    assert before is not None
    assert after is not None
    assert (inside.in_program, after.in_program) == (True, False)
    assert before.code_ns == before.busy_ns == 0  # what is reported is of the entry to step 1
    assert 0.2e9 <= before.data_ns < after.data_ns
    assert after.code_ns >= 0.1e9
    assert 0.05e9 <= after.busy_ns <= used
    waited = 0.5e9 + 0.1e9  # in the program and for the checkpoint
    assert after.data_ns + after.code_ns <= after.entered_ns - began - waited


def test_it_is_read_whole_while_it_is_written_and_after_a_kill(path: Path):
    """Two changes a step, as fast as they go: no reader sees half of one."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    try:
        deadline, seen = time.monotonic() + 300, []
        while len(set(seen)) < 20:
            assert time.monotonic() < deadline
            state = read(path)
            assert state is not None
            if state.step > 0:  # before, imports
                assert state.phase in ("wait_for_data", "step")
                assert state.step - state.entered_step == (state.phase == "wait_for_data")
                seen.append(state.step)
        assert seen == sorted(seen)
        os.kill(writer.pid, signal.SIGSTOP)
        time.sleep(0.6)
        stopped = read(path)
        assert stopped is not None
        assert time.monotonic_ns() - stopped.beat_ns > 0.5e9
    finally:
        writer.kill()
        writer.wait()
    state = read(path)
    assert state is not None
    assert state.pid == writer.pid
    assert state.step >= seen[-1]


def test_a_change_costs_a_few_microseconds_at_most(path: Path):
    """0.7 us where it was measured; the trainer makes two a step."""
    record, took = WorkerRecord(path), []
    for _ in range(20):
        begun = time.thread_time()
        for step in range(1000):
            record.change("step", step)
        took.append((time.thread_time() - begun) / 1000)
    assert min(took) < 20e-6


def test_what_is_no_record_is_refused(tmp_path: Path):
    with pytest.raises(ClusterError, match="is not a record of a worker"):
        WorkerRecord(tmp_path / "none")
    (tmp_path / "short").write_bytes(b"FXW1")
    assert read(tmp_path / "short") is None
    assert read(tmp_path / "none") is None


def test_without_a_launcher_there_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FORNAX_WORKER_RECORD", raising=False)
    assert worker_record.current.__wrapped__() is None
