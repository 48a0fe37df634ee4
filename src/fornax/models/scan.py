"""Stacking layers along a leading axis and running the stack with as few compiled bodies as the
pattern of layer kinds allows.

Parameters live in one stack with a leading "layers" axis. A scan's body holds one period of the
pattern, so each layer in it knows its window and rotary embedding at compile time, which kernels
need. A pattern that does not repeat evenly becomes several scans over parts of the stack.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from fornax.config.errors import ConfigError
from fornax.models.attend import KeyValueCache, LayerCache, Place
from fornax.models.config import LayerKind
from fornax.models.layers import AttentionContext
from fornax.models.remat import Remat, keep_uncut, rematerialise

__all__ = [
    "Segment",
    "plan_segments",
    "run_layers",
    "run_layers_cached",
    "stack_layers",
]


def stack_layers(make: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> nnx.Module:
    """`count` modules of one kind as one module whose parameters have a leading "layers" axis.

    Args:
      make: builds one module from its own source of randomness; every variable that it makes must
        carry `axes`.
      count: how many.
      rngs: split into one source for each.
    """
    keys = jax.random.split(rngs.params(), count)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    state = jax.vmap(lambda key: nnx.state(make(nnx.Rngs(key))))(keys)

    def name_axis(variable: nnx.Variable) -> nnx.Variable:
        axes = variable.get_metadata().get("axes")
        if axes is None:
            raise ConfigError(
                "a stacked layer has a variable without logical axes; make it with "
                'nnx.Param(value, axes=("embed", "mlp"))'
            )
        return variable.replace(axes=("layers", *axes))

    stacked = jax.tree.map(name_axis, state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return nnx.merge(graphdef, stacked)


@dataclass(frozen=True)
class Segment:
    """A run of layers whose kinds repeat with a period."""

    start: int
    kinds: tuple[LayerKind, ...]
    repeats: int

    @property
    def stop(self) -> int:
        """One past the last layer."""
        return self.start + len(self.kinds) * self.repeats


@functools.cache
def plan_segments(kinds: tuple[LayerKind, ...]) -> tuple[Segment, ...]:
    """Cut the layers into segments so that the bodies to compile hold the fewest layers in all.

    Among equal plans the one with fewer segments wins.
    """
    best: list[tuple[int, int, tuple[Segment, ...]]] = [(0, 0, ())]
    for stop in range(1, len(kinds) + 1):
        options = []
        for start in range(stop):
            period = _period(kinds[start:stop])
            bodies, count, before = best[start]
            segment = Segment(start, kinds[start : start + period], (stop - start) // period)
            options.append((bodies + period, count + 1, (*before, segment)))
        best.append(min(options, key=lambda option: option[:2]))
    return best[-1][2]


def _period(kinds: tuple[LayerKind, ...]) -> int:
    """The shortest whole period of a run."""
    for period in range(1, len(kinds) // 2 + 1):
        if len(kinds) % period == 0 and kinds[:period] * (len(kinds) // period) == kinds:
            return period
    return len(kinds)


def run_layers(
    layers: nnx.Module,
    kinds: tuple[LayerKind, ...],
    x_BTD: jax.Array,
    context: AttentionContext,
    *,
    remat: str | Remat = "none",
    unroll: int | bool = 1,
) -> jax.Array:
    """Run a stack of layers without a cache.

    Args:
      layers: the stacked module.
      kinds: each layer's kind.
      x_BTD: the residual stream.
      context: what the layers share.
      remat: what the backward pass computes again of each layer.
      unroll: periods that one step of the scan runs; True runs all without a loop.

    Raises:
      ConfigError: for an unknown remat policy.
    """
    graphdef, stack = nnx.split(layers)

    def body(segment: Segment, x_BTD: jax.Array, period: object) -> tuple[jax.Array, None]:
        # A scan of one step is no loop once compiled.
        lone = segment.repeats == 1 or unroll is True
        for index, kind in enumerate(segment.kinds):
            # What the loop hands over as it is stays where it is; what is cut from it would be
            # saved for the backward pass, a second copy of the stack.
            alone = len(segment.kinds) == 1
            layer = functools.partial(_run_layer, graphdef, kind, context, None if alone else index)
            layer = layer if alone else keep_uncut(layer)
            x_BTD = rematerialise(layer, remat, prevent_cse=lone)(period, x_BTD)
        return x_BTD, None

    for segment in plan_segments(kinds):
        period = len(segment.kinds)
        shape = (segment.repeats, period) if period > 1 else (segment.repeats,)
        part = jax.tree.map(functools.partial(_part, segment=segment, shape=shape), stack)
        x_BTD, _ = jax.lax.scan(functools.partial(body, segment), x_BTD, part, unroll=unroll)
    return x_BTD


def _run_layer(
    graphdef: Any,
    kind: LayerKind,
    context: AttentionContext,
    index: int | None,
    period: Any,
    x_BTD: jax.Array,
) -> jax.Array:
    """Run the `index`-th layer of a period, or the only one of it when `index` is None.

    It picks its own parameters: picked outside, they would be saved, a second copy of the stack.
    """
    one = period if index is None else jax.tree.map(lambda leaf: leaf[index], period)
    return nnx.merge(graphdef, one)(x_BTD, kind, context)[0]


def _part(leaf: jax.Array, segment: Segment, shape: tuple[int, ...]) -> jax.Array:
    if segment.stop - segment.start != leaf.shape[0]:
        leaf = leaf[segment.start : segment.stop]
    return leaf.reshape(shape + leaf.shape[1:])


CacheT = TypeVar("CacheT", bound=KeyValueCache)


def run_layers_cached(
    layers: nnx.Module,
    kinds: tuple[LayerKind, ...],
    x_BTD: jax.Array,
    context: AttentionContext,
    cache: CacheT,
) -> tuple[jax.Array, CacheT]:
    """Run a stack of layers that read and write a cache.

    The stack is indexed and the cache carried, so that neither is copied: for inference only.
    """
    graphdef, stack = nnx.split(layers)

    def body(segment: Segment, carry: Any, repeat: jax.Array) -> tuple[Any, None]:
        x_BTD, cache = carry
        for index, kind in enumerate(segment.kinds):
            place = _place(segment, kinds, index, repeat)
            one = jax.tree.map(
                functools.partial(_pick, layer=place.layer), stack, is_leaf=_is_weight
            )
            view = LayerCache(cache, place)
            x_BTD, view = nnx.merge(graphdef, one)(x_BTD, kind, context, view)
            cache = view.cache
        return (x_BTD, cache), None

    carry = (x_BTD, cache)
    for segment in plan_segments(kinds):
        repeats = jnp.arange(segment.repeats, dtype=jnp.int32)
        carry, _ = jax.lax.scan(functools.partial(body, segment), carry, repeats)
    return carry


def _place(segment: Segment, kinds: tuple[LayerKind, ...], index: int, repeat: jax.Array) -> Place:
    """Where the segment's `index`-th layer of a repeat stands in the model."""
    window = segment.kinds[index].window
    same = [kind.window == window for kind in segment.kinds]
    before = sum(kind.window == window for kind in kinds[: segment.start])
    return Place(
        layer=segment.start + repeat * len(same) + index,
        among=before + repeat * sum(same) + sum(same[:index]),
    )


def _is_weight(leaf: object) -> bool:
    """Whether it is a weight that knows its own product, rather than an array."""
    return hasattr(leaf, "linear") and not isinstance(leaf, nnx.Variable)


def _pick(leaf: Any, layer: jax.Array) -> Any:
    if _is_weight(leaf):
        return leaf.at(layer)
    return jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)
