"""What a plan costs at the user's own prices; Fornax knows none."""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path

from fornax.config import ConfigError, load
from fornax.plan.facts import Hardware, Money, Plan, Run, Speed

_DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class PriceTable:
    """A file of prices: `currency: EUR` and `chips: {v5p: 3.5, h100: 2.9}`, a chip and hour."""

    currency: str = "USD"
    """How amounts are named."""
    chips: dict[str, float] = field(default_factory=dict)
    """Chip, as in a topology, to what one of it costs an hour."""

    def __post_init__(self) -> None:
        """Check that every price is one."""
        if not self.chips:
            raise ConfigError(
                "chips holds no prices; write chip: price lines such as `chips: {v5p: 3.5}`, the "
                "price of one chip for an hour"
            )
        for chip, price in self.chips.items():
            if not (math.isfinite(price) and price >= 0):
                raise ConfigError(f"chips.{chip}={price} is no price; use a number of 0 or more")


def read_prices(path: Path, chip: str | None = None) -> PriceTable:
    """Read a file of prices.

    Args:
      path: the file.
      chip: a chip whose price is needed.

    Raises:
      ConfigError: for a file that is no price table, or has no price for `chip`.
    """
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist; --price takes a YAML file such as `currency: EUR` and "
            "`chips: {v5p: 3.5}`, the price of one chip for an hour"
        )
    prices = load(PriceTable, file=path)
    if chip is not None:
        _price(prices, chip)
    return prices


def _price(prices: PriceTable, chip: str) -> float:
    if chip not in prices.chips:
        raise ConfigError(
            f"the price table has no price for {chip}, it has {', '.join(prices.chips)}; add "
            f"`{chip}: PRICE` under chips"
        )
    return prices.chips[chip]


def cost(prices: PriceTable, hardware: Hardware, run: Run, speed: Speed) -> Money:
    """What training costs.

    Raises:
      ConfigError: when the table has no price for the chip.
    """
    price = _price(prices, hardware.chip)
    per_day = price * 24 * hardware.chips
    days = run.steps * speed.step_seconds / _DAY
    return Money(
        currency=prices.currency,
        per_chip_hour=price,
        per_day=per_day,
        per_billion_tokens=per_day / speed.tokens_per_day * 1e9,
        whole_run=per_day * days,
        days=days,
    )


def priced(plan: Plan, prices: PriceTable) -> Plan:
    """The plan with what training costs; one that is not of a training run stays as it is.

    Raises:
      ConfigError: when the table has no price for the chip.
    """
    if plan.run is None or plan.speed is None:
        return plan
    return dataclasses.replace(plan, money=cost(prices, plan.hardware, plan.run, plan.speed))
