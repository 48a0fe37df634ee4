"""Where the optimizer state lies: each part beside the parameter it belongs to.

Shapes: R rows and C columns of a parameter's matrix view; batch dimensions in front.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from fornax.mesh import path_name
from fornax.optim.views import View

__all__ = ["state_shardings"]

_SQUARES = {"left": 0, "left_basis": 0, "right": 1, "right_basis": 1}
"""State fields of [..., side, side], with the side: 0 rows, 1 columns."""


def state_shardings(
    state: Any, views: Mapping[str, View], param_shardings: Mapping[str, NamedSharding]
) -> Any:
    """A tree like `state` with a NamedSharding in place of each array.

    An array of a parameter's shape lies as the parameter does. A factor of it (Adafactor's rows
    and columns, SOAP's preconditioners) is divided along the dimensions it shares with the
    parameter. Counters are replicated.

    Args:
      state: abstract optimizer state.
      views: how each parameter is seen, by path.
      param_shardings: the parameters' shardings, by path.
    """
    mesh = next(iter(param_shardings.values())).mesh

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        owner, field = _owner(path, views)
        if owner is None:
            return NamedSharding(mesh, PartitionSpec())
        spec = _spec(leaf.shape, field, views[owner], param_shardings[owner].spec)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, state)


def _owner(path: tuple[Any, ...], views: Mapping[str, View]) -> tuple[str | None, str]:
    """The parameter a state array belongs to, and the last field name on the way to it."""
    runs: list[list[Any]] = [[]]
    for key in path:
        if isinstance(key, jax.tree_util.DictKey):
            runs[-1].append(key)
        else:
            runs.append([])
    owner = next((name for run in runs if (name := path_name(tuple(run))) in views), None)
    fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    return owner, fields[-1] if fields else ""


def _spec(shape: tuple[int, ...], field: str, view: View, spec: PartitionSpec) -> PartitionSpec:
    entries = (*spec, *[None] * (len(view.shape) - len(spec)))
    batch = [entries[dim] for dim in view.batch]
    if field in _SQUARES:
        dims = (view.rows, view.cols)[_SQUARES[field]]
        return PartitionSpec(*batch, _merged(dims, view, entries), None)
    if shape == view.shape:
        return PartitionSpec(*entries)
    core = shape[len(batch) :]
    if shape[: len(batch)] != view.batch_shape or core in ((), (1,)):
        return PartitionSpec()
    return PartitionSpec(*batch, *_core_entries(core, field, view, entries))


def _core_entries(core: tuple[int, ...], field: str, view: View, entries: tuple) -> list[Any]:
    """Entries for what is left of (R, C) in an array whose batch dimensions are taken off."""
    groups = [view.rows, view.cols] if view.rows else [view.cols]
    merged = [_merged(group, view, entries) for group in groups]
    if core == view.core_shape:
        return merged
    if len(core) == 1 and len(groups) == 2:
        rows, cols = view.core_shape
        is_rows = core[0] == rows and (rows != cols or field == "v_row")
        return [merged[0] if is_rows else merged[1]]
    return [None] * len(core)


def _merged(dims: tuple[int, ...], view: View, entries: tuple) -> Any:
    """The entry of several dimensions merged into one: the first's, if it alone is divided."""
    outer = [dim for dim in dims if view.shape[dim] > 1] or list(dims)
    if any(entries[dim] is not None for dim in outer[1:]):
        return None
    return entries[outer[0]]
