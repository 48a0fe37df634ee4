"""Costs follow from the user's price of a chip."""

import pytest

from fornax.config.price import Price
from fornax.plan.facts import Hardware, Run, Speed
from fornax.plan.price import cost

HARDWARE = Hardware(
    topology="v5p:4x4x4", chip="v5p", platform="tpu", chips=64, devices=64, hosts=16, slices=1,
    peak_flops=459e12, peak_dtype="bfloat16", memory_bandwidth=2.7e12, memory_bytes=1,
)  # fmt: skip
RUN = Run(
    parameters=1, batch_size=100, seq_len=1000, accumulate=1, steps=8640, remat="full",
    params_dtype="float32", compute_dtype="bfloat16", mesh={}, model_flops=1.0,
)  # fmt: skip
SPEED = Speed(
    step_seconds=10.0, mfu=0.5, hfu=0.5, tokens_per_second_per_chip=1.0,
    tokens_per_day=8640 * 100_000, bound="compute",
)  # fmt: skip


def test_a_day_a_billion_tokens_and_the_whole_run():
    money = cost(Price(currency="EUR", chip_hour=2.0), HARDWARE, RUN, SPEED)
    assert money.per_day == 2.0 * 24 * 64
    assert money.per_billion_tokens == pytest.approx(money.per_day / 0.864)
    assert money.days == 1.0
    assert money.whole_run == money.per_day
    assert money.currency == "EUR"
