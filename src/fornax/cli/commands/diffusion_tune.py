"""`fornax diffusion tune`: a trained denoiser on other images, whole or by adapters."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from fornax.cli.commands.diffusion_train import with_images
from fornax.cli.configured import read_config
from fornax.cli.training import TrainingArguments, run_to_end, saved_config
from fornax.config.run_paths import default_run_dir


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(TrainingArguments):
    """Fine-tune a diffusion model on images, or train adapters (LoRA) for it.

    --model is a diffusers folder, or a run directory, whose captions are of words that
    it knows; --data is as of fornax diffusion train. Images, or videos with --data.frames, and
    captions are encoded once. Every key of the config is a flag too. What it makes is loaded like
    any run: adapters are merged.

    examples:
      fornax diffusion tune --model sdxl/ --data photos/ --lora.rank 16 --out runs/photos
      fornax diffusion tune --model sdxl/ --data rex/ --data.prompt "a photo of sks dog" \\
        --prior.path dogs/ --prior.prompt "a photo of a dog"
      fornax diffusion tune --model wan/ --data clips/ --data.frames 17 33 --lora.rank 16
      fornax diffusion tune --help-config lora
    """

    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """The run directory: where everything is written (default: runs/diffusion-tune)."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Tune; 0 when the run is done, 128 + signal when it was asked to stop."""
    from fornax.diffusion.config import DiffusionTuneConfig

    out = arguments.out or default_run_dir("diffusion-tune", arguments.config)
    begin = "begin one with --model DIR --data DIR, or name the directory of a run with --out DIR"
    known = saved_config(out, arguments, overrides, begin=begin)
    config = read_config(DiffusionTuneConfig, arguments, with_images(overrides), file=known)
    if config is None:
        return 0
    from fornax.diffusion.tuning import tune

    return run_to_end(tune, config, out, arguments)
