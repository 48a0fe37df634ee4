"""A config from its defaults, a YAML file and the command line, in that order of precedence."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fornax.config.build import build
from fornax.config.errors import ConfigError
from fornax.config.overrides import Flags, Patch, overlay, parse_flags, patch_from_mapping
from fornax.config.place import Place, kind_of
from fornax.config.text import KeyPath, origins, read_yaml

T = TypeVar("T")


def from_mapping(cls: type[T], mapping: Mapping[str, Any], path: str = "") -> T:
    """Build a config dataclass from plain values; keys left out keep their defaults.

    `path` is put before every key path in errors. Raises ConfigError for an unknown or missing key,
    a wrong type or value, or a combination the dataclass refuses.
    """
    place = Place((), {}, path)
    if not isinstance(mapping, Mapping):
        raise place.error(f"is not a mapping; {cls.__name__} is read from keys", mapping)
    return build(cls, mapping, place)


def from_yaml(cls: type[T], text: str, *, source: str = "the YAML text") -> T:
    """Build a config dataclass from YAML text, such as the config saved in a checkpoint."""
    return _load(cls, text, source, Flags(patch=Patch(), origins={}, positional=()))


def load(
    cls: type[T],
    *,
    file: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
) -> T:
    """Build a config dataclass: its defaults, then a YAML file, then overrides.

    Args:
        cls: The config dataclass.
        file: A sparse YAML file; an empty one changes nothing.
        overrides: Words of a command line (`["--model.num-layers", "4"]`), or a mapping of dotted
            keys to plain values (`{"model.num_layers": 4}`).

    Raises ConfigError naming the key path, what is allowed, the nearest match, and the line of the
    file or the flag.
    """
    if isinstance(overrides, Mapping):
        flags = patch_from_mapping(cls, overrides)
    else:
        flags = parse_flags(cls, overrides)
    if flags.positional:
        word = flags.positional[0]
        raise ConfigError(
            f"{word!r} is a loose word on the command line; a key is changed with --key=value"
        )
    if file is None:
        return _load(cls, "", "", flags)
    return _load(cls, _read(Path(file)), str(file), flags)


def build_flags(cls: type[T], flags: Flags) -> T:
    """Build a config dataclass from flags that are already parsed."""
    return _load(cls, "", "", flags)


def _load(cls: type[T], text: str, source: str, flags: Flags) -> T:
    value, lines = read_yaml(text, source)
    known: dict[KeyPath, str] = {
        **({(): source} if source else {}),
        **origins(lines, source),
        **flags.origins,
    }
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{source} holds {kind_of(value)}, not a mapping; write key: value lines for "
            f"{cls.__name__}"
        )
    place = Place((), known)
    return build(cls, overlay(value, flags.patch, place), place)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"the config file {file} cannot be read: {reason}; check the path"
        ) from error
