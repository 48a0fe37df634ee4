"""The words after a command, read into its `Arguments`; and its help, laid out by tyro."""

import dataclasses
import inspect
import shutil
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import tyro

from fornax.config import ConfigError, from_arguments, nearest, split_arguments

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Control:
    """One of several commands of a module, as the registry loads it."""

    Arguments: type
    run: Callable[..., int]
    """Takes the arguments, and the flags that change a config where the command reads one."""


NO_DEFAULT = tyro.conf.arg(help_behavior_hint="")
"""Marks an argument whose help says by itself what happens without it."""


def parse(cls: type[T], words: Sequence[str], program: str) -> T:
    """Read the words of a command into its arguments; ConfigError for whatever does not fit."""
    return from_arguments(cls, words, positional=_positional(cls), program=program)


def _positional(cls: type) -> tuple[str, ...]:
    """The arguments written without a flag (`tyro.conf.Positional`), in order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(
        name
        for name in _names(cls)
        if tyro.conf.Positional in getattr(hints[name], "__metadata__", ())
    )


def _names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def split(cls: type, config: type, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the words into those of the command itself and those that change its config.

    Raises ConfigError for a flag of neither that looks like one of the command's own.
    """
    own, rest = split_arguments(cls, config, words)
    names = [name.replace("_", "-") for name in _names(cls)]
    for word in rest:
        flag = word[2:].partition("=")[0] if word.startswith("--") else ""
        top = flag.partition(".")[0].removeprefix("no-").replace("-", "_")
        guess = nearest(flag, names)
        if guess and top not in _names(config):
            raise ConfigError(f"{word} is neither a flag nor a key; did you mean --{guess}?")
    return own, rest


def print_help(cls: type, program: str) -> None:
    """Print the help of a command: the docstring of its arguments, then each argument."""
    width = min(shutil.get_terminal_size().columns, 100)
    print("\n".join(_wrap(inspect.cleandoc(cls.__doc__ or ""), width)), end="\n\n")  # noqa: T201
    try:
        tyro.cli(
            cls,
            prog=program,
            description="",
            args=["--help"],
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
        )
    except SystemExit as leaving:
        if leaving.code:
            raise


def _wrap(text: str, width: int) -> Iterator[str]:
    """Fill paragraphs; indented lines, such as examples, stay as they are."""
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            yield ""
        lines = paragraph.splitlines()
        if any(line.startswith(" ") for line in lines):
            yield from lines
        else:
            yield from textwrap.wrap(" ".join(lines), width, break_on_hyphens=False)
