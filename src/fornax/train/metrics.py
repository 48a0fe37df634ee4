"""Where metrics go: `metrics.jsonl` always, TensorBoard (`fornax.train.tensorboard`), Weights &
Biases, MLflow (`fornax.train.mlflow`) and Prometheus (`fornax.train.prometheus`) when asked for.

A record is a flat dict of one step: `step`, `time` (Unix seconds) and numbers. In `metrics.jsonl`
every logged step stands exactly once, over all kills and resumes: a resumed run first drops the
lines of steps after its checkpoint, then writes them again.
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fornax.config.errors import ConfigError
from fornax.config.jsonl import JsonLines, keep_json_lines, read_json_lines
from fornax.train.config import WandbConfig

__all__ = ["MetricsFile", "Record", "Sink", "Wandb", "numbers", "read_metrics"]

Record = Mapping[str, Any]


class Sink(Protocol):
    """Something that takes records."""

    def write(self, record: Record) -> None:
        """Take the record of one step."""
        ...

    def rewind(self, step: int) -> None:
        """Forget the records of steps after `step`: they come again."""
        ...

    def close(self) -> None:
        """Write out what is buffered."""
        ...


class MetricsFile:
    """`metrics.jsonl`: one line a logged step, flushed, each step once."""

    def __init__(self, path: Path, start_step: int) -> None:
        """Open for appending after dropping the lines of steps after `start_step`."""
        self._open(path, start_step)

    def _open(self, path: Path, step: int) -> None:
        keep_json_lines(path, lambda record: record["step"] <= step)
        self._lines = JsonLines(path)

    def write(self, record: Record) -> None:
        """Append the record."""
        self._lines.write(record)

    def rewind(self, step: int) -> None:
        """Drop the lines of steps after `step`."""
        self.close()
        self._open(self._lines.path, step)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_metrics(path: Path) -> list[dict[str, object]]:
    """The records of a `metrics.jsonl` in order of steps."""
    return read_json_lines(path)


class Wandb:
    """A Weights & Biases run, named by the run directory so that a resume continues it."""

    def __init__(self, config: WandbConfig, run_dir: Path, resolved: Mapping[str, object]) -> None:
        """Start or continue the run.

        Raises:
          ConfigError: when the `wandb` package is not installed.
        """
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(
                "log.wandb is set and the package `wandb` is not installed; install "
                "`fornax-ai[wandb]`, or remove log.wandb"
            ) from error
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.name or run_dir.name,
            id=config.name or run_dir.name,
            resume="allow",
            mode=config.mode,
            dir=str(run_dir),
            config=dict(resolved),
        )

    def write(self, record: Record) -> None:
        """Log the numbers at their step."""
        self._run.log(dict(numbers(record)), step=record["step"])

    def rewind(self, step: int) -> None:
        """Nothing: the service keeps what was logged first, and warns of the steps that follow."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def numbers(record: Record) -> Sequence[tuple[str, float]]:
    """What of a record a sink that draws curves takes, by name."""
    return [
        (name, float(value))
        for name, value in record.items()
        if name not in ("step", "time") and isinstance(value, int | float)
    ]
