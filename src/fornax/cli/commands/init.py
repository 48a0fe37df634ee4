"""`fornax init`: a commented config file to start from, with example data."""

import dataclasses
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from fornax.cli.starters import STARTERS, Kind, write
from fornax.config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Write a config file that runs, with a comment on each key, and example data beside it.

    The first comment is the command that reads it. Files that exist are never replaced.

    examples:
      fornax init train
      fornax init sft --out mine/sft.yaml
      fornax init grpo
    """

    kind: Annotated[Positional[Kind], arg(metavar="KIND")]
    """train, sft, dpo, kto, grpo, distill, quantize, serve, host, diffusion or diffusion-tune."""
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """The file (default: KIND.yaml here)."""


def run(arguments: Arguments) -> int:
    """Write the files, and say how to run them."""
    out = arguments.out or Path(f"{arguments.kind}.yaml")
    if out.exists():
        raise ConfigError(f"{out} exists and is kept; name another file with --out")
    text = write(arguments.kind, str(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(out)  # noqa: T201
    for name, content in STARTERS[arguments.kind].files.items():
        # Paths in a config are relative to where a command runs.
        if Path(name).exists():
            print(f"{name} exists and is kept")  # noqa: T201
        else:
            Path(name).write_text(content, encoding="utf-8")
            print(name)  # noqa: T201
    print("\n".join(line[4:] for line in text.splitlines() if line.startswith("#   ")))  # noqa: T201
    return 0
