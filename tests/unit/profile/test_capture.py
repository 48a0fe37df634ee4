"""Captures of running programs: one at a time, bounded, whole."""

import gc
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fornax import profile
from fornax.config.errors import ProfileError
from fornax.profile import Capture, CaptureOptions

pytestmark = pytest.mark.usefixtures("measured_cpu")


@jax.jit
def double(x):
    return x * 2


def work() -> None:
    double(np.ones(8, np.float32)).block_until_ready()


def record(folder: Path) -> dict:
    return json.loads((folder / "capture-0.json").read_text())


def test_a_plain_program_needs_no_trainer_and_no_annotations(tmp_path):
    work()
    with profile.capture(tmp_path):
        for _ in range(5):
            work()
    found = profile.read(tmp_path)
    assert [step.name for step in found.steps] == ["jit_double"] * 5
    assert [step.number for step in found.steps] == list(range(5))
    for step, causes in found.step_times():
        assert sum(causes.nanoseconds.values()) == step.end - step.begin
    assert sum(row.count for row in found.ops().rows if "multiply" in row.key) == 5
    assert list(tmp_path.iterdir()) == [tmp_path / "plugins"]
    assert record(tmp_path / "plugins" / "profile" / found.info.folder)["ended"] == "stopped"


def test_what_compiles_inside_a_step_is_compile_time(tmp_path):
    with profile.capture(tmp_path):
        for number in range(3):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                size = 16 if number == 1 else 8
                jnp.exp(double(jnp.ones(size))).block_until_ready()
                jax.jit(lambda x, n=number: x + n)(jnp.ones(4)).block_until_ready()
    times = profile.read(tmp_path).step_times()
    assert all(causes.nanoseconds["compile"] > 1e6 for _, causes in times)


def test_a_directory_keeps_captures_and_the_newest_is_read(tmp_path):
    for name in ("first", "second"):
        with profile.capture(tmp_path, options=CaptureOptions(folder=name)):
            work()
    assert [path.name for path in profile.captures(tmp_path)] == ["first", "second"]
    assert profile.read(tmp_path).info.folder == "second"
    first = profile.read(tmp_path / "plugins" / "profile" / "first")
    assert first.info.folder == "first"
    with profile.capture(tmp_path / "run" / "profile", options=CaptureOptions(folder="of a run")):
        work()
    assert profile.read(tmp_path / "run").info.folder == "of a run"


def test_two_captures_at_once_are_refused_and_the_first_goes_on(tmp_path):
    with profile.capture(tmp_path / "one") as running:
        with pytest.raises(ProfileError, match="a capture runs already"):
            Capture(tmp_path / "two").start()
        assert running.running
        work()
    assert not running.running
    assert profile.read(tmp_path / "one").ops().rows
    assert not (tmp_path / "two").exists()


def test_a_trace_of_jax_itself_is_refused_by_its_message(tmp_path):
    with (
        jax.profiler.trace(str(tmp_path / "jax")),
        pytest.raises(ProfileError, match="Only one profile may be run"),
    ):
        Capture(tmp_path / "ours").start()
    with profile.capture(tmp_path / "ours"):
        work()
    assert not list((tmp_path / "ours").glob(".capture-*"))


def test_a_capture_ends_by_itself_at_its_limit_of_time(tmp_path):
    capture = Capture(tmp_path, CaptureOptions(seconds=0.2))
    capture.start()
    deadline = time.monotonic() + 240
    while capture.running and time.monotonic() < deadline:
        work()
        time.sleep(0.01)
    folder = capture.stop()
    assert record(folder)["ended"] == "seconds"
    assert profile.read(tmp_path).info.truncated


def test_a_capture_ends_by_itself_when_the_process_grows(tmp_path):
    capture = Capture(tmp_path, CaptureOptions(bytes=32 << 20))
    capture.start()
    held = bytearray(b"x") * (96 << 20)
    deadline = time.monotonic() + 240
    while capture.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert record(capture.stop())["ended"] == "bytes"
    assert len(held) == 96 << 20


def test_an_error_inside_still_ends_and_writes(tmp_path):
    work()
    with pytest.raises(TypeError), profile.capture(tmp_path):
        double(work())
    assert profile.read(tmp_path).ops().rows


def test_a_capture_may_be_stopped_from_another_thread_and_twice(tmp_path):
    capture = Capture(tmp_path)
    capture.start()
    work()
    thread = threading.Thread(target=capture.stop)
    thread.start()
    thread.join()
    assert capture.stop() == capture.stop()
    with pytest.raises(ProfileError, match="has ended"):
        capture.start()


def test_garbage_collections_are_seen_and_the_callback_goes(tmp_path):
    before = list(gc.callbacks)
    with profile.capture(tmp_path):
        assert len(gc.callbacks) == len(before) + 1
        gc.collect()
        work()
    assert gc.callbacks == before
    found = [each for each in profile.read(tmp_path).host.collections if each.generation == 2]
    assert found
    assert all(each.duration > 0 and each.begin >= 0 for each in found)


def test_python_calls_have_rows_of_their_own_when_asked_for(tmp_path):
    for python in (False, True):
        with profile.capture(tmp_path, options=CaptureOptions(python=python)):
            work()
        rows = profile.read(tmp_path).rows
        assert any(row.kind == "python" for row in rows) == python


_KILLED = """
import sys
from fornax.profile import Capture

Capture(sys.argv[1]).start()
print("started", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_what_a_killed_process_left_goes_and_what_runs_stays(tmp_path):
    words = [sys.executable, "-c", _KILLED, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    killed, running = (subprocess.Popen(words, **pipes) for _ in range(2))
    try:
        for process in (killed, running):
            assert process.stdout.readline() == b"started\n"
        assert len(list(tmp_path.glob(".capture-*"))) == 2
        killed.kill()
        killed.wait()
        with profile.capture(tmp_path):
            work()
        assert len(list(tmp_path.glob(".capture-*"))) == 1
    finally:
        running.kill()
        for process in (killed, running):
            process.communicate()
    with profile.capture(tmp_path):
        work()
    assert not list(tmp_path.glob(".capture-*"))
    assert len(profile.captures(tmp_path)) == 2


def test_what_cannot_be_written_is_refused_before_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot be written"):
        Capture(tmp_path / "file").start()
    with pytest.raises(ProfileError, match="never started"):
        Capture(tmp_path).stop()
    with profile.capture(tmp_path):
        work()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seconds": 0}, "0 seconds"),
        ({"seconds": 1e6}, "at most 3600"),
        ({"bytes": 5}, "at least 1048576"),
        ({"host_level": 9}, "use 1, 2 or 3"),
        ({"folder": "a/b"}, "is a path"),
    ],
)
def test_options_out_of_range_are_refused(values, message):
    with pytest.raises(ProfileError, match=re.escape(message)):
        CaptureOptions(**values)
