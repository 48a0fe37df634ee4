"""When the state is next kept: Young's closed form in steps, within its bounds."""

import pytest

from fornax.config import ConfigError
from fornax.config.load import from_mapping
from fornax.plan.goodput.closed_form import young_interval
from fornax.train import TrainConfig
from fornax.train.interval import Interval, young

STEP, COST = 0.25, 0.5


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def kept(mtbf: float, steps: int, *, least: float = 0.0, most: float = 1e9) -> list[int]:
    """The steps kept by a run from step 10 on, whose every step and copy take the same time."""
    clock = Clock()
    interval = Interval(mtbf, most=most, clock=clock)
    interval.begin(10)
    found = []
    for step in range(11, 11 + steps):
        clock.now += STEP
        if interval.is_due(step):
            interval.start(step)
            clock.now += COST
            interval.finish(step, least=least)
            found.append(step)
    return found


def test_the_interval_loses_the_least():
    assert young(0.5, 3600.0) == young_interval(0.5, 3600.0) == 60.0
    lost = [each / 2 / 3600 + 0.5 / each for each in (50.0, young(0.5, 3600.0), 70.0)]
    assert min(lost) == lost[1]  # the share of time that goes to steps done again and to copies


@pytest.mark.parametrize(("mtbf", "apart"), [(3600.0, 240), (100.0, 40), (0.001, 1)])
def test_copies_are_as_far_apart_as_young_says(mtbf: float, apart: int):
    """The first is of the second step: the one before it tells what a step takes."""
    assert kept(mtbf, 500)[:3] == [12, 12 + apart, 12 + 2 * apart]
    assert apart == max(1, round(young_interval(COST, mtbf) / STEP))


def test_copies_are_never_closer_than_one_takes_nor_farther_than_asked():
    assert kept(0.001, 100, least=5.1)[:3] == [12, 12 + 21, 12 + 42]  # 20.4 steps, rounded up
    assert kept(1e9, 500, most=30.0)[:3] == [12, 12 + 120, 12 + 240]
    assert kept(1e9, 500, least=40.0, most=30.0)[:3] == [12, 12 + 160, 12 + 320]


def test_a_copy_that_costs_more_makes_the_next_wait_longer():
    clock = Clock()
    interval = Interval(100.0, clock=clock)
    interval.begin(0)
    found = []
    for cost in (0.02, 0.08, 0.32):
        clock.now += 1.0
        interval.is_due(1)
        clock.now += 1.0
        interval.start(2)
        clock.now += cost
        interval.finish(2)
        found.append(interval.steps)
        interval.begin(0)
    assert found == [2, 4, 8]


def test_a_run_that_goes_on_earlier_keeps_from_there():
    clock = Clock()
    interval = Interval(1e6, clock=clock)
    interval.begin(100)
    assert [interval.is_due(step) for step in (101, 102)] == [False, True]
    interval.begin(50)
    assert [interval.is_due(step) for step in (51, 52)] == [False, True]


def test_a_mean_time_between_failures_is_for_auto_only():
    config = from_mapping(TrainConfig, {"save_every": "auto", "checkpoint": {"mtbf_hours": 6}})
    assert (config.save_every, config.checkpoint.mtbf_hours) == ("auto", 6.0)
    assert TrainConfig().save_every == 500
    for every, said in ((100, "100"), (None, "null")):
        with pytest.raises(ConfigError, match=f"save_every is {said}; set it to auto"):
            from_mapping(TrainConfig, {"save_every": every, "checkpoint": {"mtbf_hours": 6}})
    with pytest.raises(ConfigError, match="mtbf_hours=0"):
        from_mapping(TrainConfig, {"save_every": "auto", "checkpoint": {"mtbf_hours": 0}})
    with pytest.raises(ConfigError, match="often"):
        from_mapping(TrainConfig, {"save_every": "often"})
