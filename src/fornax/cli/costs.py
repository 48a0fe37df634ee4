"""`--price` of the commands that train, and what they print for it at the end."""

from typing import TYPE_CHECKING

from fornax.config.price import PriceTable, read_prices

if TYPE_CHECKING:
    from fornax.train import TrainResult

__all__ = ["ended", "prices_of"]


def prices_of(price: str | None) -> PriceTable | None:
    """The prices of a command line; None for none. Raises ConfigError if it is not a price."""
    return None if price is None else read_prices(price)


def ended(result: "TrainResult") -> int:
    """Say what a run cost, in the process that knows it; the exit code."""
    from fornax.train.report import cost_line

    line = None if result.goodput is None else cost_line(result.run_dir)
    if line is not None:
        print(line)  # noqa: T201
    return result.exit_code
