"""`fornax completion`: the script with which a shell completes commands and flags."""

import dataclasses
from typing import Annotated

from tyro.conf import Positional, arg

from fornax.cli.completion import Shell, script


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Print a completion script: commands, flags, every key of a command's config, choices.

    The script does not run Fornax when a key is pressed; make it again after an upgrade.

    examples:
      eval "$(fornax completion bash)"                             # in ~/.bashrc
      source <(fornax completion zsh)                              # in ~/.zshrc, after compinit
      fornax completion fish > ~/.config/fish/completions/fornax.fish
    """

    shell: Annotated[Positional[Shell], arg(metavar="{bash,zsh,fish}")]
    """Which shell."""


def run(arguments: Arguments) -> int:
    """Print it."""
    print(script(arguments.shell), end="")  # noqa: T201
    return 0
