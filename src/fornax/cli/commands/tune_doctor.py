"""`fornax tune doctor METHOD`: is a run sound? The checks that run before its first step, alone."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from fornax.cli.commands.tune import renamed
from fornax.cli.configured import ConfigArguments, read_config
from fornax.tune.methods import METHODS, Method

_HELP = """Check a run of `fornax tune {name}` without starting it: {summary}.

The flags are those of `fornax tune {name}`. The data is read and checked whole; then a small run
over its first records is looked at, and nothing is kept. A line says what each check found and how
long it took. Problems are listed at the end with their cause and fix; the exit code is then 2,
else 0.

example:
  fornax tune doctor {example}
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(ConfigArguments):
    """The flags in addition to the keys of the config."""

    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """The run directory of the same command without `doctor`; a config kept there is read."""


@dataclasses.dataclass(frozen=True)
class TuneDoctor:
    """The command for one method."""

    method: Method
    Arguments: type[Arguments]

    def run(self, arguments: Arguments, overrides: Sequence[str]) -> int:
        """Examine; 0 when all is well, 2 when a check failed."""
        from fornax.train import RunDirectory

        saved = None if arguments.out is None else RunDirectory(arguments.out).config
        file = saved if saved is not None and saved.is_file() and not arguments.config else None
        words = renamed(overrides, self.method.aliases)
        config = read_config(self.method.config_class(), arguments, words, file=file)
        if config is None:
            return 0
        from fornax.tune.doctor import check_config, paragraphs, table

        results = check_config(config)
        print(table(results))  # noqa: T201
        wrong = paragraphs(results)
        print(f"\n{wrong}" if wrong else "\nNothing is wrong.")  # noqa: T201
        return 2 if wrong else 0


def command(name: str) -> TuneDoctor:
    """The command for the method called `name`."""
    method = METHODS[name]
    example = method.example.rpartition(" --out")[0]
    text = _HELP.format(name=name, summary=method.within, example=example)
    return TuneDoctor(method, type("Arguments", (Arguments,), {"__doc__": text}))
