"""`fornax kernels list` and `show`: what there is, where it is supported, what was measured."""

import dataclasses
from typing import Annotated

from tyro.conf import Positional, arg

from fornax.cli.arguments import Control
from fornax.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListArguments:
    """List every operation with several implementations, in their order of preference.

    A column for each platform says what the tests do with an implementation there.

    example:
      fornax kernels list
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowArguments:
    """Show one operation: its implementations, and what was measured of them on this machine.

    example:
      fornax kernels show attention
    """

    operation: Annotated[
        Positional[str | None], arg(metavar="OPERATION", help_behavior_hint="")
    ] = None
    """One of fornax kernels list."""


def _list(arguments: ListArguments) -> int:
    from fornax.plan.kernels import list_text

    del arguments
    print(list_text())  # noqa: T201
    return 0


def _show(arguments: ShowArguments) -> int:
    from fornax.plan.kernels import operation_text

    if arguments.operation is None:
        raise ConfigError(
            "fornax kernels show needs an operation; name one of those of fornax kernels list, "
            "such as attention"
        )
    print(operation_text(arguments.operation))  # noqa: T201
    return 0


def command(name: str) -> Control:
    """The command of this name."""
    return {"list": Control(ListArguments, _list), "show": Control(ShowArguments, _show)}[name]
