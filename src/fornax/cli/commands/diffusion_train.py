"""`fornax diffusion train`: a denoiser from a config, or on from its checkpoints."""

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
    """Train a diffusion or flow model on images or videos, or resume a run that was stopped.

    --data is a folder of images with captions (a .txt file for each, or metadata.jsonl), Parquet
    files, or tar files of WebDataset; with --data.frames of videos. Every key of the config is a
    flag too. Grids of samples by step are in the run's images/, and on the page of fornax ui.

    examples:
      fornax diffusion train --data images/ --model.num-layers 6 --run-dir runs/mine
      fornax diffusion train --data clips/ --data.frames 9 17 --data.rate 8
      fornax diffusion train --data.type letters --data.colour --model.patch 4
      fornax diffusion train --config run.yaml --optim.learning-rate 1e-4
      fornax diffusion train --help-config data
    """

    run_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Where everything is written (default: runs/ and the name of the config file)."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Train; 0 when the run is done, 128 + signal when it was asked to stop."""
    from fornax.diffusion.config import DiffusionConfig

    run_dir = arguments.run_dir or default_run_dir("diffusion", arguments.config)
    begin = (
        "name images with --data DIR, a config with --config FILE, or the directory of a run with "
        "--run-dir DIR"
    )
    known = saved_config(run_dir, arguments, overrides, begin=begin)
    config = read_config(DiffusionConfig, arguments, with_images(overrides), file=known)
    if config is None:
        return 0
    from fornax.diffusion.run import train

    return run_to_end(train, config, run_dir, arguments)


def with_images(words: Sequence[str]) -> list[str]:
    """The words with `--data DIR` as the keys that it stands for: images, or the `--data.type` that
    is given."""
    kind = [] if any(w.partition("=")[0] == "--data.type" for w in words) else ["images"]
    found = []
    for word in words:
        flag, equals, value = word.partition("=")
        if flag == "--data":
            found += [*(f"--data.type={name}" for name in kind), f"--data.path{equals}{value}"]
        else:
            found.append(word)
    return found
