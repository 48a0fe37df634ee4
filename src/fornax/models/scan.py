"""Running a stack of layers with as few compiled bodies as the pattern of layer kinds allows.

Each part of a layer lies in one stack over the layers that have it. A scan's body holds one period
of the pattern, so each layer in it knows its window and rotary embedding at compile time, which
kernels need. A pattern that does not repeat evenly becomes several scans over parts of the stacks.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from fornax.models.attend import KeyValueCache, LayerCache, PassKeys, Place
from fornax.models.config import LayerKind
from fornax.models.context import LayerContext
from fornax.models.layers import DecoderLayer
from fornax.models.remat import Remat, keep_unchosen, keep_uncut, rematerialise
from fornax.models.routing import Routing

__all__ = [
    "Segment",
    "is_weight",
    "pick_layer",
    "plan_segments",
    "run_layers",
    "run_layers_cached",
    "run_layers_keeping",
    "run_stacks",
]


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


Stacks = dict[str, Any]
"""By part of a layer: its arrays with a leading axis over the layers that have it, in a tuple with
those that they are chosen from."""


_EXPERTS = "experts"
"""The part that routes."""
_INPUTS = "layer inputs"
"""Beside the parts of a period: what its layers take in beside the residual stream."""
_ROUTED = "routed experts"
"""Beside them too: the experts that tokens take in those of its layers that have some."""
_FIRST = "first layer"
"""Beside them, where outputs are kept: the number of its first layer."""

Kept = dict[int, tuple[jax.Array, jax.Array]]
"""Keys and values that later layers take, by their window; see `PassKeys`."""


@dataclass(frozen=True)
class _Stretch:
    """The layers of a segment that have a part, in the part's stack."""

    start: int
    period: int
    """How many of a period's layers have it."""
    stop: int

    def of(self, index: int, segment: Segment, part: str) -> int:
        """Which of the period's is that of the period's `index`-th layer."""
        return sum(part in kind.parts() for kind in segment.kinds[:index])


def _stretches(kinds: tuple[LayerKind, ...], segment: Segment) -> dict[str, _Stretch]:
    """Where the parts of a segment's layers lie."""
    found = {}
    for part in dict.fromkeys(part for kind in segment.kinds for part in kind.parts()):
        start = sum(part in kind.parts() for kind in kinds[: segment.start])
        period = sum(part in kind.parts() for kind in segment.kinds)
        found[part] = _Stretch(start, period, start + period * segment.repeats)
    return found


def run_layers(
    layers: DecoderLayer,
    kinds: tuple[LayerKind, ...],
    x_BTD: jax.Array,
    context: LayerContext,
    *,
    remat: str | Remat = "none",
    unroll: int | bool = 1,
) -> tuple[jax.Array, Routing | None]:
    """Run a stack of layers without a cache.

    Args:
      layers: the stacked parts.
      kinds: each layer's kind.
      x_BTD: the residual stream.
      context: what the layers share.
      remat: what the backward pass computes again of each layer.
      unroll: periods that one step of the scan runs; True runs all without a loop.

    Returns:
      The residual stream, and what the routers did, with a leading axis over the layers that have
      one; None where none has.

    Raises:
      ConfigError: for an unknown remat policy.
    """
    split = {part: nnx.split(module) for part, module in layers.parts().items()}
    graphdefs = {part: graphdef for part, (graphdef, _) in split.items()}
    stacks = {part: (state,) for part, (_, state) in split.items()}
    return run_stacks(graphdefs, stacks, kinds, x_BTD, context, remat=remat, unroll=unroll)


def run_layers_keeping(
    layers: DecoderLayer,
    kinds: tuple[LayerKind, ...],
    x_BTD: jax.Array,
    context: LayerContext,
    keep: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Run a stack of layers without a cache, and keep what some of them give.

    Args:
      layers: the stacked parts.
      kinds: each layer's kind.
      x_BTD: the residual stream.
      context: what the layers share.
      keep: after how many layers the residual stream is kept; 0 for what goes in.

    Returns:
      The residual stream, and those kept [len(keep), B, T, D].
    """
    split = {part: nnx.split(module) for part, module in layers.parts().items()}
    graphdefs = {part: graphdef for part, (graphdef, _) in split.items()}
    stacks = {part: (state,) for part, (_, state) in split.items()}
    x_BTD, _, kept = _run_stacks(graphdefs, stacks, kinds, x_BTD, context, keep=keep)
    assert kept is not None
    return x_BTD, kept


def run_stacks(
    graphdefs: Mapping[str, Any],
    stacks: Mapping[str, tuple[Any, ...]],
    kinds: tuple[LayerKind, ...],
    x_BTD: jax.Array,
    context: LayerContext,
    *,
    remat: str | Remat = "none",
    unroll: int | bool = 1,
    turn: jax.Array | None = None,
) -> tuple[jax.Array, Routing | None]:
    """`run_layers` of parts that are taken apart.

    Args:
      graphdefs: each part's structure.
      stacks: each part's arrays; in a pipeline a choice of several.
      kinds: each layer's kind.
      x_BTD: the residual stream.
      context: what the layers share.
      remat: what the backward pass computes again of each layer.
      unroll: see `run_layers`.
      turn: int32, which of the stacks it is, in a function that `vmap` runs over pipeline stages;
        None elsewhere.
    """
    options: dict[str, Any] = {"remat": remat, "unroll": unroll, "turn": turn}
    return _run_stacks(graphdefs, stacks, kinds, x_BTD, context, **options)[:2]


def _run_stacks(
    graphdefs: Mapping[str, Any],
    stacks: Mapping[str, tuple[Any, ...]],
    kinds: tuple[LayerKind, ...],
    x_BTD: jax.Array,
    context: LayerContext,
    *,
    remat: str | Remat = "none",
    unroll: int | bool = 1,
    turn: jax.Array | None = None,
    keep: tuple[int, ...] | None = None,
) -> tuple[jax.Array, Routing | None, jax.Array | None]:
    """`run_stacks`, and what `run_layers_keeping` keeps, where it is asked for."""
    routings: list[Routing] = []

    kept: Kept = {}
    after = None if keep is None else jnp.asarray(keep, jnp.int32)

    def body(
        segment: Segment, carry: tuple[jax.Array, jax.Array | None], period: Stacks
    ) -> tuple[tuple[jax.Array, jax.Array | None], tuple[list[Routing | None], Kept]]:
        x_BTD, outputs = carry
        first = period.pop(_FIRST, None)
        # A scan of one step is not a loop once compiled.
        lone = segment.repeats == 1 or unroll is True
        stretches, found = _stretches(kinds, segment), []
        own_inputs, routed = period.pop(_INPUTS, None), period.pop(_ROUTED, None)
        handed: Kept = {}
        for index, kind in enumerate(segment.kinds):
            # What the loop hands over as it is stays where it is; what is cut from it would be
            # saved for the backward pass, a second copy of the stack.
            cuts = {
                part: None
                if stretches[part].period == 1
                else stretches[part].of(index, segment, part)
                for part in kind.parts()
            }
            layer = functools.partial(_run_layer, graphdefs, kind, context, cuts, turn)
            own = {part: period[part] for part in kind.parts()}
            if any(len(choice) > 1 for choice in own.values()):
                layer = keep_unchosen(layer)
            elif set(cuts.values()) != {None}:
                layer = keep_uncut(layer)
            layer = rematerialise(layer, remat, prevent_cse=lone, stages=turn is not None)
            own_input = None if own_inputs is None else own_inputs[index]
            experts_BTk = None
            if routed is not None and kind.mlp == "experts":
                experts_BTk = routed[stretches[_EXPERTS].of(index, segment, _EXPERTS)]
            x_BTD, routing, new = layer(own, x_BTD, own_input, experts_BTk, {**kept, **handed})
            handed |= new
            found.append(routing)
            if outputs is not None:
                here = after == first + index + 1
                outputs = jnp.where(here[:, None, None, None], x_BTD, outputs)
        return (x_BTD, outputs), (found, handed)

    outputs = None if keep is None else jnp.broadcast_to(x_BTD, (len(keep), *x_BTD.shape))

    for segment in plan_segments(kinds):
        stretches = _stretches(kinds, segment)
        own = {
            part: jax.tree.map(
                functools.partial(_part, stretch=stretch, repeats=segment.repeats), stacks[part]
            )
            for part, stretch in stretches.items()
        }
        if context.layer_inputs_LBTP is not None:
            inputs_LBTP = context.layer_inputs_LBTP[segment.start : segment.stop]
            shape = (segment.repeats, len(segment.kinds), *inputs_LBTP.shape[1:])
            own[_INPUTS] = inputs_LBTP.reshape(shape)
        if context.routed_experts_LBTk is not None and _EXPERTS in stretches:
            at = stretches[_EXPERTS]
            routed_LBTk = context.routed_experts_LBTk[at.start : at.stop]
            shape = (segment.repeats, at.period, *routed_LBTk.shape[1:])
            own[_ROUTED] = routed_LBTk.reshape(shape)
        if keep is not None:
            own[_FIRST] = jnp.arange(
                segment.start, segment.stop, len(segment.kinds), dtype=jnp.int32
            )
        run = functools.partial(body, segment)
        (x_BTD, outputs), (found, handed) = jax.lax.scan(run, (x_BTD, outputs), own, unroll=unroll)
        # A layer that keeps keys is the only one of its kind, in a scan of one step.
        kept |= jax.tree.map(lambda stacked: stacked[0], handed)
        of_period = [routing for routing in found if routing is not None]
        if of_period:
            routings.append(jax.tree.map(_in_order, *of_period))
    if not routings:
        return x_BTD, None, outputs
    return x_BTD, jax.tree.map(lambda *parts: jnp.concatenate(parts), *routings), outputs


def _in_order(*layers: jax.Array) -> jax.Array:
    """Values [repeats, ...] of each layer of a period, as one axis over all layers."""
    return jnp.stack(layers, axis=1).reshape(-1, *layers[0].shape[1:])


def _run_layer(
    graphdefs: Mapping[str, Any],
    kind: LayerKind,
    context: LayerContext,
    cuts: dict[str, int | None],
    turn: jax.Array | None,
    period: Stacks,
    x_BTD: jax.Array,
    input_BTP: jax.Array | None,
    experts_BTk: jax.Array | None,
    kept: Kept,
) -> tuple[jax.Array, Routing | None, Kept]:
    """Run one layer of a period, whose part is the cut-th of those of the period, or the only one,
    of the stack whose turn it is.

    It picks its own parameters: picked outside, they would be saved, a second copy of the stack.
    """
    parts = {}
    for part, cut in cuts.items():
        choice = period[part]
        if cut is not None:
            choice = jax.tree.map(lambda leaf, cut=cut: leaf[cut], choice)
        one = choice[0]
        if turn is not None and len(choice) > 1:
            one = jax.tree.map(lambda *leaves: jax.lax.select_n(turn, *leaves), *choice)
        parts[part] = nnx.merge(graphdefs[part], one)
    context = replace(context, layer_input_BTP=input_BTP, routed_experts_BTk=experts_BTk)
    keys = None if kind.keys == "own" else PassKeys(context, kept)
    x_BTD, keys, routing = DecoderLayer(parts)(x_BTD, kind, context, keys)
    new = {kind.window or 0: keys.kept[kind.window or 0]} if kind.keys == "kept" else {}
    return x_BTD, routing, new


def _part(leaf: jax.Array, stretch: _Stretch, repeats: int) -> jax.Array:
    if stretch.stop - stretch.start != leaf.shape[0]:
        leaf = leaf[stretch.start : stretch.stop]
    shape = (repeats, stretch.period) if stretch.period > 1 else (repeats,)
    return leaf.reshape(shape + leaf.shape[1:])


CacheT = TypeVar("CacheT", bound=KeyValueCache)


def run_layers_cached(
    layers: DecoderLayer,
    kinds: tuple[LayerKind, ...],
    x_BTD: jax.Array,
    context: LayerContext,
    cache: CacheT,
) -> tuple[jax.Array, CacheT, jax.Array | None]:
    """Run a stack of layers that read and write a cache.

    The stack is indexed and the cache carried, so that neither is copied: for inference only.

    Returns:
      The residual stream, the cache, and where the context asks for it the experts that each token
      took in each layer that has some, int32 [L, B, T, k].
    """
    split = {part: nnx.split(module) for part, module in layers.parts().items()}

    def body(segment: Segment, carry: Any, repeat: jax.Array) -> tuple[Any, list[jax.Array]]:
        (x_BTD, cache), taken = carry, []
        stretches = _stretches(kinds, segment)
        for index, kind in enumerate(segment.kinds):
            parts = {}
            for part in kind.parts():
                stretch = stretches[part]
                at = stretch.start + repeat * stretch.period + stretch.of(index, segment, part)
                graphdef, stack = split[part]
                one = jax.tree.map(functools.partial(pick_layer, at=at), stack, is_leaf=is_weight)
                parts[part] = nnx.merge(graphdef, one)
            view = LayerCache(cache, _place(segment, kinds, index, repeat))
            own = context
            if context.layer_inputs_LBTP is not None:
                at = segment.start + repeat * len(segment.kinds) + index
                own = replace(context, layer_input_BTP=pick_layer(context.layer_inputs_LBTP, at))
            x_BTD, after, routing = DecoderLayer(parts)(x_BTD, kind, own, view)
            cache = after.cache
            if routing is not None and routing.experts_BTk is not None:
                taken.append(routing.experts_BTk)
        return (x_BTD, cache), taken

    carry, experts = (x_BTD, cache), []
    for segment in plan_segments(kinds):
        repeats = jnp.arange(segment.repeats, dtype=jnp.int32)
        carry, taken = jax.lax.scan(functools.partial(body, segment), carry, repeats)
        if taken:
            experts.append(_in_order(*taken))
    return (*carry, jnp.concatenate(experts) if experts else None)


def _place(segment: Segment, kinds: tuple[LayerKind, ...], index: int, repeat: jax.Array) -> Place:
    """Where the segment's `index`-th layer of a repeat is in the model."""
    kind = segment.kinds[index]
    if kind.keys == "shared":
        kept = kinds.index(replace(kind, keys="kept", wide_mlp=False))
        segment, index, repeat = Segment(kept, kinds[kept : kept + 1], 1), 0, jnp.int32(0)

    def among(same: Callable[[LayerKind], bool]) -> jax.Array:
        own = [same(each) for each in segment.kinds]
        before = sum(same(each) for each in kinds[: segment.start])
        return before + repeat * sum(own) + sum(own[:index])

    return Place(
        layer=among(lambda each: each.attention == kind.attention and each.keys != "shared"),
        among=among(
            lambda each: (
                (each.attention, each.window) == (kind.attention, kind.window)
                and each.keys != "shared"
            )
        ),
    )


def is_weight(leaf: object) -> bool:
    """Whether it is a stack of weights that knows its layers, rather than an array."""
    return hasattr(leaf, "at") and not isinstance(leaf, nnx.Variable | jax.Array)


def pick_layer(leaf: Any, at: jax.Array) -> Any:
    """One layer, by its number, of a stacked array or weight."""
    if is_weight(leaf):
        return leaf.at(at)
    return jax.lax.dynamic_index_in_dim(leaf, at, keepdims=False)
