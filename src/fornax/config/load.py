"""A config from its defaults, a YAML file and the command line, in that order of precedence."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from fornax.config.build import build
from fornax.config.errors import ConfigError
from fornax.config.overrides import (
    Flags,
    Patch,
    overlay,
    parse_flags,
    patch_from_mapping,
)
from fornax.config.place import COMMAND_LINE, Place, Words, kind_of, shorten
from fornax.config.schema import is_tuple, keys_of, members
from fornax.config.suggest import nearest
from fornax.config.text import KeyPath, origins, read_yaml

T = TypeVar("T")


def from_mapping(cls: type[T], mapping: Mapping[str, object], path: str = "") -> T:
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
    overrides: Sequence[str] | Mapping[str, object] = (),
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


def from_arguments(
    cls: type[T], words: Sequence[str], *, positional: Sequence[str] = (), program: str
) -> T:
    """Build the arguments of a program from the words after its name.

    Args:
        cls: A config dataclass whose keys are the flags.
        words: The command line without the program.
        positional: The keys that loose words fill, in order; a tuple takes all that are left.
        program: The name of the program, for errors.

    Raises ConfigError for an unknown flag, a wrong or missing value, a word too many.
    """
    flags = parse_flags(cls, words)
    _refuse_unknown(cls, flags, program)
    loose = list(flags.positional)
    patch, known = Patch(flags.patch), dict(flags.origins)
    for name in positional:
        if not loose:
            break
        if name in patch:
            raise ConfigError(
                f"{name.upper()} is given twice, as {shorten(patch[name])} and {shorten(loose[0])}"
            )
        many = any(is_tuple(part) for part in members(keys_of(cls)[name].annotation))
        taken, loose = (loose, []) if many else (loose[:1], loose[1:])
        patch[name] = Words(taken)
        known[(name,)] = COMMAND_LINE
    if loose:
        takes = " ".join(name.upper() for name in positional) or "flags only"
        raise ConfigError(
            f"{loose[0]!r} is a word too many for {program}, which takes {takes}; a flag and its "
            "value are written --flag=VALUE"
        )
    _require(cls, patch, positional, program)
    return _load(cls, "", "", Flags(patch=patch, origins=known, positional=()))


def _refuse_unknown(cls: type, flags: Flags, program: str) -> None:
    allowed = [name.replace("_", "-") for name in keys_of(cls)]
    for path, origin in flags.origins.items():
        if path[0] not in keys_of(cls):
            guess = nearest(path[0].replace("_", "-"), allowed)
            hint = f"did you mean --{guess}? It" if guess else "it"
            raise ConfigError(
                f"{origin.split()[0]} is not a flag of {program}; {hint} takes "
                f"{', '.join(f'--{name}' for name in allowed)}"
            )


def _require(cls: type, patch: Patch, positional: Sequence[str], program: str) -> None:
    missing = [
        name.upper() if name in positional else f"--{name.replace('_', '-')}"
        for name, key in keys_of(cls).items()
        if key.required and name not in patch
    ]
    if missing:
        raise ConfigError(f"{program} needs {' and '.join(missing)}; see {program} --help")


def _load(cls: type[T], text: str, source: str, flags: Flags) -> T:
    value, lines = read_yaml(text, source)
    known: dict[KeyPath, str] = {(): source} if source else {}
    for path, origin in origins(lines, source).items():
        if not any(path[:length] in flags.origins for length in range(1, len(path) + 1)):
            known[path] = origin
    known |= flags.origins
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
