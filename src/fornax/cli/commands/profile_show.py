"""`fornax profile show`: where the time and memory of a capture went."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from fornax.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show where the time and memory of captured steps went.

    Reads what fornax profile train, fornax profile serve, fornax.profile.capture or jax.profiler
    wrote, of one rank or many: steps by cause, operations with their FLOPs, bytes and roofline
    bound, memory at the peak by owner, stages of the input, threads. "x bound" is measured time
    over the least that the device allows.

    examples:
      fornax profile show prof/
      fornax profile show prof/ --by module --steps 20..25
      fornax profile show runs/mini --html page.html --json figures.json
    """

    directory: Annotated[Positional[Path], arg(metavar="DIR", help_behavior_hint="")]
    """Of captures or of a run, whose newest is shown; or the folder of one capture."""
    by: Literal["op", "source", "module", "class"] = "op"
    """What operations are grouped by."""
    steps: Annotated[str | None, arg(metavar="A..B", help_behavior_hint="")] = None
    """Steps whose operations count: 20..25, or one (default: all that ran)."""
    rows: int = 20
    """Most rows of the table of operations."""
    html: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write a page with the time line, flame graph, roofline and memory, as one file."""
    json: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write every figure."""


def run(arguments: Arguments) -> int:
    """Read, print, write."""
    from fornax import profile
    from fornax.cli.profile_report import figures, print_profile
    from fornax.config.files import write_whole

    if arguments.rows < 1:
        raise ConfigError(f"--rows {arguments.rows}; use at least 1")
    steps = parse_steps(arguments.steps) if arguments.steps else None
    found = profile.read(arguments.directory)
    print_profile(found, arguments.by, steps, arguments.rows)
    if arguments.html:
        from fornax.profile.page import write_page

        print(write_page(found, arguments.html))  # noqa: T201
    if arguments.json:
        text = json.dumps(figures(found, arguments.by, steps), indent=1) + "\n"
        try:
            write_whole(arguments.json, text)
        except OSError as error:
            raise ConfigError(
                f"cannot write the figures to {arguments.json}: {error.strerror or error}; name a "
                "file in a folder that can be written"
            ) from error
        print(arguments.json)  # noqa: T201
    return 0


def parse_steps(text: str) -> range:
    """The steps of `20..25`, both ends in it, or of `20`.

    Raises:
        ConfigError: it is neither.
    """
    first, dots, last = text.partition("..")
    try:
        steps = range(int(first), int(last if dots else first) + 1)
    except ValueError as error:
        raise ConfigError(
            f"--steps {text}: use two numbers such as 20..25, or one number"
        ) from error
    if not steps or steps.start < 0:
        raise ConfigError(f"--steps {text} holds no step; use a range upwards from 0, as 20..25")
    return steps
