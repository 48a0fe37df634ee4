"""`fornax profile train` and `fornax profile tune METHOD`: some steps of a run, captured."""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from fornax.cli.arguments import Control
from fornax.cli.commands import profile_show
from fornax.cli.commands import tune as tune_command
from fornax.cli.configured import ConfigArguments, is_diffusion_config, read_config
from fornax.config import ConfigError
from fornax.tune.methods import METHODS

_TUNE_HELP = """Capture a profile of some steps of `fornax tune {name}`.

The flags are those of `fornax tune {name}`, each key of its config among them. The run starts from
scratch in a directory of its own, ends after the last step captured and keeps nothing else; a run
that is resumed takes --profile.steps 20..25.

example:
  fornax profile tune {example} --steps 20..25
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """Capture a profile of some steps of a training run, of fornax train or fornax diffusion train.

    Every key of the config is a flag too, but for steps. The run starts from scratch in a directory
    of its own, ends after the last step captured and keeps nothing else: no checkpoint, no run
    directory. To capture steps of a resumed run, give --profile.steps 20..25 to fornax train, or
    --profile.every 1000 for one step in 1000; a run that is under way captures on SIGUSR1.

    examples:
      fornax profile train --config run.yaml --steps 20..25 --out prof/
      fornax profile train --config run.yaml --batch-size 16 --out prof-16/
    """

    steps: Annotated[str, arg(metavar="A..B")] = "6..10"
    """First and last step to capture, counted from 1; those before warm up."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("prof")
    """Where the capture is written; it may hold others."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Train to the last step, and show the capture."""
    from fornax.train import TrainConfig, train

    if not (arguments.config or overrides or arguments.help_config):
        raise ConfigError("no run is described; name its config with --config FILE")
    if is_diffusion_config(arguments.config):
        return _run_diffusion(arguments, overrides)
    config = read_config(TrainConfig, arguments, overrides)
    return 0 if config is None else _capture(arguments, config, train)


def _run_diffusion(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Steps of `fornax diffusion train`, without its grids of samples."""
    from fornax.cli.commands.diffusion_train import with_images
    from fornax.diffusion.config import DiffusionConfig
    from fornax.diffusion.run import train

    config = read_config(DiffusionConfig, arguments, with_images(overrides))
    if config is None:
        return 0
    sample = dataclasses.replace(config.sample, every=None)
    return _capture(arguments, dataclasses.replace(config, sample=sample), train)


def command(name: str) -> Control:
    """`fornax profile tune METHOD`."""
    method = METHODS[name]
    inner = tune_command.command(name)

    def run(arguments: Arguments, overrides: Sequence[str]) -> int:
        from fornax.tune import tune

        if not (arguments.config or overrides or arguments.help_config):
            raise ConfigError("no run is described; begin with --model DIR --data FILE")
        with tempfile.TemporaryDirectory(prefix="fornax-profile-") as nowhere:
            given = {
                field.name: getattr(arguments, field.name)
                for field in dataclasses.fields(ConfigArguments)
            }
            config, _ = inner.read(inner.Arguments(**given, out=Path(nowhere)), overrides)
        return 0 if config is None else _capture(arguments, config, tune)

    text = _TUNE_HELP.format(name=name, example=method.example.rpartition(" --out")[0])
    return Control(type("Arguments", (Arguments,), {"__doc__": text}), run)


def _capture(arguments: Arguments, config: Any, train: Callable[..., Any]) -> int:
    from fornax.train import ProfileConfig

    if (config.processes.num_processes or 1) > 1:
        raise ConfigError(
            "fornax profile train is one process, and processes.num_processes is "
            f"{config.processes.num_processes}; give --profile.steps to the run's own command"
        )
    config = dataclasses.replace(
        config,
        save_every=None,
        log=dataclasses.replace(
            config.log, tensorboard=False, wandb=None, mlflow=None, opentelemetry=None
        ),
        profile=ProfileConfig(steps=arguments.steps, out=str(arguments.out.resolve()), only=True),
    )
    first, last = config.profile.window
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=arguments.out):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write to {arguments.out}: {error.strerror or error}; choose another --out"
        ) from error
    with tempfile.TemporaryDirectory(prefix="fornax-profile-") as run_dir:
        result = train(config, run_dir)
    if result.step < last:
        why = "the data ended" if result.reason == "data" else "it was asked to stop"
        if result.step < first:
            raise ConfigError(
                f"nothing is captured: {why} after step {result.step}, before {first}"
            )
        print(f"{why} after step {result.step}: steps {first} to {result.step} are captured")  # noqa: T201
    profile_show.run(profile_show.Arguments(directory=arguments.out))
    return result.exit_code
