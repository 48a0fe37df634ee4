"""Shardings of a whole model: logical axes from variable metadata to a tree of NamedShardings."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fornax.config.errors import ShardingError
from fornax.mesh.mesh import MeshConfig
from fornax.mesh.rules import Rules, named_sharding

__all__ = ["fit_mesh", "path_name", "tree_shardings"]

_WRAPPERS = ("value", "raw_value")


def path_name(path: tuple[object, ...]) -> str:
    """A JAX key path as `layers/attention/q/kernel`; a variable's own wrapper is left out."""
    last = path[-1] if path else None
    if isinstance(last, jax.tree_util.GetAttrKey) and last.name in _WRAPPERS:
        path = path[:-1]
    return "/".join(str(_part(key)) for key in path)


def _part(key: object) -> object:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


def _is_variable(node: object) -> bool:
    return hasattr(node, "get_metadata") and hasattr(node, "get_value")


def _axes_of(variable: Any) -> tuple[str | None, ...] | None:
    return variable.get_metadata().get("axes")


def tree_shardings(state: Any, mesh: Mesh, rules: Rules) -> Any:
    """A tree like `state` with a NamedSharding in place of each array.

    Args:
      state: an `nnx.State` (or any tree of NNX variables) of arrays or ShapeDtypeStructs. A
        variable's logical axes are its metadata `axes`, one per dimension.
      mesh: where the arrays will lie.
      rules: the rule table.

    Raises:
      ShardingError: for a variable of one or more dimensions without `axes`, an axis without a
        rule, or a dimension that does not divide; the message names the parameter.
    """

    def one(path: tuple[Any, ...], variable: Any) -> Any:
        name = path_name(path)
        if not _is_variable(variable):
            if getattr(variable, "ndim", 0) == 0:
                return NamedSharding(mesh, PartitionSpec())
            raise ShardingError(
                f"{name} is a plain array without logical axes; make it a variable with "
                '`nnx.Param(value, axes=("embed", "mlp"))`'
            )
        value = variable.get_value()
        axes = _axes_of(variable)
        if axes is None:
            if not getattr(value, "shape", ()):
                axes = ()
            elif jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
                axes = (None,) * len(value.shape)
            else:
                raise ShardingError(
                    f"{name} has shape {tuple(value.shape)} and no logical axes; make it with "
                    '`nnx.Param(value, axes=("embed", "mlp"))`, one name or None a dimension'
                )
        sharding = named_sharding(mesh, axes, rules, shape=value.shape, name=name)
        return variable.replace(sharding)

    return jax.tree_util.tree_map_with_path(one, state, is_leaf=_is_variable)


def fit_mesh(config: MeshConfig, state: Any, num_devices: int) -> MeshConfig:
    """`config` with an open `fsdp` that the arrays of `state` divide over.

    Where they do not divide over all devices that are left, `fsdp` takes the most that they do, and
    `data` the others: rows are divided over both. A size that the config gives stays.

    Args:
      config: axis sizes.
      state: as in `tree_shardings`.
      num_devices: of the whole mesh.

    Raises:
      ShardingError: when the sizes do not multiply to `num_devices`.
    """
    rules = config.resolved_rules()
    if config.fsdp != -1 or not {"data", "fsdp"} <= {*rules["batch"]}:
        return config
    left = config.resolved_sizes(num_devices)["fsdp"]
    sizes = set()
    for variable in jax.tree.leaves(state, is_leaf=_is_variable):
        axes = (_axes_of(variable) if _is_variable(variable) else None) or ()
        over = {n: rules[axis] for n, axis in enumerate(axes) if axis and axis in rules}
        for dim in [n for n in over if "fsdp" in over[n]][:1]:
            others = math.prod(getattr(config, axis) for axis in over[dim] if axis != "fsdp")
            sizes.add(variable.get_value().shape[dim] // others)
    most = math.gcd(left, *sizes)
    if most == left:
        return config
    return dataclasses.replace(config, fsdp=most, data=config.data * (left // most))
