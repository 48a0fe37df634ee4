"""Stages that run once: each leaves a result on disk, and a second call starts after the last one.

    <run_dir>/stages/<name>.json    {"name": ..., "inputs": ..., "seconds": ..., "result": {...}}

A result counts while the inputs it was made from are the same; a changed input is an error that
says so, never a silent mixture of two runs.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from fornax.config.errors import ConfigError
from fornax.config.files import write_whole

__all__ = ["Done", "Interrupted", "SizeName", "Stage", "Stages", "StagesConfig", "all_stages"]

Result = dict[str, Any]
SizeName = Literal["small", "tiny"]


@dataclass(frozen=True, kw_only=True)
class StagesConfig:
    """What every quickstart takes; each has its own default of `run_dir`."""

    size: SizeName = "small"
    """small: minutes on two cores; tiny: about two, to see that everything works."""
    run_dir: Path
    """Where everything is written; a second call resumes from there."""
    steps: int | None = None
    """Steps of training; none: as many as the size has."""
    seed: int = 0
    """Seed of the weights, of the order of the data, and of the samples."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps={self.steps} must be 1 or more")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed={self.seed} must lie in [0, 2**32)")


@dataclass(frozen=True)
class Stage:
    """One stage: its name, what it says it does, and the function that does it."""

    name: str
    title: str
    run: Callable[[], Result]
    """Returns what is kept: JSON-able."""
    summary: Callable[[Result], str]
    """One line about a result."""


@dataclass(frozen=True)
class Done:
    """A stage's kept result."""

    result: Result
    seconds: float
    """How long it took, over all the calls that it needed."""
    reused: bool


class Interrupted(Exception):  # noqa: N818 - not an error: the run was asked to stop
    """Training was stopped by a signal, with everything saved."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Stages:
    """The kept results of one run directory."""

    def __init__(self, directory: Path, inputs: Mapping[str, object]) -> None:
        """Open, or begin, the results in `directory`.

        Raises:
          ConfigError: when the directory holds results made from other inputs, or cannot be
            written.
        """
        self._directory = directory
        self._inputs = json.loads(json.dumps(inputs))
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _refused(directory, error) from error
        self._check_inputs(directory / "inputs.json")

    def _check_inputs(self, path: Path) -> None:
        if not path.exists():
            self._write(path, self._inputs)
            return
        kept = _read(path)
        changed = sorted(
            key
            for key in kept.keys() | self._inputs.keys()
            if kept.get(key) != self._inputs.get(key)
        )
        if changed:
            what = ", ".join(f"{k} {kept.get(k)} -> {self._inputs.get(k)}" for k in changed)
            raise ConfigError(
                f"{self._directory.parent} holds a quickstart made with other settings ({what}); "
                "choose another --run-dir, repeat the settings it was made with, or delete it"
            )

    def run(self, stage: Stage) -> Done:
        """Run the stage, or take the result it left."""
        path = self._directory / f"{stage.name}.json"
        if path.exists():
            kept = _read(path)
            return Done(kept["result"], kept["seconds"], reused=True)
        began = time.perf_counter()
        result = stage.run()
        seconds = round(time.perf_counter() - began, 2)
        self._write(path, {"name": stage.name, "seconds": seconds, "result": result})
        return Done(result, seconds, reused=False)

    def _write(self, path: Path, value: Mapping[str, object]) -> None:
        try:
            write_whole(path, json.dumps(value, indent=1))
        except OSError as error:
            raise _refused(path, error) from error


def all_stages(
    config: StagesConfig,
    size: Any,
    stages: Iterable[Stage],
    console: Console,
    **more: object,
) -> dict[str, Done]:
    """Run the stages in order, those that are done not again, and show a line of each.

    Args:
      config: of the quickstart.
      size: what its size means, a dataclass with `steps`; the text in `minutes` may change.
      stages: in order.
      console: where the lines go.
      more: what else another quickstart in the same directory would differ by.

    Returns:
      Each stage's result, by its name.

    Raises:
      Interrupted: a signal stopped one; everything is saved.
      ConfigError: the directory holds results made from other inputs, or cannot be written.
    """
    inputs = {name: value for name, value in asdict(size).items() if name != "minutes"} | more
    inputs |= {"size": config.size, "seed": config.seed, "steps": config.steps or size.steps}
    kept = Stages(config.run_dir / "stages", inputs)
    done: dict[str, Done] = {}
    for number, stage in enumerate(stages, start=1):
        console.print(f"\n[bold]{number}. {stage.title}[/bold]")
        done[stage.name] = found = kept.run(stage)
        took = "kept from before" if found.reused else f"{found.seconds:.1f} s"
        console.print(f"   {stage.summary(found.result)}  [dim]({took})[/dim]")
    return done


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); delete it, and its stage runs again"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no result; delete it, and its stage runs again")
    return value


def _refused(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write {path}: {error.strerror or error}; choose another --run-dir, or make room "
        "or make this one writable"
    )
