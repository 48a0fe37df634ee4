"""`fornax profile compare`: did a change cost anything, a verdict with an exit code."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from fornax.config import ConfigError

if TYPE_CHECKING:
    from fornax.profile.compare import Comparison


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Compare two captures of a program: what got slower, by how much, from which line.

    Operations are matched by what they do, whatever their fusions are called. An operation's time
    is the least over the steps after warm-up (the first step, and those up to the last
    that compiled). A change that all unchanged operations share is taken for the
    machine's and removed. Intervals are of 95 %, by bootstrap; what is named is
    significant at a false discovery rate of 1 % (Benjamini-Hochberg) and 1 % of a step or more.
    Exit code: 1 if a step is slower than allowed with its whole interval, 2 for a mistake, else 0.

    examples:
      fornax profile compare before/ after/
      fornax profile compare before/ after/ --fail-over 5% --by source --html page.html
    """

    before: Annotated[Positional[Path], arg(metavar="BEFORE", help_behavior_hint="")]
    """A directory of captures, whose newest counts, or one capture's folder."""
    after: Annotated[Positional[Path], arg(metavar="AFTER", help_behavior_hint="")]
    """The same after the change; 30 steps each are good, 6 the least."""
    fail_over: Annotated[str, arg(metavar="SHARE")] = "5%"
    """How much slower a step may be: 5% or 0.05."""
    by: Literal["op", "source", "module", "class"] = "op"
    """What is compared: operations, lines of source, modules of the model, classes."""
    calibrate: bool = True
    """Times as they are, the machine's factor left in: where it is known to be quiet."""
    rows: int = 12
    """Most rows of the table."""
    json: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write every figure."""
    html: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write the page of AFTER, the comparison in it."""


def run(arguments: Arguments) -> int:
    """Read both, compare, print, write."""
    from fornax import profile
    from fornax.cli.profile_comparison import print_comparison
    from fornax.profile.compare import compare, figures
    from fornax.profile.page import write_page

    fail_over = parse_share(arguments.fail_over)
    if arguments.rows < 1:
        raise ConfigError(f"--rows {arguments.rows}; use at least 1")
    before, after = profile.read(arguments.before), profile.read(arguments.after)
    found = compare(
        before,
        after,
        by=arguments.by,
        fail_over=fail_over,
        calibrate=arguments.calibrate,
    )
    print_comparison(found, arguments.rows)
    if arguments.json:
        _write_json(found, arguments.json)
    if arguments.html:
        print(write_page(after, arguments.html, compared=figures(found)))  # noqa: T201
    return int(found.failed)


def _write_json(found: "Comparison", path: Path) -> None:
    from fornax.config.files import write_whole
    from fornax.profile.compare import figures

    try:
        write_whole(path, json.dumps(figures(found), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"cannot write the figures to {path}: {error.strerror or error}; name a file in a "
            "folder that can be written"
        ) from error
    print(path)  # noqa: T201


def parse_share(text: str) -> float:
    """0.05 of `5%` or `0.05`.

    Raises:
      ConfigError: it is neither, below 0, or above 100 %.
    """
    number = text.strip()
    try:
        share = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError as error:
        raise ConfigError(f"--fail-over {text}: use a share such as 5% or 0.05") from error
    if not 0 <= share <= 1:
        raise ConfigError(
            f"--fail-over {text} is {share:.4g} of a step; use 0% to 100%, such as 5% or 0.05"
        )
    return share
