"""Stacking modules along a leading axis, so that a scan runs them."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from fornax.config.errors import ConfigError
from fornax.models.config import DecoderConfig
from fornax.models.layers import DecoderLayer, make_layer

__all__ = ["stack_decoder_layers", "stack_layers"]

ModuleT = TypeVar("ModuleT", bound=nnx.Module)


class _Rngs(nnx.Rngs):
    """One key's stream."""

    def __init__(self, key: jax.Array) -> None:
        super().__init__(key)
        self.default = _Stream(key, tag="default")


class _Stream(nnx.RngStream):
    """The same keys, counted outside the traced program: where Flax sets a traced count, JAX
    prints the program so far, which takes longer than tracing all else."""

    drawn = 0

    def __call__(self) -> jax.Array:
        self.drawn += 1
        return jax.random.fold_in(self.key[...], self.drawn - 1)


def stack_layers(make: Callable[[nnx.Rngs], ModuleT], count: int, rngs: nnx.Rngs) -> ModuleT:
    """`count` modules of one kind as one module whose parameters have a leading "layers" axis.

    Args:
      make: builds one module from its own source of randomness; every variable that it makes must
        carry `axes`.
      count: how many.
      rngs: split into one source for each.
    """
    return _stack(make, jax.random.split(rngs.params(), count))


def _stack(make: Callable[[nnx.Rngs], ModuleT], keys: jax.Array) -> ModuleT:
    graphdefs = []

    def make_one(key: jax.Array) -> nnx.State:
        graphdef, state = nnx.split(make(_Rngs(key)))
        graphdefs.append(graphdef)
        return state

    state = jax.vmap(make_one)(keys)

    def name_axis(variable: nnx.Variable) -> nnx.Variable:
        axes = variable.get_metadata().get("axes")
        if axes is None:
            raise ConfigError(
                "a stacked layer has a variable without logical axes; make it with "
                'nnx.Param(value, axes=("embed", "mlp"))'
            )
        return variable.replace(axes=("layers", *axes))

    stacked = jax.tree.map(name_axis, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return nnx.merge(graphdefs[0], stacked)


def stack_decoder_layers(
    config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike, compute_dtype: DTypeLike
) -> DecoderLayer:
    """All layers of a decoder: each part stacked over the layers that have it.

    A layer's values depend on its number alone, whatever the other layers are.
    """
    keys = jax.random.split(rngs.params(), config.num_layers)
    kinds = config.layer_kinds()
    found: dict[str, list[tuple[list[int], nnx.Module]]] = {}
    for parts in dict.fromkeys(kind.parts() for kind in kinds):
        layers = [index for index, kind in enumerate(kinds) if kind.parts() == parts]
        kind = kinds[layers[0]]
        stacked = _stack(
            lambda own, kind=kind: make_layer(
                config, kind, rngs=own, dtype=dtype, compute_dtype=compute_dtype
            ),
            keys if len(layers) == len(keys) else keys[np.asarray(layers)],
        )
        for part, module in stacked.parts().items():
            found.setdefault(part, []).append((layers, module))
    return DecoderLayer({part: _joined(pieces) for part, pieces in found.items()})


def _joined(pieces: list[tuple[list[int], nnx.Module]]) -> nnx.Module:
    """One stack of the pieces of several, in the order of the layers' numbers."""
    if len(pieces) == 1:
        return pieces[0][1]
    order = np.argsort(np.concatenate([layers for layers, _ in pieces]))
    graphdef, _ = nnx.split(pieces[0][1])
    states = [nnx.state(module) for _, module in pieces]
    joined = jax.tree.map(lambda *values: jnp.concatenate(values)[order], *states)
    return nnx.merge(graphdef, joined)
