"""The life of served versions: load, verify, warm, switch, drain, unload."""

from fornax.serving.lifecycle.commands import Rollback
from fornax.serving.lifecycle.manager import Manager
from fornax.serving.lifecycle.states import (
    IndexEntry,
    Instance,
    Loader,
    ServableLike,
    Source,
    State,
)

__all__ = [
    "IndexEntry",
    "Instance",
    "Loader",
    "Manager",
    "Rollback",
    "ServableLike",
    "Source",
    "State",
]
