"""`fornax data visualize`: a picture of the pipeline with the measured time of each stage."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from fornax.cli.commands.data_inspect import of_dataset
from fornax.cli.configured import ConfigArguments, read_config

if TYPE_CHECKING:
    from fornax.data.visualize import Profile

__all__ = ["Arguments", "run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """Run a pipeline for some batches and draw it: each stage with its time, what went in and out.

    The data is a built dataset, or whatever --config and the keys of a data config describe.

    examples:
      fornax data visualize data/stdlib
      fornax data visualize --config data.yaml --output pipeline.html --batches 500
    """

    dataset: Annotated[Positional[str], arg(metavar="[DATASET]", help_behavior_hint="")] = ""
    """Folder that fornax data build made; sets source.path."""
    output: Path = Path("pipeline.svg")
    """The picture to write: .svg or .html."""
    split: str = "train"
    """The split to read."""
    batch_size: int = 8
    """Rows of a batch."""
    seq_len: int = 1024
    """Tokens of a row."""
    batches: int = 100
    """Batches to make."""


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Draw the pipeline and say where the time went."""
    from fornax.data import DataConfig

    config = read_config(DataConfig, arguments, of_dataset(arguments.dataset, overrides))
    if config is None:
        return 0
    from fornax.data import visualize

    found = visualize(
        config,
        arguments.output,
        split=arguments.split,
        batch_size=arguments.batch_size,
        seq_len=arguments.seq_len,
        batches=arguments.batches,
    )
    print("\n".join(_lines(found)))  # noqa: T201
    print(f"picture: {arguments.output}")  # noqa: T201
    return 0


def _lines(found: "Profile") -> Iterator[str]:
    yield (
        f"{found.batches:,} batches in {found.seconds:.2f} s, {found.tokens_per_second:,.0f} "
        f"tokens/s, rows {found.tokens / found.places:.1%} full"
    )
    parts = [*found.parts, ("", found.shared)]
    for part, stages in parts:
        for stage in stages:
            name = f"{part}: {stage.name}" if part and len(parts) > 2 else stage.name
            yield f"  {name:<28} {stage.seconds * 1e3:>10,.1f} ms"
