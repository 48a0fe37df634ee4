"""Exports: Perfetto's trace holds all that was captured; XProf's is in tests/parity."""

import dataclasses

import numpy as np
import pytest
from tests.unit.profile.captured import Timed, captured, operation
from tests.unit.profile.perfetto_trace import read_trace

from fornax.config.errors import ProfileError
from fornax.profile import Events, Row, Sample
from fornax.profile.export import write_perfetto


@pytest.fixture
def profile():
    parts = [
        Timed(operation=operation(f"dot.{at}"), times=np.full((6, 2), 10_000 + at))
        for at in range(3)
    ]
    whole = captured(parts)
    ends = np.array([5_000, 4_000, 9_000, 3_000])
    host = Events(
        begin=np.array([0, 1_000, 3_000, 20_000]),
        duration=ends,
        own=ends,
        name=np.zeros(4, np.int32),
        operation=np.full(4, -1, np.int32),
        step=np.full(4, -1, np.int32),
    )
    rows = (*whole.rows, Row(rank=0, device="", name="python", kind="host", events=host))
    sample = Sample(
        time=40_000, rank=0, device="cpu:0", bytes_in_use=77, peak_bytes=99, limit_bytes=None
    )
    return dataclasses.replace(whole, rows=rows, samples=(sample,))


@pytest.mark.parametrize("name", ["trace.pftrace", "trace.pftrace.gz"])
def test_every_event_is_there_with_what_it_is(profile, tmp_path, name):
    found = read_trace(write_perfetto(profile, tmp_path / name))
    for row in profile.rows:
        mine = [each for each in found.slices if each.category == row.kind]
        spans = sorted((each.begin, each.end) for each in mine)
        events = row.events
        assert spans == sorted(zip(events.begin.tolist(), events.end.tolist(), strict=True))
        names = [profile.names[at] for at in events.name]
        assert sorted(each.name for each in mine) == sorted(names)
    first = next(each for each in found.slices if each.category == "operations")
    assert first.arguments == {
        "module": "layers",
        "source": "model.py:10 (layer)",
        "class": "matmul",
        "flops": 1e6,
        "bytes": 1000.0,
    }
    steps = [each for each in found.slices if each.category == "step"]
    assert [each.name for each in steps] == [f"train {number}" for number in range(6)]
    assert ("memory in use", 40_000, 77) in found.counters
    step = profile.steps[0]
    rates = [(at, value) for name, at, value in found.counters if name == "GFLOP/s"]
    assert rates[0] == (step.begin, pytest.approx(6e6 / (step.end - step.begin)))
    assert rates[1] == (step.end, 0.0)


def test_events_of_one_thread_lie_inside_or_beside_each_other(profile, tmp_path):
    found = read_trace(write_perfetto(profile, tmp_path / "trace.pftrace"))
    threads = [each for each in found.tracks.values() if each.HasField("thread")]
    assert {"python", "python (2)"} <= {each.thread.thread_name for each in threads}
    assert len({each.thread.tid for each in threads}) == len(threads)
    processes = {each.uuid: each.process.pid for each in found.tracks.values()}
    assert all(processes[each.parent_uuid] == each.thread.pid for each in threads)
    names = {each.process.process_name for each in found.tracks.values()}
    assert {"rank 0: host host", "rank 0: cpu:0"} <= names
    depths = [each.depth for each in found.slices if each.category == "host"]
    assert sorted(depths) == [0, 0, 0, 1]


def test_each_step_points_at_its_first_operation(profile, tmp_path):
    found = read_trace(write_perfetto(profile, tmp_path / "trace.pftrace"))
    steps = [each for each in found.slices if each.category == "step"]
    ends = {flow: each for each in found.slices for flow in each.ended_flows}
    assert len(ends) == 6
    for step in steps:
        (flow,) = step.flows
        first = min(
            (e for e in found.slices if e.category == "operations" and e.begin >= step.begin),
            key=lambda each: each.begin,
        )
        assert ends[flow] is first


def test_times_before_the_first_rank_began_are_kept(profile, tmp_path):
    shifted = dataclasses.replace(
        profile,
        steps=tuple(
            dataclasses.replace(step, begin=step.begin - 500, end=step.end - 500)
            for step in profile.steps
        ),
    )
    found = read_trace(write_perfetto(shifted, tmp_path / "trace.pftrace"))
    step = next(each for each in found.slices if each.category == "step")
    first = next(each for each in found.slices if each.category == "operations")
    assert (step.begin, first.begin - step.begin) == (0, 500)


@pytest.mark.parametrize("name", ["trace.json.gz", "trace.pb", "trace.gz"])
def test_other_names_are_refused(profile, tmp_path, name):
    with pytest.raises(ProfileError, match=r"end it in \.pftrace\.gz"):
        write_perfetto(profile, tmp_path / name)
