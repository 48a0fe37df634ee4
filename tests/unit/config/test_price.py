"""A price is a number or a file, and what is neither is named."""

import pytest

from fornax.config import ConfigError
from fornax.config.price import Price, PriceTable, read_prices


def test_a_number_is_the_price_of_every_chip():
    prices = read_prices("2.50")
    assert prices.of("v5p") == prices.of("cpu") == Price(chip_hour=2.5, currency="USD")


def test_a_file_has_a_price_for_each_chip(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text("currency: CHF\nchips: {v5p: 3.5, h100: 2}\ndefault: 1\n")
    prices = read_prices(str(path))
    assert prices == PriceTable(currency="CHF", chips={"v5p": 3.5, "h100": 2.0}, default=1.0)
    assert prices.of("h100") == Price(chip_hour=2.0, currency="CHF")
    assert prices.of("v6e") == Price(chip_hour=1.0, currency="CHF")


def test_a_chip_without_a_price_is_named():
    with pytest.raises(ConfigError, match="no price for v5p, it has v6e; add `v5p: PRICE`"):
        PriceTable(chips={"v6e": 1.0}).of("v5p")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "chips holds no prices"),
        ("chips: {v5p: -1}", "chips.v5p=-1.0 is not a price"),
        ("default: -0.5", "default=-0.5 is not a price"),
        ("chip: {v5p: 1}", "did you mean chips"),
        ("chips: {v5p: cheap}", r"chips\.v5p"),
    ],
)
def test_what_is_no_price_table_is_refused(tmp_path, text, message):
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_prices(str(path))


@pytest.mark.parametrize("text", ["none.yaml", "cheap", "3,5", ""])
def test_what_is_neither_a_number_nor_a_file_says_both(text):
    with pytest.raises(ConfigError, match="is neither a number nor a file; give US dollars for"):
        read_prices(text)


@pytest.mark.parametrize("text", ["-1", "nan", "inf"])
def test_a_number_that_is_no_price_is_refused(text):
    with pytest.raises(ConfigError, match=f"price={float(text)} is not a price; use a number"):
        read_prices(text)
