"""Attribution: a run's time is cut into spans without gap or overlap, each with its cause."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fornax.config.goodput import CATEGORIES, attribute, summarise


def write(folder: Path, lines: list[dict], events: list[dict]) -> None:
    (folder / "goodput.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (folder / "events.jsonl").write_text("".join(json.dumps(x) + "\n" for x in events))


def line(time: float, step: int, *spans: tuple[str, float], attempt: int = 1) -> dict:
    seconds: dict[str, float] = {}
    for category, spent in spans:
        seconds[category] = seconds.get(category, 0.0) + spent
    return {
        "attempt": attempt,
        "step": step,
        "time": time,
        "seconds": seconds,
        "spans": [list(span) for span in spans],
    }


def start(time: float, step: int, attempt: int = 1) -> dict:
    return {"attempt": attempt, "start_step": step, "time": time}


def event(time: float, state: str, epoch: int = 1, **facts: object) -> dict:
    return {"time": time, "epoch": epoch, "state": state, "why": "", **facts}


def killed(time: float, epoch: int = 1, kind: str = "killed", since: float = 0.0) -> list[dict]:
    facts = {"rank": 2, "kind": kind, "since": since}
    return [
        event(time, "suspect", epoch, **facts),
        event(time + 0.5, "teardown", epoch, **facts),
    ]


def nonzero(folder: Path) -> dict[str, float]:
    found = summarise(folder / "goodput.jsonl")
    return {c: pytest.approx(s, abs=1e-6) for c, s in found.seconds.items() if s > 1e-6}


def test_a_killed_rank_of_a_launch(tmp_path: Path):
    """The first process computes 9 steps of a second; it keeps 6 in memory, and the fault is at
    20; its last line ends within the time that was spent on the recovery."""
    events = [
        event(0.0, "forming", free=0, hosts=2),
        event(10.0, "running", step=1),
        {"time": 20.0, "epoch": 1, "drill": "kill", "rank": 2, "step": 9},
        *killed(20.25),
        event(23.0, "forming", 2, free=1),
        event(26.0, "running", 2, step=7),
        event(40.0, "ended", 2, code=0),
    ]
    lines = [
        start(8.0, 0),
        line(8.0, 0, ("initialise", 5.0)),
        line(17.5, 6, ("compile", 2.0), ("step", 7.0), ("snapshot", 0.5)),
        line(22.0, 10, ("step", 4.5)),
        start(25.0, 6, attempt=2),
        line(25.0, 6, ("initialise", 1.0), ("restore", 0.5), attempt=2),
        line(38.0, 15, ("compile", 1.0), ("step", 12.0), attempt=2),
    ]
    write(tmp_path, lines, events)
    assert nonzero(tmp_path) == {
        "initialise": 3.0 + 5.0,  # until the first process had its clock, and from there
        "compile": 3.0,
        "step": 7.0 + 12.0,
        "snapshot": 0.5,
        "restore": 0.5,
        "detection": 0.25,
        "recovery": 2.75 + 0.5 + 1.0,  # to the forming, then imports, then what initialises
        "lost": 2.5 + 0.0,
        "other": 1.5 + 2.0 - 1.0 - 0.5,  # between line 1 and compile; after the last step
    }
    [fault] = attribute(tmp_path).faults
    assert (fault.drill, fault.began, fault.named, fault.formed) == ("kill", 20.0, 20.25, 26.0)
    assert attribute(tmp_path).steps == 15


def test_a_hang_is_detected_from_its_last_sign_of_life(tmp_path: Path):
    events = [
        event(0.0, "forming", free=0, hosts=2),
        event(1.0, "running", step=1),
        *killed(10.0, kind="stuck", since=4.0),
        event(11.0, "ended", code=2),
    ]
    write(tmp_path, [start(1.0, 0), line(3.0, 2, ("step", 2.0))], events)
    assert nonzero(tmp_path) == {
        "initialise": 1.0,
        "step": 2.0,
        "lost": 1.0,
        "detection": 6.0,
        "recovery": 1.0,
    }


def test_a_host_with_notice_loses_nothing(tmp_path: Path):
    events = [
        event(0.0, "forming", free=0, hosts=2),
        event(1.0, "running", step=1),
        {"time": 5.0, "epoch": 1, "drill": "preempt", "rank": 2, "step": 4},
        event(7.0, "teardown", kind="preempted", rank=2, since=6.0),
        event(8.0, "forming", 2, free=1),
        event(9.0, "running", 2, step=6),
    ]
    lines = [
        start(1.0, 0),
        line(6.0, 5, ("step", 4.5), ("checkpoint", 0.5)),
        start(9.0, 5, attempt=2),
        line(12.0, 8, ("step", 3.0), attempt=2),
    ]
    write(tmp_path, lines, events)
    expected = {"initialise": 1.0, "step": 7.5, "checkpoint": 0.5, "recovery": 3.0}
    assert nonzero(tmp_path) == expected


def test_chips_are_paid_while_processes_work(tmp_path: Path):
    """An attempt of 8 chips works from 0 to 20; nothing does until 50; then one of 4 chips begins,
    computes to 100, and is given a price."""
    lines = [
        {**start(5.0, 0), "chips": 8},
        line(5.0, 0, ("initialise", 5.0)),
        line(20.0, 10, ("step", 15.0)),
        {**start(60.0, 10, attempt=2), "chips": 4, "chip_hour": 9.0, "currency": "EUR"},
        line(60.0, 10, ("initialise", 10.0), attempt=2),
        line(100.0, 30, ("step", 40.0), attempt=2),
    ]
    write(tmp_path, lines, [])
    found = summarise(tmp_path / "goodput.jsonl")
    assert found.down_seconds == pytest.approx(30.0)
    assert found.chip_seconds == pytest.approx(8 * 20 + 4 * 50)
    assert found.cost == pytest.approx(9.0 * 360 / 3600)
    assert found.price is not None
    assert found.price.currency == "EUR"


def test_without_a_price_or_chips_there_is_no_cost(tmp_path: Path):
    work = line(20.0, 10, ("step", 20.0))
    write(tmp_path, [{**start(0.0, 0), "chips": 8}, work], [])
    assert summarise(tmp_path / "goodput.jsonl").cost is None
    write(tmp_path, [start(0.0, 0), work], [])
    found = summarise(tmp_path / "goodput.jsonl")
    assert (found.chip_seconds, found.cost) == (None, None)


def test_time_in_which_nothing_runs_is_none_of_the_run_s(tmp_path: Path):
    lines = [
        start(1.0, 0),
        line(5.0, 4, ("step", 4.0)),
        start(101.0, 2, attempt=2),
        line(103.0, 2, ("initialise", 2.0), attempt=2),
        line(106.0, 5, ("wait_for_data", 1.0), ("step", 2.0), attempt=2),
    ]
    lines[-1]["spans"] = [["step", 3.0]]
    write(tmp_path, lines, [])
    found = summarise(tmp_path / "goodput.jsonl")
    assert found.down_seconds == pytest.approx(96.0)
    assert found.wall_seconds == pytest.approx(9.0)
    assert nonzero(tmp_path) == {"initialise": 2.0, "step": 2.0, "wait_for_data": 1.0, "lost": 4.0}


times = st.floats(0.0, 8.0).map(lambda x: round(x, 3))


@st.composite
def launches(draw: st.DrawFn) -> tuple[list[dict], list[dict]]:
    """Epochs with faults of all kinds, and a record that stops and starts anywhere in them."""
    lines, events, now, step = [], [], 0.0, 0
    for epoch in range(1, draw(st.integers(1, 5)) + 1):
        waits = [event(now, "forming", epoch, waiting=1)] if draw(st.booleans()) else []
        now += draw(times) if waits else 0.0
        events += [*waits, event(now, "forming", epoch, free=0)]
        began = now + draw(times)
        lines.append(start(began, step, epoch))
        at = began
        for _ in range(draw(st.integers(0, 4))):
            kinds = st.sampled_from(["step", "compile", "checkpoint", "initialise", "restore"])
            spans = draw(st.lists(st.tuples(kinds, times), min_size=1, max_size=4))
            at += sum(spent for _, spent in spans) + draw(times)
            step += draw(st.integers(0, 3))
            lines.append(line(at, step, *spans, attempt=epoch))
        if draw(st.booleans()):
            events.append(event(now + draw(times), "running", epoch, step=step))
        now = max(now, events[-1]["time"]) + draw(times)
        ending = draw(st.sampled_from(["killed", "stuck", "preempted", "ended", "resized", "gone"]))
        if ending == "ended":
            events.append(event(now, "ended", epoch, code=0))
        elif ending == "resized":
            events.append(event(now, "running", epoch, hosts=3))
        elif ending != "gone":
            events += killed(now, epoch, ending, since=now - draw(times))
        now += draw(times) + 1
        step = draw(st.integers(0, step))
    return lines, events


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(run=launches())
def test_spans_follow_one_another_and_sum_to_the_wall_time(tmp_path: Path, run: tuple):
    lines, events = run
    write(tmp_path, lines, events)
    spans = attribute(tmp_path).spans
    assert all(span.end > span.begin for span in spans)
    assert all(a.end == b.begin for a, b in itertools.pairwise(spans))
    found = summarise(tmp_path / "goodput.jsonl")
    assert set(found.seconds) == set(CATEGORIES)
    assert min(found.seconds.values()) >= 0
    if spans:
        known = [record["time"] for record in lines if any(record.get("seconds", {}).values())]
        known += [e["time"] for e in events]
        assert spans[0].begin <= min(known)
        assert spans[-1].end >= max(known) - 1e-6
        assert sum(found.seconds.values()) + found.down_seconds == pytest.approx(
            spans[-1].end - spans[0].begin, abs=1e-6
        )
