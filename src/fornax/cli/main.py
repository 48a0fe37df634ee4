"""The entry point `fornax`: finds the command, calls it, turns what it raises into an exit code."""

import sys
from collections.abc import Sequence
from pathlib import Path

from fornax import __version__
from fornax.cli import registry
from fornax.cli.failures import report
from fornax.cli.registry import Command, Group
from fornax.config import ConfigError, did_you_mean

_HELP = ("-h", "--help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0, 1 for a bug, 2 for a mistake of the user."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv is None and _trains(registry.ROOT, words):
            from fornax.config.allocation import restart_with_training_memory

            restart_with_training_memory()
        code = _dispatch(registry.ROOT, words)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        return report(error, _run_dir(words))
    return code


def _trains(group: Group, words: list[str]) -> bool:
    """Whether the words are for a command that trains in this process."""
    found = group.commands.get(words[0]) if words else None
    if isinstance(found, Group):
        return _trains(found, words[1:])
    return found is not None and found.trains


def _dispatch(group: Group, words: list[str]) -> int:
    program = f"fornax {group.name}".strip()
    if group.command and _own(group, words):
        return _call(group.command, words)
    if not words or words[0] in _HELP:
        print(_list(group, program))  # noqa: T201
        return 0
    if words[0] == "--version" and group is registry.ROOT:
        print(f"fornax {__version__}")  # noqa: T201
        return 0
    name, *rest = words
    if name not in group.commands:
        hint = did_you_mean(name, group.commands, f"it has {', '.join(group.commands)}")
        raise ConfigError(f"{name} is not a command of {program}; {hint}")
    found = group.commands[name]
    return _dispatch(found, rest) if isinstance(found, Group) else _call(found, rest)


def _own(group: Group, words: list[str]) -> bool:
    """Whether the words are for the group's own command."""
    if not words or words[0].startswith("-"):
        return True
    return group.takes_words and words[0] not in group.commands


def _call(command: Command, words: list[str]) -> int:
    from fornax.cli import arguments

    module = command.load()
    program = f"fornax {command.name}"
    wrapped: list[str] = []
    if command.wraps and "--" in words:
        dashes = words.index("--")
        words, wrapped = words[:dashes], words[dashes + 1 :]
    if any(word in _HELP for word in words):
        arguments.print_help(module.Arguments, program)
        return 0
    if command.wraps:
        return module.run(arguments.parse(module.Arguments, words, program), wrapped)
    if command.config is None:
        return module.run(arguments.parse(module.Arguments, words, program))
    own, overrides = arguments.split(module.Arguments, command.config(), words)
    return module.run(arguments.parse(module.Arguments, own, program), overrides)


def _list(group: Group, program: str) -> str:
    width = max(map(len, group.commands))
    lines = [f"  {name:<{width}}  {entry.summary}" for name, entry in group.commands.items()]
    return "\n".join(
        [
            f"usage: {program} COMMAND [OPTIONS]",
            "",
            group.summary,
            "",
            *lines,
            "",
            f"{program} COMMAND --help says what a command takes. For example:",
            f"  {group.example}",
        ]
    )


def _run_dir(words: Sequence[str]) -> Path | None:
    """The run directory named on the command line: there the traceback of a bug is written."""
    wanted = "--out" if words[:1] == ["tune"] else "--run-dir"
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, inline, value = word.partition("=")
        if flag.replace("_", "-") == wanted:
            return Path(value if inline else following)
    return None
