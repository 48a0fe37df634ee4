"""`fornax diffusion train`: a denoiser from a config, or on from its checkpoints."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from fornax.cli.configured import ConfigArguments, read_config
from fornax.cli.costs import ended, prices_of
from fornax.config import ConfigError
from fornax.config.run_paths import default_run_dir


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """Train a diffusion or flow model on images, or resume a run that was stopped.

    --data is a folder of images with captions (a .txt file for each, or metadata.jsonl), Parquet
    files, or tar files of WebDataset. Every key of the config is a flag too. Grids of samples by
    step are in the run's images/, and on the page of fornax ui.

    examples:
      fornax diffusion train --data images/ --model.num-layers 6 --run-dir runs/mine
      fornax diffusion train --data.type letters --data.colour --model.patch 4
      fornax diffusion train --config run.yaml --optim.learning-rate 1e-4
      fornax diffusion train --help-config data
    """

    run_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Where everything is written (default: runs/ and the name of the config file)."""
    accept_changes: Annotated[tuple[str, ...], arg(metavar="KEY ...", help_behavior_hint="")] = ()
    """Keys, or patterns of them, that may differ from those the checkpoints were made with."""
    price: Annotated[str | None, arg(metavar="PRICE", help_behavior_hint="")] = None
    """What a chip costs an hour, in US$, or a YAML file of prices: the end and the report then say
    what the run cost."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """What is shown; auto is a bar on a terminal and lines elsewhere."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Train; 0 when the run is done, 128 + signal when it was asked to stop."""
    from fornax.diffusion.config import DiffusionConfig
    from fornax.train import RunDirectory

    run_dir = arguments.run_dir or default_run_dir("diffusion", arguments.config)
    saved = RunDirectory(run_dir).config
    known = saved if saved.is_file() else None
    if not (arguments.config or known or overrides or arguments.help_config):
        raise ConfigError(
            f"{run_dir} has no run to resume; name images with --data DIR, a config with "
            "--config FILE, or the directory of a run with --run-dir DIR"
        )
    words = with_images(overrides)
    config = read_config(DiffusionConfig, arguments, words, file=known)
    if config is None:
        return 0
    from fornax.diffusion.run import train

    result = train(
        config,
        run_dir,
        accept_changes=arguments.accept_changes,
        progress=arguments.progress,
        prices=prices_of(arguments.price),
    )
    return ended(result)


def with_images(words: Sequence[str]) -> list[str]:
    """The words with `--data DIR` as the keys that it stands for."""
    found = []
    for word in words:
        flag, equals, value = word.partition("=")
        if flag == "--data":
            found += ["--data.type=images", f"--data.path{equals}{value}"]
        else:
            found.append(word)
    return found
