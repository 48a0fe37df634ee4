"""`fornax train`: a run from a config, or on from its checkpoints."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from fornax.cli.configured import read_config
from fornax.cli.training import TrainingArguments, run_to_end, saved_config
from fornax.config.run_paths import default_run_dir


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(TrainingArguments):
    """Train a model, or resume a run that was stopped.

    Every key of the config is a flag too. A run directory that has checkpoints is resumed; without
    --config it uses its own.

    examples:
      fornax train --config run.yaml --model.num-layers 4 --run-dir runs/four
      fornax train --run-dir runs/four --steps 2000 --accept-changes steps
      fornax train --config run.yaml --spikes.window 128   # go back from loss spikes
      fornax train --help-config optim
    """

    run_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Where everything is written (default: runs/ and the name of the config file)."""
    accept_changes: Annotated[tuple[str, ...], arg(metavar="KEY ...", help_behavior_hint="")] = ()
    """Keys, or patterns of them, that may differ from those the checkpoints were made with; of a
    new run, those of model.rope that may differ from the model of init_from."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Train; 0 when the run is done, 128 + signal when it was asked to stop."""
    from fornax.train import TrainConfig, train

    run_dir = arguments.run_dir or default_run_dir("train", arguments.config)
    begin = "name a config with --config FILE, or the directory of a run with --run-dir DIR"
    known = saved_config(run_dir, arguments, overrides, begin=begin)
    config = read_config(TrainConfig, arguments, overrides, file=known)
    return 0 if config is None else run_to_end(train, config, run_dir, arguments)
