"""`fornax data build`: raw text to a tokenizer and shards of tokens."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

from fornax.cli.arguments import NO_DEFAULT
from fornax.cli.configured import ConfigArguments, read_config
from fornax.cli.stages import Stages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """Turn raw text into a dataset: a tokenizer, and shards of tokens in train and eval splits.

    Every key of the config is a flag too (--help-config lists them). Without a source the text is
    that of the Python standard library on this machine. A dataset that is already there is kept.

    examples:
      fornax data build --output data/stdlib
      fornax data build --source.type jsonl --source.path a.jsonl b.jsonl --output data/mine
    """

    overwrite: Annotated[bool, NO_DEFAULT] = False
    """Replace another dataset in the output folder."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Build the dataset and say what it holds."""
    from fornax.data import BuildConfig

    config = read_config(BuildConfig, arguments, overrides)
    if config is None:
        return 0
    from fornax.data import build

    with Stages("records") as progress:
        result = build(config, overwrite=arguments.overwrite, progress=progress)
    print(f"{result.path}: {'already built' if result.reused else 'built'}")  # noqa: T201
    for name, split in result.manifest.splits.items():
        print(  # noqa: T201
            f"  {name}: {split.records:,} records, {split.tokens:,} tokens, "
            f"{split.text_bytes:,} bytes of text, {len(split.shards)} shards"
        )
    return 0
