"""Optimizers that are not Fornax's: factories of `optax.GradientTransformation` by their name.

A factory is called with keyword arguments: what the config gives beside `type`, and what it names
of these:

- `learning_rate`, which it must take: a schedule, from the count of updates (int32 scalar) to the
  rate, as every factory of Optax takes it.
- `mask`: a function from a tree to whether each parameter decays (`optim.decay`, `no_decay`).
- `views`: path to `View`, which says which dimensions of a parameter are stacked layers, rows and
  columns.

Its transformation is given nested dicts of float32 arrays, whole parameters with all their layers.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import optax

from fornax.config import ConfigError, did_you_mean, user_errors

__all__ = ["Factory", "TaskOptimizer", "call_factory"]

Factory = Callable[..., optax.GradientTransformation]


@dataclass(frozen=True)
class TaskOptimizer:
    """The factory that a task brings."""

    make: Factory

    @property
    def type(self) -> str:
        """What to call it."""
        return f"the task's {getattr(self.make, '__name__', 'optimizer')}"


def call_factory(
    name: str,
    factory: Factory,
    options: Mapping[str, object],
    offered: Mapping[str, object],
    needed: Sequence[str],
) -> optax.GradientTransformation:
    """The transformation that a factory makes.

    Args:
      name: what to call the factory in errors.
      factory: the function.
      options: arguments that the config gives.
      offered: arguments that Fornax has for a factory that names them.
      needed: those of them that it has to take.

    Raises:
      ConfigError: for arguments that do not fit its signature, what it raises, or what it returns.
    """
    with user_errors(name):
        parameters = inspect.signature(factory).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes = [p.name for p in named]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in options:
        if key == "learning_rate":
            raise ConfigError(f"{name}: optim.learning_rate and optim.schedule give learning_rate")
        if key not in takes and not takes_any:
            keys = [each for each in takes if each not in ("learning_rate", "views")]
            hint = did_you_mean(key, keys, f"it takes {', '.join(keys) or 'no keys'}")
            raise ConfigError(f"{name} takes no {key}; {hint}")
    given = {key: value for key, value in offered.items() if key in takes and key not in options}
    for key in needed:
        if key not in given and key not in options and not (takes_any and key == "learning_rate"):
            raise ConfigError(f"{name} takes no {key}{_WHY[key]}")
    if takes_any:
        given["learning_rate"] = offered["learning_rate"]
    missing = [p.name for p in named if p.default is p.empty and p.name not in {**given, **options}]
    if missing:
        raise ConfigError(f"{name} needs {', '.join(missing)}; give them beside optimizer.type")
    with user_errors(name, always=True):
        made = factory(**given, **options)
    if not isinstance(made, optax.GradientTransformation):
        raise ConfigError(
            f"{name} returned a {type(made).__name__}; it returns an optax.GradientTransformation"
        )
    return _explained(name, made)


_WHY = {
    "learning_rate": "; it is called with the schedule, from updates to rate, as learning_rate",
    "mask": ", so optim.decay and optim.no_decay would be ignored; take `mask`, or drop them",
}


def _explained(
    name: str, made: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """The transformation, whose exceptions name the line of the user's code."""
    inner = optax.with_extra_args_support(made)

    def init(params: optax.Params) -> optax.OptState:
        with user_errors(name, always=True):
            return inner.init(params)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        with user_errors(name, always=True):
            return inner.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)
