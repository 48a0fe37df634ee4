"""Where a value stands: its key path, and the file line or flag that it came from."""

import dataclasses
from collections.abc import Mapping

from yaml import YAMLError

from fornax.config.errors import ConfigError
from fornax.config.text import KeyPath, printable, write_flow

COMMAND_LINE = "on the command line"


class Words(tuple[str, ...]):
    """What the command line gave for one key, still without a type."""

    __slots__ = ()

    def __str__(self) -> str:
        return " ".join(self)


@dataclasses.dataclass(frozen=True)
class Place:
    """A key path and the origins of all paths; makes the errors that name them."""

    path: KeyPath
    origins: Mapping[KeyPath, str]
    prefix: str = ""

    def child(self, name: str) -> "Place":
        return dataclasses.replace(self, path=(*self.path, name))

    def name(self, *more: str) -> str:
        """The key path as a user writes it; empty at the root."""
        return printable(".".join(part for part in (self.prefix, *self.path, *more) if part))

    @property
    def origin(self) -> str:
        """The file line or flag of this path, else of the first key in it, else around it."""
        size = len(self.path)
        inside = (where for path, where in self.origins.items() if path[:size] == self.path)
        around = (self.origins.get(self.path[:n], "") for n in range(size, -1, -1))
        exact = self.origins.get(self.path)
        return exact or (size and next(inside, "")) or next(filter(None, around), "")

    @property
    def source(self) -> str:
        """The origin in brackets with a leading blank, or nothing where it is unknown."""
        return f" ({self.origin})" if self.origin else ""

    def error(self, problem: str, value: object = dataclasses.MISSING) -> ConfigError:
        """An error about this place: `path=value (source) problem`."""
        name = self.name() or "the config"
        shown = "" if value is dataclasses.MISSING else f"={shorten(value)}"
        return ConfigError(f"{name}{shown}{self.source} {problem}")


def shorten(value: object, limit: int = 60) -> str:
    """Show a plain value as YAML on one line, cut to a readable length."""
    if isinstance(value, Words):
        text = str(value)
    elif isinstance(value, str) and not value.isprintable():
        text = repr(value)
    else:
        try:
            text = write_flow(value)
        except YAMLError:  # a value that YAML cannot hold is shown as Python sees it
            text = repr(value)
    text = printable(text)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def kind_of(value: object) -> str:
    """Name the kind of a plain value for a reader."""
    for kind, name in (
        (bool, "a truth value"),
        (int, "an integer"),
        (float, "a number with a fraction or exponent"),
        (str, "text"),
        (list | tuple, "a list"),
        (Mapping, "a mapping"),
    ):
        if isinstance(value, kind):
            return name
    return "null" if value is None else f"a {type(value).__name__}"
