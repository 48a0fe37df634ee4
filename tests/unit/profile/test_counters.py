"""Hardware counters: read where a capture holds them, and said to be absent where not."""

import errno
import json
import mmap
import resource
import threading

import pytest
from tests.unit.profile.spaces import MS, Event, space, write

from fornax import profile
from fornax.cli.main import main as fornax
from fornax.profile import perf_events
from fornax.profile.perf_events import PerfEvents

FAULTS = "page faults"


def touch(pages: int) -> None:
    """Read pages that the kernel has to give first."""
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(pages):
            memory[page * mmap.PAGESIZE] = 1


@pytest.fixture
def counted():
    found = PerfEvents()
    if FAULTS in found.absent:
        pytest.skip(f"perf events: {found.absent[FAULTS]}")
    yield found
    found.close()


def test_all_threads_are_counted_those_that_come_later_too(counted):
    def now() -> float:
        return dict(zip(counted.names, counted.read(), strict=True))[FAULTS]

    before = now()
    touch(300)
    assert now() - before >= 300
    before = now()
    thread = threading.Thread(target=touch, args=(300,))
    thread.start()
    thread.join()
    assert now() - before >= 300
    assert set(counted.names) | set(counted.absent) == {
        "cycles", "instructions", "cache misses", "branch misses", FAULTS
    }  # fmt: skip
    counted.close()
    assert counted.read() == []


def test_a_process_with_few_files_left_keeps_them(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda of: (40, 40))
    found = PerfEvents()
    assert found.names == ()
    assert "ulimit -n" in found.absent["cycles"]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOENT, "the processor has none"),
        (errno.EACCES, "perf_event_paranoid"),
        (errno.EMFILE, "perf_event_open: Too many open files"),
    ],
)
def test_the_reason_for_none_is_named(number, said, monkeypatch):
    monkeypatch.setattr(perf_events, "_open", lambda *asked: (-1, number))
    found = PerfEvents()
    assert found.names == ()
    assert said in found.absent["instructions"]


def test_a_capture_says_what_was_counted_and_what_was_not(counted, tmp_path, capsys):
    with profile.capture(tmp_path):
        touch(500)
    found = profile.read(tmp_path).counters
    (faults,) = [each for each in found.series if each.name == FAULTS]
    assert faults.device == "cpu"
    assert faults.value[0] == 0
    assert faults.value[-1] >= 500
    assert faults.rate > 0
    assert (faults.time[1:] > faults.time[:-1]).all()
    assert set(found.absent) == set(counted.absent)
    assert fornax(["profile", "show", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert FAULTS in text
    assert all(name in text for name in counted.absent)


def device(kind: str, *lines: tuple[str, list[Event]]) -> dict[str, dict[str, list[Event]]]:
    return {f"/device:{kind}:0": dict(lines), "/host:CPU": {"python": [Event("run", 0, 9 * MS)]}}


def samples(name: str, *values: int, key: str = "value") -> list[Event]:
    return [Event(name, MS * at, 0, {key: value}) for at, value in enumerate(values)]


def test_cuptis_samples_are_counters_and_no_stream(tmp_path, capsys):
    counters = [
        *samples("sm__cycles_active.avg", 5, 9),
        Event("dram", MS, 0, {"read_bytes": 3, "write_bytes": 4, "unit": "B"}),
    ]
    stats = {"hlo_op": "dot.1", "hlo_module": "jit_step", "program_id": 1}
    stream = ("Stream #13(Compute)", [Event("gemm", MS, MS, stats)])
    write(space(device("GPU", stream, ("_counters_", counters))), tmp_path)
    found = profile.read(tmp_path)
    series = found.counters.series
    assert [row.name for row in found.rows if row.device] == ["Stream #13(Compute)"]
    told = {each.name: (each.device, each.time.tolist(), each.value.tolist()) for each in series}
    assert told == {
        "sm__cycles_active.avg": ("gpu:0", [0, MS], [5, 9]),
        "dram: read_bytes": ("gpu:0", [MS], [3]),
        "dram: write_bytes": ("gpu:0", [MS], [4]),
    }
    assert all(each.rate is None for each in series)
    assert found.counters.absent == {}
    figures = tmp_path / "figures.json"
    assert fornax(["profile", "show", str(tmp_path), "--json", str(figures)]) == 0
    assert "sm__cycles_active.avg" in capsys.readouterr().out
    assert json.loads(figures.read_text())["counters"][0]["value"] == [5, 9]


def test_a_tpus_counters_stand_beside_its_operations(tmp_path):
    ops = ("XLA Ops", [Event("%dot.1 = f32[4] dot(%p)", 0, MS, display="dot.1")])
    write(space(device("TPU", ops, ("_counters_", samples("HBM read", 7, 8, 9)))), tmp_path)
    found = profile.read(tmp_path)
    (one,) = found.counters.series
    assert (one.device, one.name, one.value.tolist()) == ("tpu:0", "HBM read", [7, 8, 9])
    assert [row.name for row in found.rows if row.device] == ["XLA Ops"]


@pytest.mark.parametrize(
    ("kind", "line", "absent", "why"),
    [
        ("GPU", "Stream #13(Compute)", "gpu:0", "gpu_pm_sample_counters"),
        ("TPU", "XLA Ops", "tpu:0", "profiler wrote none"),
    ],
)
def test_a_device_without_counters_is_named(kind, line, absent, why, tmp_path):
    write(space(device(kind, (line, [Event("dot.1", 0, MS)]))), tmp_path)
    found = profile.read(tmp_path).counters
    assert found.series == ()
    assert [*found.absent] == [absent]
    assert why in found.absent[absent]


def test_jaxs_own_capture_of_a_cpu_has_none(tmp_path):
    write(space({"/host:CPU": {"python": [Event("run", 0, MS)]}}), tmp_path)
    assert "jax.profiler alone" in profile.read(tmp_path).counters.absent["cpu"]
