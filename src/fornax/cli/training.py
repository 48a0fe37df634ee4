"""What the commands that train share: their flags, the config of a run that is there, its end."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from fornax.cli.configured import ConfigArguments
from fornax.config import ConfigError
from fornax.config.price import read_prices

if TYPE_CHECKING:
    from fornax.train import TrainResult

__all__ = ["TrainingArguments", "run_to_end", "saved_config"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingArguments(ConfigArguments):
    """The flags of a command that trains, beside its run directory."""

    accept_changes: Annotated[tuple[str, ...], arg(metavar="KEY ...", help_behavior_hint="")] = ()
    """Keys, or patterns of them, that may differ from those the checkpoints were made with."""
    price: Annotated[str | None, arg(metavar="PRICE", help_behavior_hint="")] = None
    """What a chip costs an hour, in US$, or a YAML file of prices: the end and the report then say
    what the run cost."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """What is shown; auto is a bar on a terminal and lines elsewhere."""


def saved_config(
    run_dir: Path, arguments: ConfigArguments, overrides: Sequence[str], *, begin: str
) -> Path | None:
    """The config that a run directory keeps, where none is given; None for none.

    Args:
      run_dir: where the run is, or will be.
      arguments: of the command line.
      overrides: keys of the config on the command line.
      begin: how to begin a run, for the message.

    Raises:
      ConfigError: nothing says what to train.
    """
    from fornax.train import RunDirectory

    saved = RunDirectory(run_dir).config
    known = saved if saved.is_file() and arguments.config is None else None
    if not (arguments.config or known or overrides or arguments.help_config):
        raise ConfigError(f"{run_dir} has no run to resume; {begin}")
    return known


def run_to_end(
    train: "Callable[..., TrainResult]", config: Any, run_dir: Path, arguments: TrainingArguments
) -> int:
    """Train; say where the report is and what the run cost, in the first process; the exit code.

    Raises:
      ConfigError: `--price` is not a price; and what `train` raises.
    """
    from fornax.train import RunDirectory
    from fornax.train.report import cost_line

    result = train(
        config,
        run_dir,
        accept_changes=arguments.accept_changes,
        progress=arguments.progress,
        prices=None if arguments.price is None else read_prices(arguments.price),
    )
    if result.goodput is not None:
        done = "stopped, saved" if result.reason == "signal" else "done"
        report = RunDirectory(result.run_dir).report
        print(f"{done} at step {result.step}: {report}")  # noqa: T201
        line = cost_line(result.run_dir)
        if line is not None:
            print(line)  # noqa: T201
    return result.exit_code
