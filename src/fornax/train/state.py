"""The train state: everything a step reads and writes, as one pytree of arrays.

The model is split: its structure (graphdef) is static, its arrays live here as plain nested dicts,
so that `jax.jit` sees only arrays, can be given a sharding for each, and takes all of them over
(donation). Parameters that are not trained are not part of it: steps read them beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fornax import adapters
from fornax.mesh import Rules, tree_shardings, use_mesh
from fornax.optim import Built
from fornax.train.guard import GuardState, SkipConfig, start_guard

__all__ = [
    "ModelParts",
    "TrainState",
    "abstract_frozen",
    "abstract_state",
    "as_tree",
    "fresh_state",
    "split_model",
    "trained_of",
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """All arrays of a run."""

    step: jax.Array
    """int32 scalar: steps taken, skipped ones included."""
    updates: jax.Array
    """int32 scalar: updates made; where the learning-rate schedule stands."""
    params: Any
    """The trained arrays, nested dicts by module path."""
    other: Any
    """Arrays of the model that are not trained (running statistics), nested dicts."""
    optimizer: Any
    """The optimizer's state."""
    guard: GuardState
    """What the skip rule remembers."""
    rng: jax.Array
    """uint32 [2]: the run's random key; a step folds its number into it."""


def as_tree(state: TrainState) -> dict[str, Any]:
    """The state as a dict of its fields: what a checkpoint holds."""
    return {field.name: getattr(state, field.name) for field in fields(state)}


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """A model taken apart: its structure, and what its arrays look like."""

    graphdef: Any
    params: nnx.State
    """What is trained."""
    frozen: Any
    """Parameters that are not: shapes, or the arrays that `merge` is to put in."""
    other: nnx.State
    rngs: nnx.State

    def holding(self, frozen: object) -> "ModelParts":
        """The same with the arrays of the frozen parameters."""
        return replace(self, frozen=frozen)

    def merge(self, params: object, other: object, key: jax.Array) -> Any:
        """The model with these arrays, its random streams started from `key`."""
        return nnx.merge(self.graphdef, params, self.frozen, other, self._streams(key))

    @staticmethod
    def other_of(model: Any) -> Any:
        """The untrained arrays of a merged model, as nested dicts."""
        return nnx.to_pure_dict(split_model(model).other)

    def _streams(self, key: jax.Array) -> object:
        leaves, tree = jax.tree.flatten(nnx.to_pure_dict(self.rngs))
        fresh = []
        for number, leaf in enumerate(leaves):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                mine = jax.random.fold_in(key, number)
                fresh.append(jax.random.split(mine, leaf.shape) if leaf.shape else mine)
            else:
                fresh.append(jnp.zeros(leaf.shape, leaf.dtype))
        return jax.tree.unflatten(tree, fresh)


_ROUTER = ("router", "router_scale", "expert_scale")
"""Parameters of a mixture's router, or modules that hold them."""


def trained_of(lora: adapters.LoRA | None, *, freeze_router: bool = False) -> Filter:
    """Which parameters a run of tuning trains, as a filter.

    Args:
      lora: the adapters, which are then all of them; None: all parameters.
      freeze_router: whether those of a mixture's routers are left out.
    """
    if lora is not None:
        return adapters.LoRAParam
    if not freeze_router:
        return nnx.Param
    return nnx.All(nnx.Param, *(nnx.Not(nnx.PathContains(name)) for name in _ROUTER))


def split_model(model: nnx.Module, trained: Any = nnx.Param) -> ModelParts:
    """Take a model (of arrays, or of shapes from `nnx.eval_shape`) apart.

    Args:
      model: the model.
      trained: an NNX filter; parameters it does not find are frozen.
    """
    graphdef, params, frozen, rngs, other = nnx.split(
        model, nnx.All(nnx.Param, trained), nnx.Param, nnx.RngState, ...
    )
    return ModelParts(graphdef=graphdef, params=params, frozen=frozen, other=other, rngs=rngs)


def fresh_state(params: Any, other: Any, optim: Built, skip: SkipConfig, seed: int) -> TrainState:
    """The state before the first step, from a model's arrays."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        updates=jnp.zeros((), jnp.int32),
        params=params,
        other=other,
        optimizer=optim.init(params),
        guard=start_guard(skip),
        rng=jax.random.key_data(jax.random.fold_in(jax.random.key(seed), 1)),
    )


def abstract_frozen(parts: ModelParts, mesh: Mesh, rules: Rules) -> Any:
    """The frozen parameters, as ShapeDtypeStructs that carry their shardings, nested dicts.

    Raises:
      ShardingError: for a parameter without logical axes, or one that does not divide.
    """
    shapes = nnx.to_pure_dict(parts.frozen)
    return _with_shardings(shapes, nnx.to_pure_dict(tree_shardings(parts.frozen, mesh, rules)))


def abstract_state(
    build: Callable[[], TrainState], parts: ModelParts, optim: Built, mesh: Mesh, rules: Rules
) -> TrainState:
    """What `build` returns, as ShapeDtypeStructs that carry their shardings.

    Parameters lie where their logical axes say, the optimizer's arrays beside the parameters they
    belong to; all else is replicated.

    Raises:
      ShardingError: for a parameter without logical axes, or one that does not divide.
    """
    replicated: Any = NamedSharding(mesh, PartitionSpec())
    of_params = nnx.to_pure_dict(tree_shardings(parts.params, mesh, rules))
    with use_mesh(mesh, rules):
        shapes = jax.eval_shape(build)
    shardings = TrainState(
        step=replicated,
        updates=replicated,
        params=of_params,
        other=nnx.to_pure_dict(tree_shardings(parts.other, mesh, rules)),
        optimizer=optim.state_shardings(of_params),
        guard=jax.tree.map(lambda _: replicated, shapes.guard),
        rng=replicated,
    )
    return _with_shardings(shapes, shardings)


def _with_shardings(shapes: object, shardings: object) -> Any:
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        shardings,
    )
