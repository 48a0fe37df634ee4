"""`fornax schema`: the config of a command as a JSON Schema, for editors."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from fornax.cli.registry import commands, reads
from fornax.config import ConfigError, did_you_mean, json_schema


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Print the JSON Schema of the config that a command reads, or list such commands.

    An editor with a YAML language server completes and checks a file whose first line is
    "# yaml-language-server: $schema=PATH"; recipes have such a line.

    examples:
      fornax schema
      fornax schema train --out train.schema.json
      fornax schema serving.yaml
    """

    command: Annotated[Positional[tuple[str, ...]], arg(metavar="COMMAND")] = ()
    """Words of a command that reads a config, or serving.yaml: a hosted model's settings."""
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write there instead of printing."""


def configs() -> dict[str, tuple[str, Callable[[], type]]]:
    """Commands that read a config, and `serving.yaml`: what each is for, and what imports it."""
    found = {
        command.name: (command.summary, command.config)
        for command in commands()
        if command.config is not None
    }
    settings = reads("fornax.serving.settings:ModelSettings")
    return {**found, "serving.yaml": ("How `fornax host` serves one model", settings)}


def run(arguments: Arguments) -> int:
    """Print, write, or list."""
    known = configs()
    if not arguments.command:
        if arguments.out is not None:
            raise ConfigError("--out needs a command before it, such as fornax schema train")
        width = max(map(len, known))
        print("\n".join(f"{name:<{width}}  {summary}" for name, (summary, _) in known.items()))  # noqa: T201
        return 0
    name = " ".join(arguments.command)
    if name not in known:
        readers = f"these do: {', '.join(known)}"
        raise ConfigError(f"{name} reads no config; {did_you_mean(name, known, readers)}")
    text = json.dumps(json_schema(known[name][1]()), indent=1) + "\n"
    if arguments.out is None:
        print(text, end="")  # noqa: T201
    else:
        arguments.out.write_text(text, encoding="utf-8")
    return 0
