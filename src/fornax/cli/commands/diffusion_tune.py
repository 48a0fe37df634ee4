"""`fornax diffusion tune`: a trained denoiser on other images, whole or by adapters."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from fornax.cli.commands.diffusion_train import with_images
from fornax.cli.configured import ConfigArguments, read_config
from fornax.cli.costs import ended, prices_of
from fornax.config import ConfigError
from fornax.config.run_paths import default_run_dir


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """Fine-tune a diffusion model on images, or train adapters (LoRA) for it.

    --model is a diffusers folder, or a run directory, whose captions are of words that
    it knows; --data is as of fornax diffusion train. Images and captions are encoded once. Every
    key of the config is a flag too. What it makes is loaded like any run: adapters are merged.

    examples:
      fornax diffusion tune --model sdxl/ --data photos/ --lora.rank 16 --out runs/photos
      fornax diffusion tune --model sdxl/ --data rex/ --data.prompt "a photo of sks dog" \\
        --prior.path dogs/ --prior.prompt "a photo of a dog"
      fornax diffusion tune --help-config lora
    """

    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """The run directory: where everything is written (default: runs/diffusion-tune)."""
    accept_changes: Annotated[tuple[str, ...], arg(metavar="KEY ...", help_behavior_hint="")] = ()
    """Keys, or patterns of them, that may differ from those the checkpoints were made with."""
    price: Annotated[str | None, arg(metavar="PRICE", help_behavior_hint="")] = None
    """What a chip costs an hour, in US$, or a YAML file of prices: the end and the report then say
    what the run cost."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """What is shown; auto is a bar on a terminal and lines elsewhere."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Tune; 0 when the run is done, 128 + signal when it was asked to stop."""
    from fornax.diffusion.config import DiffusionTuneConfig
    from fornax.train import RunDirectory

    out = arguments.out or default_run_dir("diffusion-tune", arguments.config)
    saved = RunDirectory(out).config
    known = saved if saved.is_file() and arguments.config is None else None
    if not (arguments.config or known or overrides or arguments.help_config):
        raise ConfigError(
            f"{out} has no run to resume; begin one with --model DIR --data DIR, or name the "
            "directory of a run with --out DIR"
        )
    words = with_images(overrides)
    config = read_config(DiffusionTuneConfig, arguments, words, file=known)
    if config is None:
        return 0
    from fornax.diffusion.tuning import tune

    result = tune(
        config,
        out,
        accept_changes=arguments.accept_changes,
        progress=arguments.progress,
        prices=prices_of(arguments.price),
    )
    return ended(result)
