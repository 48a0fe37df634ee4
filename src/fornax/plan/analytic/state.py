"""The train state's arrays and where they lie: exact, from the trainer's own shapes and rules.

Model and optimizer are traced to shapes (no device is touched), then divided by the rule table.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding

from fornax import optim
from fornax.mesh import DtypePolicy, path_name, tree_shardings
from fornax.models import DecoderConfig, abstract_decoder
from fornax.optim import OptimConfig
from fornax.optim.shardings import state_shardings
from fornax.optim.tree import flatten
from fornax.plan.analytic.local import Local, abstract_mesh
from fornax.plan.analytic.tiles import padded_bytes

__all__ = ["StateArray", "state_arrays"]


@dataclass(frozen=True, kw_only=True)
class StateArray:
    """One array of the train state, as one device holds it."""

    name: str
    owner: str
    """`parameters` or `optimizer`."""
    shape: tuple[int, ...]
    """On one device."""
    dtype: Any
    axes: tuple[tuple[str, ...], ...]
    """Mesh axes larger than one that divide each dimension."""
    bytes: int
    """On one device, with the padding of its layout."""


@dataclass(frozen=True)
class _Shapes:
    params: Any
    built: optim.Built
    optimizer: Any


@functools.lru_cache(maxsize=64)
def _shapes(model: DecoderConfig, chain: OptimConfig, dtypes: DtypePolicy, steps: int) -> _Shapes:
    decoder = abstract_decoder(model, dtype=dtypes.param_dtype, compute_dtype=dtypes.compute_dtype)
    params = nnx.state(decoder, nnx.Param)
    built = optim.build(chain, total_steps=steps, params=params)
    optimizer = jax.eval_shape(built.init, nnx.to_pure_dict(params))
    return _Shapes(params, built, optimizer)


def state_arrays(local: Local) -> tuple[StateArray, ...]:
    """Parameters and optimizer state of one device.

    Raises:
      ShardingError: for a parameter that does not divide; the message names it.
      ConfigError: when the optimizer's rules do not fit the model.
    """
    config = local.config
    return _state(
        (local.model, config.optim, config.dtypes, config.steps),
        tuple(local.mesh.values()),
        tuple(sorted(local.rules.items())),
        local.topology.chip.platform == "tpu",
    )


_What = tuple[DecoderConfig, OptimConfig, DtypePolicy, int]


@functools.lru_cache(maxsize=512)
def _state(
    what: _What,
    sizes: tuple[int, ...],
    rules: tuple[tuple[str, tuple[str, ...]], ...],
    tpu: bool,
) -> tuple[StateArray, ...]:
    shapes, mesh = _shapes(*what), abstract_mesh(sizes)
    where = flatten(nnx.to_pure_dict(_checked(shapes.params, mesh, dict(rules))))
    params = flatten(nnx.to_pure_dict(shapes.params))
    beside = state_shardings(shapes.optimizer, shapes.built.views, where)
    found = [_one("parameters", path, leaf, where[path], tpu) for path, leaf in params.items()]
    leaves = jax.tree_util.tree_flatten_with_path(shapes.optimizer)[0]
    for (path, leaf), sharding in zip(leaves, jax.tree.leaves(beside), strict=True):
        found.append(_one("optimizer", path_name(path), leaf, sharding, tpu))
    return tuple(found)


def _checked(params: Any, mesh: AbstractMesh, rules: Mapping[str, tuple[str, ...]]) -> Any:
    return tree_shardings(params, mesh, rules)  # pyrefly: ignore[bad-argument-type]


def _one(owner: str, name: str, leaf: Any, sharding: NamedSharding, tpu: bool) -> StateArray:
    shape = sharding.shard_shape(tuple(leaf.shape))
    plain = math.prod(shape) * leaf.dtype.itemsize
    return StateArray(
        name=name,
        owner=owner,
        shape=shape,
        dtype=leaf.dtype,
        axes=tuple(_dividing(sharding, len(shape))),
        bytes=padded_bytes(shape, leaf.dtype.itemsize) if tpu else plain,
    )


def _dividing(sharding: NamedSharding, ndim: int) -> Iterator[tuple[str, ...]]:
    entries = (*sharding.spec, *[None] * (ndim - len(sharding.spec)))
    for entry in entries:
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        yield tuple(name for name in names if sharding.mesh.shape[name] > 1)
