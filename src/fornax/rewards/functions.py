"""Finding a reward function and calling it in its own form; runs inside a worker process."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fornax.config import did_you_mean, load_module, load_object, nearest
from fornax.config.errors import ConfigError
from fornax.rewards.spec import RewardSpec, Sample, Verdict
from fornax.rewards.verifiers import BUILT_IN, build

__all__ = ["Function", "as_score", "describe_failure", "load_function", "missing_columns"]

_FORMS = (
    "use score(prompt, completion, **record) -> float, or the batched form "
    "score(prompts, completions, **columns) -> list of float"
)
_GIVEN_ONE = ("prompt", "completion", "completion_ids")
_GIVEN_MANY = ("prompts", "completions", "completion_ids")


@dataclass(frozen=True)
class Function:
    """A reward function, and how it is called."""

    call: Callable[..., Any]
    batched: bool
    is_async: bool
    names: tuple[str, ...] | None
    """The arguments it takes by name; None takes all."""
    columns: tuple[str, ...]
    """Columns of the data that it cannot do without."""
    module: ModuleType | None = None
    """The user's module, which may keep state."""

    @property
    def has_state(self) -> bool:
        """Whether the module offers `get_state()` and `set_state(state)`."""
        return hasattr(self.module, "get_state") and hasattr(self.module, "set_state")

    def arguments(self, sample: Sample) -> dict[str, Any]:
        """What a call for one sample is given."""
        given = {
            **sample.record,
            "prompt": sample.prompt,
            "completion": sample.completion,
            "completion_ids": list(sample.tokens),
        }
        return self._chosen(given)

    def batch_arguments(self, samples: Sequence[Sample]) -> dict[str, object]:
        """What one call for many samples is given; a column some lack holds None there.

        Completions of chats are lists of one message, as TRL gives them.
        """
        columns = {name: None for sample in samples for name in sample.record}
        given = {name: [sample.record.get(name) for sample in samples] for name in columns}
        given["prompts"] = [sample.prompt for sample in samples]
        given["completions"] = [
            sample.completion
            if isinstance(sample.prompt, str)
            else [{"role": "assistant", "content": sample.completion}]
            for sample in samples
        ]
        given["completion_ids"] = [list(sample.tokens) for sample in samples]
        return self._chosen(given)

    def _chosen(self, given: Mapping[str, object]) -> dict[str, object]:
        if self.names is None:
            return dict(given)
        return {name: given[name] for name in self.names if name in given}


def load_function(spec: RewardSpec) -> Function:
    """Import what a spec names and look at its signature.

    Raises:
      ConfigError: no such file, module or function, or arguments that no form has.
    """
    if spec.function in BUILT_IN:
        call, columns = build(spec.function, spec.options)
        return Function(call, batched=False, is_async=False, names=None, columns=columns)
    if spec.options:
        raise ConfigError(f"{spec.function} takes no options; only built-in verifiers do")
    place, _, name = spec.function.rpartition(":")
    if not place or not name:
        forms = f"name a function as FILE.py:NAME or one of {', '.join(BUILT_IN)}"
        hint = did_you_mean(spec.function, BUILT_IN, forms)
        raise ConfigError(f"{spec.function} is not a reward; {hint}")
    return _inspect(load_object(spec.function), load_module(place), spec.function)


def _inspect(call: object, module: ModuleType, label: str) -> Function:
    if not callable(call):
        raise ConfigError(f"{label} is a {type(call).__name__}, not a function; {_FORMS}")
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{label} has no signature that can be read; {_FORMS}") from error
    shown = f"{label}({', '.join(map(str, parameters))})"
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = [p.name for p in named]
    if positional:
        raise ConfigError(f"{shown} takes {', '.join(positional)} by position only; {_FORMS}")
    batched = "completions" in names or ("prompts" in names and "completion" not in names)
    wanted = "completions" if batched else "completion"
    if wanted not in names and not takes_all:
        guess = nearest(wanted, names)
        hint = f"is {guess} meant as {wanted}? " if guess else ""
        raise ConfigError(f"{shown} takes no argument named {wanted}; {hint}{_FORMS}")
    given = _GIVEN_MANY if batched else _GIVEN_ONE
    columns = [p.name for p in named if p.default is p.empty and p.name not in given]
    return Function(
        call,
        batched=batched,
        is_async=inspect.iscoroutinefunction(call)
        or inspect.iscoroutinefunction(getattr(call, "__call__", None)),  # noqa: B004
        names=None if takes_all else tuple(names),
        columns=tuple(columns),
        module=module,
    )


def as_score(value: object) -> tuple[float | None, str, dict[str, float]]:
    """A value a function gave as a number, or None and what is wrong with it; and its counts.

    None stays None without a complaint: the reward does not apply to this sample.
    """
    counts: dict[str, float] = {}
    if isinstance(value, Verdict):
        counts = {str(name): float(count) for name, count in value.counts.items()}
        value = value.value
    if value is None:
        return None, "", counts
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, int | float):
        return None, f"gave a {type(value).__name__}, not a number", {}
    number = float(value)
    if not math.isfinite(number):
        return None, f"gave {number}", {}
    return number, "", counts


def describe_failure(error: BaseException) -> str:
    """An exception of a user's function in one line."""
    return f"raised {_said(error)}"


def missing_columns(function: Function, record: Mapping[str, object]) -> list[str]:
    """Columns that a function needs and a record lacks."""
    return [name for name in function.columns if name not in record]


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
