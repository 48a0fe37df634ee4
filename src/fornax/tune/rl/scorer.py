"""A pass without gradient over a round's rows, by the model before its first step on them.

It gives the log-probabilities that ratios start from, the reference's, and values.

Legend: R rows, T tokens of a row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from fornax.mesh import Rules, use_mesh
from fornax.train.hosts import abstract_batch, to_global
from fornax.train.task import Batch, Hosts

__all__ = ["Scorer", "mesh_of"]

Forward = Callable[[Any, Batch], Mapping[str, jax.Array]]


@dataclass(kw_only=True)
class Scorer:
    """Compiled once for each shape of rows."""

    rules: Rules
    forward: Forward
    """(model, rows) to arrays [R, T]."""
    _programs: dict[Any, Callable[..., Mapping[str, jax.Array]]] = field(default_factory=dict)

    def __call__(self, model: nnx.Module, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """`forward` of a model and this host's rows, as float32 arrays [R, T]."""
        graphdef, state = nnx.split(model)
        mesh = mesh_of(model)
        if graphdef not in self._programs:
            self._programs[graphdef] = jax.jit(
                lambda state, rows: self._run(mesh, graphdef, state, rows)
            )
        shapes = abstract_batch(rows, Hosts(), mesh, self.rules)
        found = self._programs[graphdef](nnx.to_pure_dict(state), to_global(dict(rows), shapes))
        return {name: np.asarray(x, np.float32) for name, x in jax.device_get(found).items()}

    def _run(self, mesh: Mesh, graphdef: Any, state: Any, rows: Batch) -> Mapping[str, jax.Array]:
        with use_mesh(mesh, self.rules):
            model = nnx.merge(graphdef, state)
            model.eval()
            return self.forward(model, rows)


def mesh_of(model: nnx.Module) -> Mesh:
    """The mesh that the trainer laid a model's parameters on."""
    for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)):
        if isinstance(leaf.sharding, NamedSharding) and isinstance(leaf.sharding.mesh, Mesh):
            return leaf.sharding.mesh
    raise ValueError("no parameter of the model lies on a mesh")
