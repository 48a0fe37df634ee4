"""Passes without gradient over a round's rows, before its first step, and the value head.

They give the log-probabilities that ratios start from, the reference's, and values.

Legend: R rows, T tokens of a row, D model width.
"""

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fornax import adapters
from fornax.mesh import Rules, use_mesh
from fornax.models import Decoder, Remat, TokenLogprobs, token_logprobs
from fornax.models.scope import scoped
from fornax.train.hosts import abstract_batch, find_hosts, to_global
from fornax.train.task import Batch, Hosts

__all__ = [
    "ROUTED",
    "BothPolicies",
    "Forward",
    "ValueParam",
    "attach_value_head",
    "mesh_of",
    "rows_logprobs",
    "score_rows",
    "value_head",
    "without_value_head",
]


ROUTED = "routed_experts"
"""Of rows: the experts that tokens took where they were drawn, to be taken again."""
_NAME = "value_head"


class ValueParam(nnx.Param):
    """A parameter of a value head."""


class ValueHead(nnx.Module):
    """v = x w + b; zero at the start, so that the first advantages are the rewards."""

    def __init__(self, width: int):
        """Make the parameters for hidden states of `width` numbers."""
        self.kernel = ValueParam(jnp.zeros((width,), jnp.float32), axes=("embed",))
        self.bias = ValueParam(jnp.zeros((), jnp.float32), axes=())

    @scoped
    def __call__(self, x_RTD: jax.Array) -> jax.Array:
        """float32 values [R, T] of hidden states."""
        return x_RTD.astype(jnp.float32) @ self.kernel[...] + self.bias[...]


def attach_value_head(model: Decoder) -> Decoder:
    """Put a fresh head on a decoder, in place; nothing else about it changes."""
    setattr(model, _NAME, ValueHead(model.config.hidden_size))
    return model


def value_head(model: Decoder) -> ValueHead:
    """What `attach_value_head` put there."""
    return getattr(model, _NAME)


def without_value_head(model: Decoder) -> Decoder:
    """The decoder without a value head; itself where it has none."""
    if not hasattr(model, _NAME):
        return model
    graphdef, state = nnx.split(model)
    plain = nnx.merge(graphdef, state)
    delattr(plain, _NAME)
    return plain


def rows_logprobs(
    model: Decoder,
    rows: Batch,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    remat: str | Remat = "none",
) -> TokenLogprobs:
    """`models.token_logprobs` of packed rows.

    Args:
      model: the decoder.
      rows: tokens, targets, positions, segment_ids int32 [R, T]; perhaps routed_experts, integers
        [R, T, L, k], which tokens then take.
      temperature: divides the logits.
      entropy: whether to compute the entropy too.
      remat: what the backward pass computes again.

    Returns:
      float32 [R, T].
    """
    return token_logprobs(
        model,
        rows["tokens"],
        rows["targets"],
        positions_BT=rows["positions"],
        segment_ids_BT=rows["segment_ids"],
        temperature=temperature,
        entropy=entropy,
        routed_experts_BTLk=rows.get(ROUTED),
        remat=remat,
    )


class Forward(Hashable, Protocol):
    """What a pass computes; equal ones share a compiled program."""

    def __call__(self, model: Decoder, rows: Batch) -> Mapping[str, jax.Array]:
        """(model, rows) to float32 arrays [R, T]."""


@dataclass(frozen=True)
class BothPolicies:
    """A pass of the model, and one with its adapters off: the reference."""

    policy: Forward | None
    reference: Forward

    def __call__(self, model: Decoder, rows: Batch) -> Mapping[str, jax.Array]:
        found = {} if self.policy is None else dict(self.policy(model, rows))
        with adapters.disabled(model):
            return found | dict(self.reference(model, rows))


def score_rows(
    forward: Forward, model: nnx.Module, rows: Mapping[str, np.ndarray], rules: Rules
) -> dict[str, np.ndarray]:
    """`forward` of a model on its mesh, as float32 arrays [R, T].

    In a run of several processes all call it with all rows, and get all values.
    """
    mesh = mesh_of(model)
    graphdef, state = nnx.split(model)
    hosts = Hosts() if jax.process_count() == 1 else find_hosts(mesh, rules)
    program = _program(forward, mesh, tuple(sorted(rules.items())), graphdef)
    size = {len(x) // hosts.count for x in rows.values()}.pop()
    local = {name: x[size * hosts.index :][:size] for name, x in rows.items()}
    shapes = abstract_batch(local, hosts, mesh, rules)
    found = program(nnx.to_pure_dict(state), to_global(local, shapes))
    return {name: np.asarray(x, np.float32) for name, x in jax.device_get(found).items()}


@functools.lru_cache(maxsize=32)
def _program(
    forward: Forward,
    mesh: Mesh,
    rules: tuple[tuple[str, tuple[str, ...]], ...],
    graphdef: nnx.GraphDef,
) -> Callable[..., Mapping[str, jax.Array]]:
    def run(state: Mapping[str, jax.Array], rows: Batch) -> Mapping[str, jax.Array]:
        with use_mesh(mesh, dict(rules)):
            model = nnx.merge(graphdef, state)
            model.eval()
            return forward(model, rows)

    whole = None if jax.process_count() == 1 else NamedSharding(mesh, PartitionSpec())
    return jax.jit(run, out_shardings=whole)


def mesh_of(model: nnx.Module) -> Mesh:
    """The mesh that the trainer laid a model's parameters on."""
    for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)):
        if isinstance(leaf.sharding, NamedSharding) and isinstance(leaf.sharding.mesh, Mesh):
            return leaf.sharding.mesh
    raise ValueError("no parameter of the model lies on a mesh")
