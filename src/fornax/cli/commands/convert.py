"""`fornax convert`: runs, Hugging Face directories, GGUF files, adapters, diffusion pipelines."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from fornax.cli.arguments import NO_DEFAULT
from fornax.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Turn a run or a GGUF file into a Hugging Face directory, or such a directory into a run.

    A run that trained adapters becomes a folder in PEFT's format, or a whole model if merged; a
    folder of diffusers is written again, with a diffusion run's network by --pipeline.
    What was written is loaded back, and the largest difference of any logit on real prompts, or of
    a picture, is printed and kept in parity.json. A run made this way is what init_from takes.

    examples:
      fornax convert runs/sft --merge-lora --out hf
      fornax convert model.Q4_K_M.gguf --out hf --dtype bfloat16
      fornax convert models/llama --out runs/llama --dtype bfloat16
      fornax convert runs/flux --pipeline models/flux --out models/mine
    """

    source: Annotated[Positional[Path], arg(metavar="SOURCE")]
    """A run directory, a directory of Hugging Face or diffusers, a name on the Hub, a GGUF file."""
    out: Annotated[Path, arg(metavar="DIR")]
    """The directory to make."""
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        arg(metavar="{float32,bfloat16}", help_behavior_hint=""),
    ] = None
    """Type of the weights at the destination (default: the source's)."""
    step: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Which checkpoint of a run (default: the latest)."""
    tokenizer: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")] = None
    """A tokenizer.json or its folder (default: the source's own)."""
    merge_lora: Annotated[bool, NO_DEFAULT] = False
    """Merge a run's adapters into the model instead of keeping them apart."""
    mtp: Annotated[bool, NO_DEFAULT] = False
    """Take the modules that predict further tokens along."""
    pipeline: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Of a diffusion run: the folder of diffusers whose network it was trained as."""
    overwrite: Annotated[bool, NO_DEFAULT] = False
    """Replace a destination that exists."""


def run(arguments: Arguments) -> int:
    """Convert, and say how far the logits, or a picture, of both are apart."""
    from fornax.diffusion.load import is_diffusion_run, is_pipeline
    from fornax.mesh import initialize
    from fornax.train import convert

    initialize()
    if is_pipeline(arguments.source) or is_diffusion_run(arguments.source):
        return _convert_pipeline(arguments)
    if arguments.pipeline is not None:
        raise ConfigError(
            f"--pipeline is for a run of fornax diffusion train, and {arguments.source} is none; "
            "leave it out"
        )
    parity = convert(
        arguments.source,
        arguments.out,
        dtype=arguments.dtype,
        step=arguments.step,
        tokenizer=arguments.tokenizer,
        merge_lora=arguments.merge_lora,
        mtp=arguments.mtp,
        overwrite=arguments.overwrite,
    )
    print(  # noqa: T201
        f"{parity.destination}: {parity.parameters:,} parameters in {parity.dtype}\n"
        f"largest logit difference {parity.max_abs_difference:.2e} (largest logit "
        f"{parity.max_abs_logit:.1f}) over {parity.tokens:,} tokens of {parity.prompts}; the same "
        f"token comes first at {parity.same_top_token:.1%} of positions"
    )
    if parity.modules_left_out:
        print("modules that predict further tokens were left out; --mtp takes them along")  # noqa: T201
    return 0


def _convert_pipeline(arguments: Arguments) -> int:
    from fornax.diffusion.pipelines import convert_pipeline

    for name in ("tokenizer", "merge_lora", "mtp"):
        if getattr(arguments, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} is for language models, and {arguments.source} draws; "
                "leave it out"
            )
    parity = convert_pipeline(
        arguments.source,
        arguments.out,
        pipeline=arguments.pipeline,
        dtype=arguments.dtype,
        step=arguments.step,
        overwrite=arguments.overwrite,
    )
    height, width = parity.size
    print(  # noqa: T201
        f"{parity.destination}: {parity.pipeline}, {parity.parameters:,} parameters\n"
        f"largest difference of a latent {parity.max_abs_difference:.2e} (largest latent "
        f"{parity.max_abs_latent:.1f}), of a pixel {parity.max_pixel_difference} of 255, after "
        f"{parity.steps} steps of {parity.prompt!r} at {width}x{height}"
    )
    return 0
