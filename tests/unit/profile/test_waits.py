"""What threads waited for: by events of the runtime, and by Python's calls where those are in."""

import threading

import pytest
from tests.unit.profile.spaces import MS, Event, space, write

from fornax import profile
from fornax.profile import CaptureOptions


def test_waits_of_the_runtime_are_told_apart_and_added_up(tmp_path):
    wait = [
        Event("engine/wait", 0, 5 * MS),
        Event("Wait for donation holds", 6 * MS, MS),
        Event("train", 8 * MS, 9 * MS),
        Event("request/wait", 9 * MS, MS),  # the name of a request's mark, whatever it be
    ]
    pool = [Event("Wait for rendezvous callback", at * MS, MS) for at in (1, 3)]
    write(
        space({"/host:CPU": {"python": wait, "tf_XLAEigen/1": pool, "tf_XLAEigen/2": pool}}),
        tmp_path,
    )
    host = profile.read(tmp_path).host
    found = [(each.kind, each.name, each.threads, each.count) for each in host.waits]
    assert found == [
        ("device", "engine/wait", 1, 1),
        ("threads", "Wait for rendezvous callback", 2, 4),
        ("buffer", "Wait for donation holds", 1, 1),
    ]
    assert [each.seconds for each in host.waits] == pytest.approx([5e-3, 4e-3, 1e-3])
    assert any("CaptureOptions(python=True)" in each for each in host.unknown)
    assert any("interpreter lock" in each for each in host.unknown)


def test_a_lock_is_named_by_who_asked_for_it(tmp_path):
    lock, begun = threading.Lock(), threading.Event()

    def asks_in_vain() -> None:
        begun.set()
        lock.acquire()

    with profile.capture(tmp_path, options=CaptureOptions(python=True)):
        lock.acquire()
        thread = threading.Thread(target=asks_in_vain)
        thread.start()
        begun.wait()
        lock.release()
        thread.join()
    host = profile.read(tmp_path).host
    (wait,) = [each for each in host.waits if "asks_in_vain" in each.name]
    assert wait.kind == "lock"
    assert wait.count >= 1
    assert wait.name.startswith("test_waits.py:")
    assert not any("CaptureOptions" in each for each in host.unknown)
    assert any("with statement" in each for each in host.unknown)
