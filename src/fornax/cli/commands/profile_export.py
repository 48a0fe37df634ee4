"""`fornax profile export`: a capture for XProf and Perfetto."""

import dataclasses
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from fornax.cli.arguments import NO_DEFAULT
from fornax.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Write a capture for XProf, on a CPU too, or for Perfetto.

    XProf shows a capture of a CPU as one of a device: overview, operations, HLO and kernel
    statistics, roofline, input pipeline, memory viewer. Perfetto gets steps, threads, streams,
    counters, and flows from steps to operations, with each operation's module, line and work.

    examples:
      fornax profile export prof/ --xprof xprof/
      xprof --logdir xprof/ --port 8791
      fornax profile export prof/ --perfetto trace.pftrace.gz
    """

    directory: Annotated[Positional[Path], arg(metavar="DIR", help_behavior_hint="")]
    """The newest capture of it is written, or the one whose folder it is."""
    out: Annotated[Positional[Path | None], arg(metavar="OUT", help_behavior_hint="")] = None
    """XProf's log directory (default: DIR/xprof), or a trace's name (DIR/trace.pftrace.gz)."""
    xprof: Annotated[bool, NO_DEFAULT] = False
    """For XProf."""
    perfetto: Annotated[bool, NO_DEFAULT] = False
    """For Perfetto, ui.perfetto.dev: its own protobuf."""


def run(arguments: Arguments) -> int:
    """Read, write, print where it lies and how to open it."""
    from fornax import profile
    from fornax.profile.export import write_perfetto, write_xprof

    if arguments.xprof == arguments.perfetto:
        given = "both --xprof and --perfetto are" if arguments.xprof else "no format is"
        raise ConfigError(f"{given} given; use --xprof OUT or --perfetto OUT")
    if arguments.perfetto:
        out = arguments.out or arguments.directory / "trace.pftrace.gz"
        path = write_perfetto(profile.read(arguments.directory), out)
        print(f"{path}: open it at ui.perfetto.dev, which reads it in the browser")  # noqa: T201
        return 0
    out = arguments.out or arguments.directory / "xprof"
    folder = write_xprof(arguments.directory, out)
    print(f"{folder}: xprof --logdir {out} --port 8791")  # noqa: T201
    return 0
