"""`fornax data inspect`: records, token counts and how full the rows are."""

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from fornax.cli.configured import ConfigArguments, read_config

if TYPE_CHECKING:
    from fornax.data.inspection import Inspection


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """Show what data holds: records, tokens, lengths, how full its rows would be, a few samples.

    The data is a built dataset, or whatever --config and the keys of a data config describe.
    With --debug every record is checked, and the one that fails is named with its transform.

    examples:
      fornax data inspect data/stdlib --split eval
      fornax data inspect data/stdlib --packing.type best_fit --seq-len 512
      fornax data inspect --config data.yaml --debug
    """

    dataset: Annotated[Positional[str], arg(metavar="[DATASET]", help_behavior_hint="")] = ""
    """Folder that fornax data build made; sets source.path."""
    split: str = "train"
    """The split to read."""
    seq_len: int = 1024
    """Tokens of a row."""
    samples: int = 3
    """Records to show."""


def of_dataset(dataset: str, overrides: Sequence[str]) -> list[str]:
    """The overrides, with a dataset named on the command line as the source."""
    source = f"--source={{type: dataset, path: {json.dumps(dataset)}}}"
    return [*overrides, source] if dataset else list(overrides)


def run(arguments: Arguments, overrides: Sequence[str]) -> int:
    """Read the split once and print what it holds."""
    from fornax.data import DataConfig

    config = read_config(DataConfig, arguments, of_dataset(arguments.dataset, overrides))
    if config is None:
        return 0
    from fornax.data import inspect

    found = inspect(
        config, split=arguments.split, seq_len=arguments.seq_len, samples=arguments.samples
    )
    print("\n".join(_lines(found, arguments.seq_len)))  # noqa: T201
    return 0


def _lines(found: "Inspection", seq_len: int) -> list[str]:
    per_document = f"{found.shortest:,} to {found.longest:,}, median {found.median:,.0f}"
    most = max((bin_.records for bin_ in found.histogram), default=1) or 1
    return [
        f"split      {found.split}",
        f"records    {found.records:,} ({found.documents:,} documents after the transforms)",
        f"tokens     {found.tokens:,} ({per_document} per document)",
        f"rows       {found.rows:,} of {seq_len:,} tokens, {found.fill_rate:.1%} full",
        f"packing    {found.cut_documents:,} documents cut over rows, "
        f"{found.dropped_tokens:,} tokens left out",
        "",
        "documents by length in tokens",
        *(
            f"  {bin_.low:>9,} to {bin_.high:>9,}  {bin_.records:>9,}  "
            f"{'#' * round(40 * bin_.records / most)}"
            for bin_ in found.histogram
        ),
        *(f"\nsample {number}\n  {text!r}" for number, text in enumerate(found.samples, 1)),
    ]
