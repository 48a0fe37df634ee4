"""The keys in which a plan differs from the configuration it was searched from."""

from typing import Any

from fornax.config import diff
from fornax.train import TrainConfig

__all__ = ["changed_keys"]


def changed_keys(old: TrainConfig, new: TrainConfig) -> dict[str, Any]:
    """Nested mappings of the changed keys with their new values."""
    changes: dict[str, Any] = {}
    for change in diff(old, new):
        *parents, last = change.path.split(".")
        node = changes
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = change.new
    return changes
