"""Which rule treats which parameter: groups, weight decay, and errors for rules that miss."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fornax.config.errors import ConfigError
from fornax.optim.config import Group, OptimConfig, Optimizer
from fornax.optim.user import TaskOptimizer
from fornax.optim.views import View

__all__ = ["Treatment", "assign", "decayed"]

_SHOWN = 5


@dataclass(frozen=True)
class Treatment:
    """What happens to one parameter; `optimizer` None leaves it frozen."""

    optimizer: Optimizer | TaskOptimizer | None
    learning_rate_factor: float = 1.0


def assign(config: OptimConfig, paths: Sequence[str]) -> dict[str, Treatment]:
    """The treatment of each parameter.

    Raises:
      ConfigError: for a group that treats nothing, a parameter nothing treats, or a run in which
        everything is frozen.
    """
    groups = {path: _first_match(config.groups, path) for path in paths}
    for position, group in enumerate(config.groups):
        _check_used(position, group, groups)
    treatments = {path: _treatment(config, path, group) for path, group in groups.items()}
    if all(treatment.optimizer is None for treatment in treatments.values()):
        raise ConfigError("groups freeze every parameter; nothing is left to train")
    return treatments


def _first_match(groups: Sequence[Group], path: str) -> int | None:
    return next((i for i, group in enumerate(groups) if _matches(group.pattern, path)), None)


def _matches(pattern: str, path: str) -> bool:
    try:
        return re.search(pattern, path) is not None
    except re.error as error:
        raise ConfigError(f"pattern {pattern!r} is no regular expression: {error}") from error


def _check_used(position: int, group: Group, groups: Mapping[str, int | None]) -> None:
    if position in groups.values():
        return
    matched = [path for path in groups if _matches(group.pattern, path)]
    if not matched:
        raise _no_match(f"groups[{position}].pattern", group.pattern, groups)
    raise ConfigError(
        f"groups[{position}].pattern {group.pattern!r} matches only parameters that earlier "
        f"groups took ({_some(matched)}); move it forward or drop it"
    )


def _treatment(config: OptimConfig, path: str, position: int | None) -> Treatment:
    if position is None:
        optimizer = config.optimizer
        if optimizer is None:
            raise ConfigError(
                f"no group covers parameter {path} and optimizer is null; add a group whose "
                "pattern finds it, or name an optimizer"
            )
        return Treatment(optimizer)
    group = config.groups[position]
    if group.freeze:
        return Treatment(None)
    optimizer = group.optimizer or config.optimizer
    if optimizer is None:
        raise ConfigError(
            f"groups[{position}] ({group.pattern!r}) names no optimizer and optimizer is null; "
            "name one of them"
        )
    return Treatment(optimizer, group.learning_rate_factor)


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
    near = _near(pattern, paths)
    return ConfigError(
        f"{where} {pattern!r} matches no parameter; near it are {_some(near)}"
        if near
        else f"{where} {pattern!r} matches no parameter; the parameters are {_some(paths)}"
    )


def _near(pattern: str, paths: Sequence[str]) -> list[str]:
    """Paths most like a pattern: by the whole, or by the best of their parts."""
    literal = re.sub(r"[\\^$.*+?()\[\]{}|]+", "", pattern)

    def likeness(path: str) -> float:
        candidates = (path, *path.split("/"))
        return max(difflib.SequenceMatcher(None, literal, text).ratio() for text in candidates)

    scored = sorted(((likeness(path), path) for path in paths), key=lambda pair: -pair[0])
    return [path for score, path in scored if score >= 0.5]


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
