"""When requests are sent."""

import math

import numpy as np
import pytest

from fornax.llm.bench import BenchConfig, Request
from fornax.llm.bench.arrivals import send_times


def requests(count: int) -> list[Request]:
    return [Request(prompt=[1], prompt_tokens=1, output_tokens=1) for _ in range(count)]


def test_without_a_rate_all_are_sent_at_once():
    assert send_times(BenchConfig(), requests(4)) == [0.0] * 4


def test_the_last_request_goes_out_when_the_rate_says():
    for seed in range(5):
        times = send_times(BenchConfig(request_rate=10, seed=seed), requests(50))
        assert times[-1] == pytest.approx(5.0)
        assert times == sorted(times)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_the_intervals(burstiness):
    config = BenchConfig(request_rate=10, burstiness=burstiness)
    intervals = np.diff(send_times(config, requests(20000)))
    variation = intervals.std() / intervals.mean()
    assert variation == pytest.approx(burstiness**-0.5, rel=0.05)


def test_endless_burstiness_is_a_clock():
    config = BenchConfig(request_rate=4, burstiness=math.inf)
    assert send_times(config, requests(4)) == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_a_linear_ramp():
    config = BenchConfig(
        ramp_up_strategy="linear", ramp_up_start_rps=1, ramp_up_end_rps=3, burstiness=math.inf
    )
    assert np.diff(send_times(config, requests(3))) == pytest.approx([1 / 2, 1 / 3])


def test_an_exponential_ramp():
    config = BenchConfig(
        ramp_up_strategy="exponential", ramp_up_start_rps=1, ramp_up_end_rps=4, burstiness=math.inf
    )
    assert np.diff(send_times(config, requests(3))) == pytest.approx([1 / 2, 1 / 4])


def test_recorded_times_count_from_the_first():
    recorded = [
        Request(prompt=[1], prompt_tokens=1, output_tokens=1, timestamp=time) for time in (7, 7.5)
    ]
    assert send_times(BenchConfig(self_timed=True), recorded) == [0.0, 0.5]
