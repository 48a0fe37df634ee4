"""What commands that read a config share: the file, the keys as flags, the list of all keys."""

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from tyro.conf import arg

from fornax.cli.arguments import NO_DEFAULT
from fornax.config import ConfigError, Field, describe, did_you_mean, dump_yaml, load

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigArguments:
    """The flags with which a command reads its config."""

    config: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """YAML file with the keys that differ from their defaults."""
    print_config: Annotated[bool, NO_DEFAULT] = False
    """Print the whole resolved config and stop."""
    help_config: Annotated[bool | str, arg(metavar="[KEY]", help_behavior_hint="")] = False
    """List every key (or those below KEY) with type, default and meaning, and stop."""


def read_config(
    cls: type[T], arguments: ConfigArguments, overrides: Sequence[str], file: Path | None = None
) -> T | None:
    """Read the config, or print what was asked for and return None.

    `file` is read where the arguments name none.
    """
    if arguments.help_config is not False:
        print_keys(cls, "" if arguments.help_config is True else arguments.help_config)
        return None
    config = load(cls, file=arguments.config or file, overrides=overrides)
    if arguments.print_config:
        print(dump_yaml(config), end="")  # noqa: T201
        return None
    return config


def is_diffusion_config(config: Path | None) -> bool:
    """Whether a file is the config of `fornax diffusion train`, by its kind of model or of data.

    Raises:
      ConfigError: it is one of `fornax diffusion tune`.
    """
    import yaml

    if config is None or not config.is_file():
        return False
    try:
        found = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False  # reading it says what is wrong
    if not isinstance(found, dict):
        return False
    model, data = found.get("model"), found.get("data")
    images = isinstance(data, dict) and data.get("type") in ("images", "letters", "encoded")
    if images and isinstance(model, str):
        raise ConfigError(
            f"{config} is a config of fornax diffusion tune, and this command reads those of "
            "fornax diffusion train; write the model that is tuned as model: {type: transformer, "
            "config: ...}, or a dit of its sizes"
        )
    return images or (isinstance(model, dict) and "type" in model)


def print_keys(cls: type, prefix: str = "") -> None:
    """Print every key of a config, or those below a prefix."""
    fields = describe(cls)
    wanted = prefix.replace("-", "_")
    shown = [field for field in fields if _below(field.path, wanted)]
    if not shown:
        tops = {".".join(f.path.split(".")[:n]): None for f in fields for n in (1, 2, 3)}
        parts = ", ".join(dict.fromkeys(field.path.split(".")[0] for field in fields))
        hint = did_you_mean(prefix, tops, f"it has {parts}")
        raise ConfigError(f"{prefix} is not a key of {cls.__name__}; {hint}")
    for field in shown:
        print("\n".join(_lines(field)))  # noqa: T201


def _below(path: str, prefix: str) -> bool:
    return not prefix or path == prefix or path.startswith(f"{prefix}.")


def _lines(field: Field) -> Iterator[str]:
    variant = f"  (of {field.variant})" if field.variant else ""
    head = f"--{field.path}  {field.type}{variant}"
    default = "required" if field.default == "required" else f"default {field.default}"
    yield f"{head}  [{default}]"
    yield from textwrap.wrap(field.doc, 94, initial_indent="      ", subsequent_indent="      ")
