"""Completion scripts of shells, made from the table of commands."""

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import tyro

from fornax.cli import registry
from fornax.cli.registry import Command, Group
from fornax.config import describe, schema

__all__ = ["SHELLS", "Shell", "script"]

Shell = Literal["bash", "zsh", "fish"]


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag without its dashes: what it is for, what it may be (none: a path or anything)."""

    name: str
    help: str
    choices: tuple[str, ...] = ()
    takes_value: bool = True


@dataclasses.dataclass(frozen=True)
class Place:
    """Words that lead somewhere (`tune sft`): the commands and flags that may follow."""

    words: str
    commands: Mapping[str, str]
    """Help of each."""
    flags: Sequence[Flag]
    config: str
    """Name of the config whose keys are flags too, or empty."""


def script(shell: Shell) -> str:
    """The script with which a shell completes commands, their flags, and keys of configs."""
    configs: dict[str, list[Flag]] = {}
    places = list(_places(registry.ROOT, configs))
    return SHELLS[shell](places, configs)


def _places(group: Group, configs: dict[str, list[Flag]]) -> Iterator[Place]:
    named = {name: entry.summary for name, entry in group.commands.items()}
    own, config = _flags(group.command, configs) if group.command else ([], "")
    yield Place(group.name, named, own, config)
    for entry in group.commands.values():
        if isinstance(entry, Group):
            yield from _places(entry, configs)
        else:
            flags, config = _flags(entry, configs)
            yield Place(entry.name, {}, flags, config)


def _flags(command: Command, configs: dict[str, list[Flag]]) -> tuple[list[Flag], str]:
    cls = command.load().Arguments
    hints = typing.get_type_hints(cls, include_extras=True)
    docs = schema.field_docs(cls)
    flags = [
        _flag(name, key.annotation, docs.get(name, ""))
        for name, key in schema.keys_of(cls).items()
        if tyro.conf.Positional not in getattr(hints[name], "__metadata__", ())
    ]
    if command.config is None:
        return flags, ""
    config = command.config()
    name = re.sub(r"\W", "_", f"{config.__module__}.{config.__qualname__}")
    if name not in configs:
        keys = {each.path: each for each in describe(config)}
        configs[name] = [
            Flag(path.replace("_", "-"), _first(each.doc), _of_text(each.type))
            for path, each in keys.items()
            if not re.search(r"\bN\b|\bKEY\b", path)
        ]
    return flags, name


def _flag(name: str, annotation: object, doc: str) -> Flag:
    parts = schema.members(annotation)
    choices = tuple(
        str(each) for part in parts if schema.is_literal(part) for each in typing.get_args(part)
    )
    return Flag(name.replace("_", "-"), _first(doc), choices, takes_value=bool not in parts)


def _of_text(kind: str) -> tuple[str, ...]:
    """The choices of a key by its type's text."""
    words = kind.split(" | ")
    if words[0] == "bool":
        return ("true", "false")
    other = {"int", "float", "str", "path", "null", "bool"}
    plain = [word for word in words if word not in other and re.fullmatch(r"[\w.+-]+", word)]
    return tuple(plain) if len(plain) > 1 or (plain and plain[0].islower()) else ()


def _first(doc: str) -> str:
    """The first sentence, in one line that a shell can hold in single quotes."""
    sentence = re.split(r"(?<=[.;:])\s", inspect.cleandoc(doc), maxsplit=1)[0]
    return re.sub(r"[^\w ,.:;()/+-]", "", sentence)[:70].strip()


def _words(texts: Sequence[str]) -> str:
    return " ".join(texts)


def _bash(places: Sequence[Place], configs: Mapping[str, Sequence[Flag]]) -> str:
    lines = ['# bash completion of fornax: eval "$(fornax completion bash)"', ""]
    lines += ["_fornax_at() {", "  commands= flags= keys= choices=", '  case "$1" in']
    for place in places:
        lines.append(f'    "{place.words}")')
        lines.append(f'      commands="{_words(list(place.commands))}"')
        lines.append(f'      flags="{_words([f"--{flag.name}" for flag in place.flags])}"')
        lines.append(f'      keys="{place.config}" ;;')
    lines += ["  esac", '  case "$keys" in']
    for name, flags in configs.items():
        lines.append(f'    {name}) keys="{_words([f"--{flag.name}" for flag in flags])}" ;;')
    lines += ["  esac", "}", "", "_fornax_choices() {", '  case "$1 $2" in']
    for place in places:
        for flag in place.flags:
            if flag.choices:
                lines.append(
                    f'    "{place.words} --{flag.name}") choices="{_words(flag.choices)}" ;;'
                )
    lines += ["  esac", '  [ -n "$choices" ] || case "$2" in']
    seen: dict[str, tuple[str, ...]] = {}
    for flags in configs.values():
        for flag in flags:
            if flag.choices:
                seen.setdefault(flag.name, flag.choices)
    lines += [f'    --{name}) choices="{_words(found)}" ;;' for name, found in seen.items()]
    lines += ["  esac", "}", "", *_BASH.strip().splitlines(), ""]
    return "\n".join(lines)


_BASH = """
_fornax() {
  local cur prev words cword at= i commands flags keys choices
  COMPREPLY=()
  cword=$COMP_CWORD
  words=("${COMP_WORDS[@]}")
  cur=${words[cword]}
  prev=${words[cword-1]}
  # Words of commands, as far as they lead.
  for ((i = 1; i < cword; i++)); do
    _fornax_at "$at"
    case " $commands " in
      *" ${words[i]} "*) at="${at:+$at }${words[i]}" ;;
      *) break ;;
    esac
  done
  _fornax_at "$at"
  if [ "$cur" = "=" ]; then cur=; elif [ "$prev" = "=" ]; then prev=${words[cword-2]}; fi
  [[ $prev == --* ]] && _fornax_choices "$at" "$prev"
  if [ -n "$choices" ]; then
    COMPREPLY=($(compgen -W "$choices" -- "$cur"))
  elif [[ $cur == --*.* || $cur == --* && -z $flags ]]; then
    COMPREPLY=($(compgen -W "$flags $keys" -- "$cur"))
  elif [[ $cur == -* ]]; then
    # Keys below a key stand as one, until its dot is typed.
    keys=$(printf '%s\\n' $keys | sed 's/[.].*/./' | sort -u)
    COMPREPLY=($(compgen -W "$flags $keys --help" -- "$cur"))
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *. ]] && compopt -o nospace
  elif [ -n "$commands" ] && [ "$i" -eq "$cword" ]; then
    COMPREPLY=($(compgen -W "$commands" -- "$cur"))
  fi
  [ ${#COMPREPLY[@]} -gt 0 ] || compopt -o default
}
complete -F _fornax fornax
"""


def _zsh(places: Sequence[Place], configs: Mapping[str, Sequence[Flag]]) -> str:
    """What completes in bash does in zsh, by zsh's own `bashcompinit`."""
    first = "# zsh completion of fornax: source <(fornax completion zsh), after compinit"
    return "\n".join([first, "autoload -U +X bashcompinit && bashcompinit", _bash(places, configs)])


def _fish(places: Sequence[Place], configs: Mapping[str, Sequence[Flag]]) -> str:
    groups = [place.words for place in places if place.commands]
    lines = ["# fish completion of fornax: fornax completion fish | source", ""]
    lines += ["function __fornax_at", "  set -l words (commandline -opc)[2..-1]", "  set -l at"]
    lines += ["  for word in $words"]
    lines += ['    contains -- "$at" ' + " ".join(f"'{each}'" for each in groups) + "; or break"]
    lines += ['    set -l next (string trim "$at $word")']
    every = " ".join(f"'{place.words}'" for place in places)
    lines += [f"    contains -- $next {every}; or break", "    set at $next", "  end"]
    lines += ['  contains -- "$at" $argv', "end", "", "complete -c fornax -e", ""]
    for place in places:
        at = f"complete -c fornax -n '__fornax_at \"{place.words}\"'"
        for name, said in place.commands.items():
            lines.append(f"{at} -f -a {name} -d '{_first(said)}'")
        lines += [_fish_flag(at, flag) for flag in place.flags]
    for name, flags in configs.items():
        readers = " ".join(f'"{place.words}"' for place in places if place.config == name)
        at = f"complete -c fornax -n '__fornax_at {readers}'"
        lines += [_fish_flag(at, flag) for flag in flags]
    return "\n".join([*lines, ""])


def _fish_flag(at: str, flag: Flag) -> str:
    takes = f" -x -a '{_words(flag.choices)}'" if flag.choices else " -r"
    return f"{at} -l {flag.name}{takes if flag.takes_value else ''} -d '{flag.help}'"


SHELLS: dict[Shell, Callable[[Sequence[Place], Mapping[str, Sequence[Flag]]], str]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
