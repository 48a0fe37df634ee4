"""What the commands that train print at the end, and their `--price`."""

from typing import TYPE_CHECKING

from fornax.config.price import PriceTable, read_prices

if TYPE_CHECKING:
    from fornax.train import TrainResult

__all__ = ["ended", "prices_of"]


def prices_of(price: str | None) -> PriceTable | None:
    """The prices of a command line; None for none. Raises ConfigError if it is not a price."""
    return None if price is None else read_prices(price)


def ended(result: "TrainResult") -> int:
    """Say where a run's report is and what the run cost, in the first process; the exit code."""
    from fornax.train import RunDirectory
    from fornax.train.report import cost_line

    if result.goodput is not None:
        done = "stopped, saved" if result.reason == "signal" else "done"
        report = RunDirectory(result.run_dir).report
        print(f"{done} at step {result.step}: {report}")  # noqa: T201
        line = cost_line(result.run_dir)
        if line is not None:
            print(line)  # noqa: T201
    return result.exit_code
