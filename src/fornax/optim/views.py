"""How an optimizer sees a parameter: stacked axes aside, a matrix or a vector.

Shapes: R rows (inputs), C columns (outputs); batch dimensions are stacked layers and experts.
"""

import math
from dataclasses import dataclass

import jax

from fornax.config.errors import ConfigError
from fornax.mesh import path_name
from fornax.optim.tree import flatten

__all__ = ["View", "make_views"]

_BATCH_AXES = ("layers", "expert")
_HEADS = ("heads", "kv_heads", "groups")
_ONE_FEATURE = ("norm", "conv")


@dataclass(frozen=True)
class View:
    """The dimensions of one parameter, sorted into batch, rows and columns.

    A vector has columns only. `unclear` holds the reason why a parameter of many dimensions is
    neither, when it is neither.
    """

    shape: tuple[int, ...]
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    embedding: bool = False
    unclear: str = ""

    @property
    def is_matrix(self) -> bool:
        """Whether one layer of this parameter has inputs and outputs."""
        return bool(self.rows) or bool(self.unclear)

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether it is a matrix that maps features to features, not tokens to features."""
        return self.is_matrix and not self.embedding

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Sizes of the stacked dimensions."""
        return tuple(self.shape[dim] for dim in self.batch)

    @property
    def core_shape(self) -> tuple[int, ...]:
        """(R, C) of one matrix, or (C,) of one vector."""
        groups = (self.rows, self.cols) if self.rows else (self.cols,)
        return tuple(math.prod(self.shape[dim] for dim in group) for group in groups)

    def to_core(self, x: jax.Array) -> jax.Array:
        """`x` as (batch..., R, C) or (batch..., C)."""
        order = (*self.batch, *self.rows, *self.cols)
        return x.transpose(order).reshape(self.batch_shape + self.core_shape)

    def from_core(self, x: jax.Array) -> jax.Array:
        """The inverse of `to_core`."""
        order = (*self.batch, *self.rows, *self.cols)
        inverse = tuple(sorted(range(len(order)), key=order.__getitem__))
        return x.reshape(tuple(self.shape[dim] for dim in order)).transpose(inverse)


def make_views(params: object, axes: object = None) -> dict[str, View]:
    """The view of each parameter, by path.

    Args:
      params: tree of arrays or ShapeDtypeStructs; of NNX variables too.
      axes: tree like `params` with a tuple of logical axis names (or None) a parameter. Without
        it the variables' own metadata `axes` count; a parameter with neither is taken for what
        its number of dimensions says, and nothing is taken for stacked.

    Raises:
      ConfigError: when `axes` misses a parameter or has another number of names.
    """
    names = _axes_by_path(params) if axes is None else flatten(axes, _is_axes)
    views = {}
    for path, leaf in flatten(params).items():
        if axes is not None and path not in names:
            raise ConfigError(f"axes has no entry for parameter {path}; give one name a dimension")
        views[path] = _view(path, tuple(leaf.shape), names.get(path))
    return views


def _is_axes(node: object) -> bool:
    return node is None or (
        isinstance(node, tuple) and all(name is None or isinstance(name, str) for name in node)
    )


def _axes_by_path(params: object) -> dict[str, tuple[str | None, ...] | None]:
    def is_variable(node: object) -> bool:
        return hasattr(node, "get_metadata")

    found = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_variable)[0]
    return {
        path_name(path): node.get_metadata().get("axes")
        for path, node in found
        if is_variable(node)
    }


def _view(path: str, shape: tuple[int, ...], axes: tuple[str | None, ...] | None) -> View:
    if axes is None:
        return _view_by_rank(shape)
    if len(axes) != len(shape):
        raise ConfigError(
            f"parameter {path} of shape {shape} has {len(axes)} axes {axes}; give one name or "
            "None a dimension"
        )
    batch = [dim for dim, name in enumerate(axes) if name in _BATCH_AXES]
    groups = _groups(axes, batch)
    # A scale, or a convolution, of each feature, however the features are arranged.
    if any(name in axes for name in _ONE_FEATURE):
        groups = [tuple(dim for group in groups for dim in group)]
    # Alone it counts matrices or vectors, such as those of a modulation.
    counted = [group for group in groups if all(axes[dim] == "groups" for dim in group)]
    if len(groups) > len(counted):
        groups = [group for group in groups if group not in counted]
        batch.extend(dim for group in counted for dim in group)
    while len(groups) > 2:
        unnamed = [group for group in groups if all(axes[dim] is None for dim in group)]
        if not unnamed:
            break
        groups.remove(unnamed[0])
        batch.extend(unnamed[0])
    return _sorted_view(shape, tuple(sorted(batch)), groups, axes)


def _groups(axes: tuple[str | None, ...], batch: list[int]) -> list[tuple[int, ...]]:
    """Neighbouring dimensions that are one feature dimension: heads and their width."""
    groups: list[tuple[int, ...]] = []
    for dim, name in enumerate(axes):
        if dim in batch:
            continue
        if name == "head_dim" and groups and axes[groups[-1][-1]] in _HEADS:
            groups[-1] = (*groups[-1], dim)
        else:
            groups.append((dim,))
    return groups


def _sorted_view(
    shape: tuple[int, ...],
    batch: tuple[int, ...],
    groups: list[tuple[int, ...]],
    axes: tuple[str | None, ...],
) -> View:
    embedding = "vocab" in axes
    if len(groups) == 2:
        return View(shape, batch, groups[0], groups[1], embedding)
    flat = tuple(dim for group in groups for dim in group)
    unclear = f"axes {axes} leave {len(groups)} feature dimensions" if len(groups) > 2 else ""
    return View(shape, batch, (), flat, embedding, unclear)


def _view_by_rank(shape: tuple[int, ...]) -> View:
    if len(shape) == 2:
        return View(shape, (), (0,), (1,))
    unclear = f"shape {shape} has no logical axes" if len(shape) > 2 else ""
    return View(shape, (), (), tuple(range(len(shape))), unclear=unclear)
