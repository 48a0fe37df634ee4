"""`fornax host convert-config`: a model's settings in Triton's file as settings here."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from fornax.config import ConfigError
from fornax.config.text import write_yaml
from fornax.serving.triton_config import convert_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Convert Triton's config.pbtxt of a model to the serving.yaml of a bundle.

    Batching, queues, priorities, versions and instances have counterparts. What has none is
    listed, with the reason, on the standard error and in the file's first comment. Names, types
    and shapes of tensors are in the bundle, which `fornax export` or `export.save` makes.

    examples:
      fornax host convert-config triton/ranker/config.pbtxt
      fornax host convert-config triton/ranker/config.pbtxt --out models/ranker/serving.yaml
    """

    source: Annotated[Positional[Path], arg(metavar="FILE")]
    """The config.pbtxt."""
    out: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Write there instead of printing; a file that exists is not replaced."""


def run(arguments: Arguments) -> int:
    """Convert, and say what was left."""
    if arguments.out is not None and arguments.out.exists():
        raise ConfigError(f"--out {arguments.out} exists; remove it, or name another file")
    try:
        text = arguments.source.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{arguments.source} is not UTF-8 text; is it a config.pbtxt?") from error
    done = convert_config(text, str(arguments.source))
    comments = "".join(f"# {note}\n" for note in done.notes)
    settings = write_yaml(done.mapping) if done.mapping else "# The defaults hold.\n"
    if arguments.out is None:
        print(settings, end="")  # noqa: T201
    else:
        arguments.out.write_text(comments + settings, encoding="utf-8")
    for note in done.notes:
        print(f"note: {note}", file=sys.stderr)  # noqa: T201
    return 0
