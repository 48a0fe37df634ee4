"""Where the optimizer state lies: each part beside the parameter it belongs to.

Shapes: R rows and C columns of a parameter's matrix view; batch dimensions in front.
"""

import math
from collections.abc import Mapping

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from fornax.mesh import path_name
from fornax.optim.views import View

__all__ = ["state_shardings", "unmatched"]

Entry = str | tuple[str, ...] | None
"""The mesh axes of one dimension, as a PartitionSpec has them."""

_SQUARES = {"left": 0, "left_basis": 0, "right": 1, "right_basis": 1}
"""State fields of [..., side, side], with the side: 0 rows, 1 columns."""


_STACKS = ("left_stats", "right_stats", "left_root", "right_root")
"""State fields of [K, side, side], with K blocks of all of a parameter's matrices."""


def state_shardings(
    state: object, views: Mapping[str, View], param_shardings: Mapping[str, NamedSharding]
) -> object:
    """A tree like `state` with a NamedSharding in place of each array.

    An array belongs to the parameter whose path is part of its own; without one, to those that
    have its shape, where they all lie alike. One of the parameter's shape lies as the parameter
    does. A factor of it (Adafactor's rows and columns, SOAP's preconditioners) is divided along the
    dimensions it shares with the parameter, any other array over the parameter's mesh axes where
    they divide it. What belongs to no parameter is replicated (`unmatched` names it).

    Args:
      state: abstract optimizer state.
      views: how each parameter is seen, by path.
      param_shardings: the parameters' shardings, by path.
    """
    mesh = next(iter(param_shardings.values())).mesh

    def one(path: tuple[object, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        spec = _placement(path, leaf, views, param_shardings)
        return NamedSharding(mesh, PartitionSpec() if spec is None else spec)

    return jax.tree_util.tree_map_with_path(one, state)


def unmatched(
    state: object, views: Mapping[str, View], param_shardings: Mapping[str, NamedSharding]
) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays (no scalars) of `state` that belong to no parameter, by path."""
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if leaf.size > 1 and _placement(path, leaf, views, param_shardings) is None
    }


def _placement(
    path: tuple[object, ...],
    leaf: jax.ShapeDtypeStruct,
    views: Mapping[str, View],
    param_shardings: Mapping[str, NamedSharding],
) -> PartitionSpec | None:
    owner = _owner(path, views)
    if owner is None:
        specs = {s.spec for p, s in param_shardings.items() if views[p].shape == leaf.shape}
        return specs.pop() if len(specs) == 1 else None
    fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    field = fields[-1] if fields else ""
    return _spec(leaf.shape, field, views[owner], param_shardings[owner])


def _owner(path: tuple[object, ...], views: Mapping[str, View]) -> str | None:
    """The parameter a state array belongs to: the longest one whose path is within its own."""
    runs: list[list[object]] = [[]]
    for key in path:
        if isinstance(key, jax.tree_util.DictKey):
            runs[-1].append(key)
        else:
            runs.append([])
    parts = [
        run[start : start + length]
        for run in runs
        for length in range(len(run), 0, -1)
        for start in range(len(run) - length + 1)
    ]
    parts.sort(key=len, reverse=True)
    return next((name for part in parts if (name := path_name(tuple(part))) in views), None)


def _spec(shape: tuple[int, ...], field: str, view: View, sharding: NamedSharding) -> PartitionSpec:
    spec = sharding.spec
    entries = (*spec, *[None] * (len(view.shape) - len(spec)))
    batch = [entries[dim] for dim in view.batch]
    if field in _SQUARES:
        dims = (view.rows, view.cols)[_SQUARES[field]]
        return PartitionSpec(*batch, _merged(dims, view, entries), None)
    if shape == view.shape:
        return PartitionSpec(*entries)
    if field == "scales":
        divides = [
            n % _devices(entry, sharding.mesh) == 0 for n, entry in zip(shape, entries, strict=True)
        ]
        return PartitionSpec(
            *(entry if ok else None for entry, ok in zip(entries, divides, strict=True))
        )
    core = shape[len(batch) :]
    if field in _STACKS or shape[: len(batch)] != view.batch_shape:
        return PartitionSpec(*_placed(shape, entries, sharding.mesh))
    if core in ((), (1,)):
        return PartitionSpec()
    found = _core_entries(core, field, view, entries)
    if found is None:
        inner = tuple(entries[dim] for dim in (*view.rows, *view.cols))
        found = _placed(core, inner, sharding.mesh)
    return PartitionSpec(*batch, *found)


def _devices(entry: Entry, mesh: Mesh | AbstractMesh) -> int:
    axes = (entry,) if isinstance(entry, str) else (entry or ())
    return math.prod(mesh.shape[axis] for axis in axes)


def _placed(
    shape: tuple[int, ...], entries: tuple[Entry, ...], mesh: Mesh | AbstractMesh
) -> list[Entry]:
    """The mesh axes of `entries`, each on the first dimension of `shape` that it divides."""
    found: list[list[str]] = [[] for _ in shape]
    left = list(shape)
    for entry in entries:
        for axis in (entry,) if isinstance(entry, str) else (entry or ()):
            size = mesh.shape[axis]
            dim = next((d for d, n in enumerate(left) if n % size == 0), None)
            if dim is not None:
                found[dim].append(axis)
                left[dim] //= size
    return [tuple(axes) or None for axes in found]


def _core_entries(
    core: tuple[int, ...], field: str, view: View, entries: tuple[Entry, ...]
) -> list[Entry] | None:
    """Entries for what is left of (R, C) in an array whose batch dimensions are taken off; None
    for an array of another kind."""
    groups = [view.rows, view.cols] if view.rows else [view.cols]
    merged = [_merged(group, view, entries) for group in groups]
    if core == view.core_shape:
        return merged
    if len(core) == 1 and len(groups) == 2:
        rows, cols = view.core_shape
        is_rows = core[0] == rows and (rows != cols or field == "v_row")
        if is_rows or core[0] == cols:
            return [merged[0] if is_rows else merged[1]]
    return None


def _merged(dims: tuple[int, ...], view: View, entries: tuple[Entry, ...]) -> Entry:
    """The entry of several dimensions merged into one: the first's, if it alone is divided."""
    outer = [dim for dim in dims if view.shape[dim] > 1] or list(dims)
    if any(entries[dim] is not None for dim in outer[1:]):
        return None
    return entries[outer[0]]
