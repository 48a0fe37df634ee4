"""The role of Tunix: supervised tuning, preference, reinforcement learning, distillation.

`tune(config, out)` does everything for one of the configs; `losses` and `advantages` are plain
functions of arrays. What needs JAX is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fornax.tune.config import SFTConfig, TuneConfig
    from fornax.tune.methods import METHODS, Method, method_of
    from fornax.tune.policy import Origin, Policy, read_origin
    from fornax.tune.run import tune

__all__ = [
    "METHODS",
    "Method",
    "Origin",
    "Policy",
    "SFTConfig",
    "TuneConfig",
    "method_of",
    "read_origin",
    "tune",
]

_HOMES = {
    "METHODS": "methods",
    "Method": "methods",
    "Origin": "policy",
    "Policy": "policy",
    "SFTConfig": "config",
    "TuneConfig": "config",
    "method_of": "methods",
    "read_origin": "policy",
    "tune": "run",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"fornax.tune.{_HOMES[name]}"), name)
