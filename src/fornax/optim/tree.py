"""Any tree of parameters as nested dicts of plain arrays, and paths that name each of them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from fornax.config.errors import ConfigError
from fornax.mesh import path_name

__all__ = ["at_paths", "flatten", "nest", "rebuild"]


def flatten(tree: object, is_leaf: Callable[[object], bool] | None = None) -> dict[str, Any]:
    """Leaves by path, in tree order.

    Raises:
      ConfigError: when two leaves have the same path.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        name = path_name(path)
        if name in leaves:
            raise ConfigError(f"two parameters have the path {name!r}; rename one of them")
        leaves[name] = leaf
    return leaves


def nest(leaves: Mapping[str, object]) -> dict[str, Any]:
    """Leaves by path as nested dicts, one level for each part of a path."""
    root: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return root


def rebuild(like: object, leaves: Mapping[str, object]) -> Any:
    """A tree shaped as `like` that holds `leaves`."""
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[path_name(path)], like)


def at_paths(table: Mapping[str, object]) -> Callable[[object], Any]:
    """A function from a tree, whole or masked, to the tree of `table`'s values at its paths.

    Optax hands masked trees to callables it is given; a table of values by path fits them all.
    """
    return lambda tree: rebuild(tree, table)
