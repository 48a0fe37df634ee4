"""A pass without gradient over a round's rows, by the model before its first step on them.

It gives the log-probabilities that ratios start from, the reference's, and values.

Legend: R rows, T tokens of a row.
"""

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from fornax import adapters
from fornax.mesh import Rules, use_mesh
from fornax.train.hosts import abstract_batch, to_global
from fornax.train.task import Batch, Hosts

__all__ = ["BothPolicies", "Forward", "mesh_of", "score_rows"]


class Forward(Hashable, Protocol):
    """What a pass computes; equal ones share a compiled program."""

    def __call__(self, model: Any, rows: Batch) -> Mapping[str, jax.Array]:
        """(model, rows) to float32 arrays [R, T]."""
        ...


@dataclass(frozen=True)
class BothPolicies:
    """What the model says, and what it says with its adapters off."""

    policy: Forward | None
    reference: Forward

    def __call__(self, model: Any, rows: Batch) -> Mapping[str, jax.Array]:
        """The arrays of both."""
        found = {} if self.policy is None else dict(self.policy(model, rows))
        with adapters.disabled(model):
            return found | dict(self.reference(model, rows))


def score_rows(
    forward: Forward, model: nnx.Module, rows: Mapping[str, np.ndarray], rules: Rules
) -> dict[str, np.ndarray]:
    """`forward` of a model on its mesh and of this host's rows, as float32 arrays [R, T]."""
    mesh = mesh_of(model)
    graphdef, state = nnx.split(model)
    program = _program(forward, mesh, tuple(sorted(rules.items())), graphdef)
    shapes = abstract_batch(rows, Hosts(), mesh, rules)
    found = program(nnx.to_pure_dict(state), to_global(dict(rows), shapes))
    return {name: np.asarray(x, np.float32) for name, x in jax.device_get(found).items()}


@functools.lru_cache(maxsize=32)
def _program(
    forward: Forward, mesh: Mesh, rules: tuple[tuple[str, tuple[str, ...]], ...], graphdef: Any
) -> Callable[..., Mapping[str, jax.Array]]:
    def run(state: Any, rows: Batch) -> Mapping[str, jax.Array]:
        with use_mesh(mesh, dict(rules)):
            model = nnx.merge(graphdef, state)
            model.eval()
            return forward(model, rows)

    return jax.jit(run)


def mesh_of(model: nnx.Module) -> Mesh:
    """The mesh that the trainer laid a model's parameters on."""
    for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)):
        if isinstance(leaf.sharding, NamedSharding) and isinstance(leaf.sharding.mesh, Mesh):
            return leaf.sharding.mesh
    raise ValueError("no parameter of the model lies on a mesh")
