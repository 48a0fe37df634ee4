"""Costs follow from the user's prices, and a file that is no price table is named."""

import pytest

from fornax.config import ConfigError
from fornax.plan.facts import Hardware, Run, Speed
from fornax.plan.price import PriceTable, cost, read_prices

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
    money = cost(PriceTable(currency="EUR", chips={"v5p": 2.0}), HARDWARE, RUN, SPEED)
    assert money.per_day == 2.0 * 24 * 64
    assert money.per_billion_tokens == pytest.approx(money.per_day / 0.864)
    assert money.days == 1.0
    assert money.whole_run == money.per_day
    assert money.currency == "EUR"


def test_a_chip_without_a_price_is_named():
    with pytest.raises(ConfigError, match="no price for v5p, it has v6e; add `v5p: PRICE`"):
        cost(PriceTable(chips={"v6e": 1.0}), HARDWARE, RUN, SPEED)


def test_the_file_is_read(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text("currency: CHF\nchips: {v5p: 3.5, h100: 2}\n")
    assert read_prices(path) == PriceTable(currency="CHF", chips={"v5p": 3.5, "h100": 2.0})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "chips holds no prices"),
        ("chips: {v5p: -1}", "chips.v5p=-1.0 is no price"),
        ("chip: {v5p: 1}", "did you mean chips"),
        ("chips: {v5p: cheap}", r"chips\.v5p"),
    ],
)
def test_what_is_no_price_table_is_refused(tmp_path, text, message):
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_prices(path)


def test_a_missing_file_says_the_format(tmp_path):
    with pytest.raises(ConfigError, match="does not exist; --price takes a YAML file such as"):
        read_prices(tmp_path / "none.yaml")
