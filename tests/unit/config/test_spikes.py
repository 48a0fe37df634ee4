"""When a step is a loss spike: against medians and deviations computed again for each step."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fornax.config import ConfigError
from fornax.config.spikes import SpikeDetector
from fornax.train import DrillConfig, SpikeConfig, SpikeLimit

LIMIT = SpikeLimit(deviations=5.0, rise=0.2)
CONFIG = SpikeConfig(loss=LIMIT, grad_norm=None, window=8, warmup=3)


def metrics(loss: float, norm: float = 1.0, skipped: float = 0.0) -> dict[str, float]:
    return {"loss": loss, "grad_norm": norm, "skipped": skipped}


def judged(config: SpikeConfig, losses: list[float]) -> list[bool]:
    detector = SpikeDetector(config)
    steps = enumerate(losses, start=1)
    return [detector.judge(step, step - 1, metrics(loss)) is not None for step, loss in steps]


def expected(config: SpikeConfig, losses: list[float]) -> list[bool]:
    """The definition, in NumPy, from the list of all good steps."""
    limit, good, found = config.loss, [], []
    assert limit is not None
    for step, loss in enumerate(losses, start=1):
        window = np.array(good[-config.window :])
        spike = False
        if step > config.warmup and 4 * len(window) >= config.window:
            median = np.median(window)
            deviation = 1.4826 * np.median(np.abs(window - median))
            spike = bool(
                loss > median + limit.rise * abs(median)
                and loss > median + limit.deviations * deviation
            )
        found.append(spike)
        if step > config.warmup and not spike:
            good.append(loss)
    return found


@settings(max_examples=200)
@given(
    losses=st.lists(st.floats(-4, 40, width=32), max_size=40),
    window=st.integers(8, 12),
    warmup=st.integers(0, 6),
)
def test_a_spike_is_beyond_deviations_and_rise(losses: list[float], window: int, warmup: int):
    config = SpikeConfig(loss=LIMIT, grad_norm=None, window=window, warmup=warmup)
    assert judged(config, losses) == expected(config, losses)


def test_values_that_are_not_finite_are_spikes_at_once():
    detector = SpikeDetector(CONFIG)
    spike = detector.judge(1, 7, metrics(math.nan))
    assert spike is not None
    assert str(spike) == "step 1 (batch 7): loss nan is not finite"
    spike = detector.judge(1, 7, metrics(1.0, math.inf))
    assert spike is not None
    assert spike.metric == "grad_norm"


def test_a_spike_says_what_it_was_compared_with():
    detector = SpikeDetector(CONFIG)
    for step in range(1, 12):
        assert detector.judge(step, step, metrics(2.0 + 0.01 * (step % 3))) is None
    spike = detector.judge(12, 12, metrics(9.0))
    assert spike is not None
    assert (spike.value, spike.median, spike.limit) == (9.0, 2.01, pytest.approx(2.412))
    assert "loss 9 is a spike (median 2.01, limit 2.412)" in str(spike)


def test_a_fall_of_any_size_is_none():
    assert not any(judged(CONFIG, [float(100 - 9 * n) for n in range(30)]))


def test_steps_whose_update_was_left_out_are_not_compared_with():
    detector = SpikeDetector(CONFIG)
    for step in range(1, 30):
        assert detector.judge(step, step, metrics(0.0, 0.0, skipped=1.0)) is None
    assert detector.state()["loss"] == []


@given(losses=st.lists(st.floats(0, 10), min_size=4, max_size=30), cut=st.integers(0, 30))
def test_a_detector_resumed_from_json_judges_as_one_that_went_on(losses: list[float], cut: int):
    whole, first, second = (SpikeDetector(CONFIG) for _ in range(3))
    answers = [whole.judge(n, n, metrics(x)) for n, x in enumerate(losses, 1)]
    begun = [first.judge(n, n, metrics(x)) for n, x in enumerate(losses[:cut], 1)]
    second.restore(json.loads(json.dumps(first.state())))
    rest = [second.judge(n, n, metrics(x)) for n, x in enumerate(losses[cut:], len(begun) + 1)]
    assert begun + rest == answers


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"window": 2}, "window=2 must be 8 or more"),
        ({"snapshot_every": 0}, "snapshot_every=0 must be 1 or more"),
        ({"max_rewinds": -1}, "max_rewinds=-1 must be 0 or more"),
    ],
)
def test_wrong_numbers_are_refused(wrong: dict[str, int], message: str):
    with pytest.raises(ConfigError, match=message):
        SpikeConfig(**wrong)


def test_wrong_limits_and_drills_are_refused():
    with pytest.raises(ConfigError, match="both must be above 0"):
        SpikeLimit(deviations=0.0, rise=1.0)
    with pytest.raises(ConfigError, match="counted from 0"):
        DrillConfig(nan=(-1,))
