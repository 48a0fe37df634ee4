"""`fornax convert`: runs, Hugging Face directories and PEFT's adapters, the logits compared."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from fornax.cli.arguments import NO_DEFAULT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Turn a run into a Hugging Face directory, or a Hugging Face directory into a run.

    A run that trained adapters becomes a folder in PEFT's format, or a whole model if merged.
    What was written is loaded back, and the largest difference of any logit on real prompts is
    printed and kept in parity.json. A run made this way is what init_from takes.

    examples:
      fornax convert runs/mine --out models/mine
      fornax convert runs/sft --merge-lora --out hf
      fornax convert models/llama --out runs/llama --dtype bfloat16
    """

    source: Annotated[Positional[Path], arg(metavar="SOURCE")]
    """A run directory with checkpoints, a Hugging Face directory, or a name on the Hub."""
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
    overwrite: Annotated[bool, NO_DEFAULT] = False
    """Replace a destination that exists."""


def run(arguments: Arguments) -> int:
    """Convert, and say how far the logits of both are apart."""
    from fornax.mesh import initialize
    from fornax.train import convert

    initialize()
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
