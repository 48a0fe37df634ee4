"""Prices of accelerators, which are the user's: Fornax knows none."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from fornax.config.errors import ConfigError
from fornax.config.load import load

__all__ = ["Price", "PriceTable", "read_prices"]


@dataclass(frozen=True, kw_only=True)
class Price:
    """What one chip costs for an hour."""

    chip_hour: float
    currency: str = "USD"


@dataclass(frozen=True, kw_only=True)
class PriceTable:
    """Prices of one chip for an hour, as a file has them."""

    currency: str = "USD"
    """How amounts are named."""
    chips: dict[str, float] = field(default_factory=dict)
    """Chip, as in a topology, to what one of it costs an hour; `cpu` is one device of a CPU."""
    default: float | None = None
    """Price of chips that `chips` does not list."""

    def __post_init__(self) -> None:
        """Check that every price is one."""
        if not self.chips and self.default is None:
            raise ConfigError(
                "chips holds no prices; write chip: price lines such as `chips: {v5p: 3.5}`, the "
                "price of one chip for an hour"
            )
        for chip, price in self.chips.items():
            _check(f"chips.{chip}", price)
        if self.default is not None:
            _check("default", self.default)

    def of(self, chip: str) -> Price:
        """The price of a chip.

        Raises:
          ConfigError: when the table has none.
        """
        price = self.chips.get(chip, self.default)
        if price is None:
            raise ConfigError(
                f"the price table has no price for {chip}, it has {', '.join(self.chips)}; add "
                f"`{chip}: PRICE` under chips"
            )
        return Price(chip_hour=price, currency=self.currency)


def read_prices(text: str) -> PriceTable:
    """What `--price` says: US dollars for one chip and hour, or a file of prices.

    Args:
      text: a number, such as `2.90`, or the path of a YAML file.

    Raises:
      ConfigError: for what is neither, and for a file that is not a price table.
    """
    try:
        price = float(text)
    except ValueError:
        path = Path(text)
    else:
        _check("price", price)
        return PriceTable(default=price)
    if not path.is_file():
        raise ConfigError(
            f"price={text} is neither a number nor a file; give US dollars for one chip and hour, "
            "such as 2.90, or a YAML file such as `currency: EUR` and `chips: {v5p: 3.5}`"
        )
    return load(PriceTable, file=path)


def _check(name: str, price: float) -> None:
    if not (math.isfinite(price) and price >= 0):
        raise ConfigError(f"{name}={price} is not a price; use a number of 0 or more")
