"""The ledger: categories sum to wall time, and work done twice is found to be lost."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fornax.config.goodput import CATEGORIES, summarise
from fornax.train.goodput import Ledger


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(
    moves=st.lists(
        st.tuples(st.sampled_from(CATEGORIES), st.floats(0, 10), st.floats(0, 10)), max_size=20
    )
)
def test_categories_always_sum_to_wall_time(moves: list[tuple]):
    clock = Clock()
    ledger = Ledger(clock, wall=clock)
    for category, inside, after in moves:
        with ledger.phase(category):
            clock.now += inside
        clock.now += after
    assert sum(ledger.totals().values()) == pytest.approx(clock.now - 100.0)


def test_nested_phases_count_once():
    clock = Clock()
    ledger = Ledger(clock, wall=clock)
    ledger.enter("step")
    with ledger.phase("evaluate"):
        clock.now += 1
        with ledger.phase("compile"):
            clock.now += 5
        clock.now += 2
    clock.now += 4
    totals = ledger.totals()
    assert (totals["evaluate"], totals["compile"], totals["step"]) == (3, 5, 4)


def test_a_phase_ends_when_its_block_raises():
    clock = Clock()
    ledger = Ledger(clock, wall=clock)
    with pytest.raises(KeyError), ledger.phase("restore"):
        raise KeyError
    clock.now += 2
    assert ledger.totals()["initialise"] == 2


def test_time_on_steps_done_again_is_lost(tmp_path: Path):
    path, clock = tmp_path / "goodput.jsonl", Clock()
    first = Ledger(clock, wall=clock)
    first.open(path, 0)
    clock.now += 2  # initialise
    first.enter("step")
    for step in (10, 20, 30):
        clock.now += 5
        first.flush(step)
    # killed here, checkpoint at 20: the third interval is done again
    second = Ledger(clock, wall=clock)
    second.open(path, 20)
    second.enter("restore")
    clock.now += 1
    second.enter("step")
    clock.now += 5
    second.close(30)
    found = summarise(path)
    assert found.attempts == 2
    assert found.seconds["lost"] == pytest.approx(5)
    assert found.seconds["step"] == pytest.approx(15)
    assert found.seconds["initialise"] == pytest.approx(2)
    assert found.seconds["restore"] == pytest.approx(1)
    assert found.wall_seconds == pytest.approx(23)
    assert found.goodput == pytest.approx(15 / 23)


def test_a_third_attempt_can_lose_the_work_of_the_first(tmp_path: Path):
    path, clock = tmp_path / "goodput.jsonl", Clock()
    for start, steps in ((0, (10, 20)), (20, ()), (10, (20,))):
        ledger = Ledger(clock, wall=clock)
        ledger.open(path, start)
        ledger.enter("step")
        for step in steps:
            clock.now += 4
            ledger.flush(step)
        ledger.close(start)
    found = summarise(path)
    assert (found.seconds["step"], found.seconds["lost"]) == pytest.approx((8, 4))


def test_time_on_steps_that_a_rewind_did_again_is_lost_to_spikes(tmp_path: Path):
    path, clock = tmp_path / "goodput.jsonl", Clock()
    ledger = Ledger(clock, wall=clock)
    ledger.open(path, 0)
    ledger.enter("step")
    for step in (10, 20, 30):
        clock.now += 5
        ledger.flush(step)
    with ledger.phase("spikes"):
        clock.now += 2  # back to the copy after step 20
        ledger.rewind(31, 20, [30])
        clock.now += 1
    clock.now += 5
    ledger.flush(30)
    # and killed: the checkpoint is that of step 10
    second = Ledger(clock, wall=clock)
    second.open(path, 10)
    second.enter("step")
    clock.now += 10
    second.close(30)
    found = summarise(path)
    assert found.seconds["spikes"] == pytest.approx(5 + 2 + 1)
    assert found.seconds["lost"] == pytest.approx(5 + 5)
    assert found.seconds["step"] == pytest.approx(5 + 10)
