"""Which rule treats which parameter: groups, weight decay, and errors for rules that miss."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fornax.config.errors import ConfigError
from fornax.config.suggest import first_few, similar
from fornax.optim.config import Group, OptimConfig, Optimizer
from fornax.optim.user import TaskOptimizer
from fornax.optim.views import View

__all__ = ["Assignment", "assign", "decayed"]


@dataclass(frozen=True)
class Assignment:
    """What happens to one parameter; `optimizer` None leaves it frozen."""

    optimizer: Optimizer | TaskOptimizer | None
    learning_rate_factor: float = 1.0


def assign(config: OptimConfig, paths: Sequence[str]) -> dict[str, Assignment]:
    """The assignment of each parameter.

    Raises:
      ConfigError: for a group that treats nothing, a parameter nothing treats, or a run in which
        everything is frozen.
    """
    groups = {path: _first_match(config.groups, path) for path in paths}
    for position, group in enumerate(config.groups):
        _check_used(position, group, groups)
    assignments = {path: _assignment(config, path, group) for path, group in groups.items()}
    if all(assignment.optimizer is None for assignment in assignments.values()):
        raise ConfigError("groups freeze every parameter; nothing is left to train")
    return assignments


def _first_match(groups: Sequence[Group], path: str) -> int | None:
    return next((i for i, group in enumerate(groups) if _matches(group.pattern, path)), None)


def _matches(pattern: str, path: str) -> bool:
    try:
        return re.search(pattern, path) is not None
    except re.error as error:
        raise ConfigError(f"pattern {pattern!r} is not a regular expression: {error}") from error


def _check_used(position: int, group: Group, groups: Mapping[str, int | None]) -> None:
    if position in groups.values():
        return
    matched = [path for path in groups if _matches(group.pattern, path)]
    if not matched:
        raise _no_match(f"groups[{position}].pattern", group.pattern, groups)
    raise ConfigError(
        f"groups[{position}].pattern {group.pattern!r} matches only parameters that earlier "
        f"groups took ({first_few(matched)}); move it forward or drop it"
    )


def _assignment(config: OptimConfig, path: str, position: int | None) -> Assignment:
    if position is None:
        optimizer = config.optimizer
        if optimizer is None:
            raise ConfigError(
                f"no group covers parameter {path} and optimizer is null; add a group whose "
                "pattern finds it, or name an optimizer"
            )
        return Assignment(optimizer)
    group = config.groups[position]
    if group.freeze:
        return Assignment(None)
    optimizer = group.optimizer or config.optimizer
    if optimizer is None:
        raise ConfigError(
            f"groups[{position}] ({group.pattern!r}) names no optimizer and optimizer is null; "
            "name one of them"
        )
    return Assignment(optimizer, group.learning_rate_factor)


def decayed(config: OptimConfig, views: Mapping[str, View]) -> dict[str, bool]:
    """Whether weight decay acts on each parameter.

    Raises:
      ConfigError: for a pattern that finds no parameter.
    """
    for name, patterns in (("decay", config.decay or ()), ("no_decay", config.no_decay)):
        for pattern in patterns:
            if not any(_matches(pattern, path) for path in views):
                raise _no_match(name, pattern, views)

    def one(path: str, view: View) -> bool:
        if any(_matches(pattern, path) for pattern in config.no_decay):
            return False
        if config.decay is None:
            return view.is_matrix
        return any(_matches(pattern, path) for pattern in config.decay)

    return {path: one(path, view) for path, view in views.items()}


def _no_match(where: str, pattern: str, paths: Iterable[str]) -> ConfigError:
    paths = list(paths)
    near = similar(re.sub(r"[\\^$.*+?()\[\]{}|]+", "", pattern), paths)
    return ConfigError(
        f"{where} {pattern!r} matches no parameter; near it are {first_few(near)}"
        if near
        else f"{where} {pattern!r} matches no parameter; the parameters are {first_few(paths)}"
    )
