"""The table of built-in verifiers: where each lives; none is imported before it is asked for."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from fornax.config import load

__all__ = ["BUILT_IN", "build"]

BUILT_IN = {
    "math": "mathematics",
    "code": "code",
    "json_schema": "json_schema",
    "regex": "regex",
    "python_parses": "python_source",
    "answers_signature": "python_source",
}
"""Name of a verifier to its module. The module has a `TABLE` from the name to a config dataclass
of options and a function of these that makes the verifier and names the columns it needs."""

Verifier = Callable[..., float | None]


def build(name: str, options: Mapping[str, str]) -> tuple[Verifier, tuple[str, ...]]:
    """Make a verifier; with it the columns of the data it cannot do without.

    Raises:
      ConfigError: an unknown option, a bad value, or a library that is not installed.
    """
    module: Any = importlib.import_module(f"fornax.rewards.verifiers.{BUILT_IN[name]}")
    config, make = module.TABLE[name]
    return make(load(config, overrides=[f"--{key}={value}" for key, value in options.items()]))
