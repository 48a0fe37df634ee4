"""A stack of layers as a circular pipeline over the mesh axis `stage`, in one program.

Where slices divide layers too, the stages lie along `slice` and `stage`: neighbours in one slice.

The stack is cut into P R parts of consecutive layers, equal in kinds (what is too much of it at its
beginning runs before), of which stage p has p, p + P, and so on. M
microbatches of the batch circulate: at tick t stage p takes microbatch (t - p) mod M through its
part number (t - p) // M. All M R + P - 1 ticks are one loop; what a stage computes in P - 1 of them
is read by nobody. The stages are an axis of arrays that the mesh divides and `vmap` runs over, so
that a device computes its own stage, and all other axes of the mesh act inside a stage as they do
without one. What comes before the layers and after them is divided over stages by rows.

The microbatches that wait for the first stage, and those that are done, lie in slots, M / P on each
stage. The same slot of all stages is a ring, which turns by one towards the first stage when that
takes from it; the last stage puts its outputs in.

Legend: B batch, T tokens, D model width, P stages, R repeats, M microbatches, m = M / P slots of a
stage, b = B / M rows of a microbatch.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fornax.config.errors import ConfigError
from fornax.mesh import (
    Rules,
    axes_in_use,
    current_mesh,
    current_rules,
    dividing,
    partition_spec,
    shards,
    stage_axes,
    use_mesh,
)
from fornax.models.config import LayerKind
from fornax.models.context import LayerContext
from fornax.models.layers import DecoderLayer
from fornax.models.pipeline_config import PipelineConfig, layers_outside
from fornax.models.remat import Remat
from fornax.models.routing import Routing
from fornax.models.scan import run_stacks

__all__ = ["run_pipeline"]


def run_pipeline(
    layers: DecoderLayer,
    kinds: tuple[LayerKind, ...],
    x_BTD: jax.Array,
    context: LayerContext,
    *,
    pipeline: PipelineConfig,
    remat: str | Remat = "none",
    unroll: int | bool = 1,
) -> tuple[jax.Array, Routing | None]:
    """`run_layers` over the stages of the mesh in use; the same values up to rounding.

    Args are those of `run_layers`, and how the stages work. What routers did is summed over the
    microbatches.

    Raises:
      ConfigError: for layers or a batch that do not divide, with the numbers that do.
    """
    mesh, outer = current_mesh(), current_rules()
    if mesh is None:
        raise ValueError("a pipeline needs the mesh of `use_mesh`")
    along, repeats = stage_axes(outer), pipeline.repeats
    stages = shards(along)
    microbatches = pipeline.count(stages)
    outside = layers_outside(kinds, stages, pipeline, slices=shards(along[:-1]))
    split = {part: nnx.split(module) for part, module in layers.parts().items()}
    graphdefs = {part: graphdef for part, (graphdef, _) in split.items()}
    before, states = _cut({part: state for part, (_, state) in split.items()}, kinds[:outside])
    routings: list[Routing | None] = []
    if outside:
        x_BTD, routing = run_stacks(
            graphdefs, before, kinds[:outside], x_BTD, context, remat=remat, unroll=unroll
        )
        routings.append(routing)
    own_kinds = kinds[outside : outside + (len(kinds) - outside) // (stages * repeats)]
    with use_mesh(mesh, _inside(outer, along)):
        ring = _make_ring(mesh, outer, along, x_BTD, microbatches)
        stacks = _deal_layers(states, ring, repeats)
        arrays, tree = jax.tree.flatten((x_BTD, _arrays(context)))

        def run(stacks: Any, turn: jax.Array, items: list[jax.Array]) -> Any:
            x_bTD, own = jax.tree.unflatten(tree, items)
            return run_stacks(
                graphdefs,
                stacks,
                own_kinds,
                x_bTD,
                _with_arrays(context, own),
                remat=remat,
                unroll=unroll,
                turn=turn,
            )

        def tick(carry: Any, number: jax.Array) -> tuple[Any, Routing | None]:
            waiting, items = carry
            turn_P = jnp.clip((number - jnp.arange(stages)) // microbatches, 0, repeats - 1)
            x_PbTD, routing = jax.vmap(run, spmd_axis_name=along)(stacks, turn_P, items)
            return ring.advance(number, waiting, [x_PbTD, *items[1:]]), routing

        waiting = ring.deal(arrays)
        first = [array[:, 0] for array in waiting]
        numbers = jnp.arange(microbatches * repeats + stages - 1)
        (waiting, _), routing = jax.lax.scan(tick, (waiting, first), numbers)
        x_BTD = ring.collect(waiting[0])
        in_order = functools.partial(_of_layers, mesh, microbatches, repeats)
        routings.append(jax.tree.map(in_order, routing))
    found = [routing for routing in routings if routing is not None]
    return x_BTD, jax.tree.map(lambda *both: jnp.concatenate(both), *found) if found else None


def _cut(
    states: dict[str, Any], first: tuple[LayerKind, ...]
) -> tuple[dict[str, tuple[Any]], dict[str, Any]]:
    """The stacks of the first layers, as `run_stacks` takes them, and those of the others."""
    before, after = {}, {}
    for part, state in states.items():
        count, size = sum(part in kind.parts() for kind in first), len(jax.tree.leaves(state)[0])
        if count:
            before[part] = (jax.tree.map(lambda leaf, count=count: leaf[:count], state),)
        if count < size:
            after[part] = jax.tree.map(lambda leaf, count=count: leaf[count:], state)
    return before, after


def _inside(rules: Rules, along: tuple[str, ...]) -> Rules:
    """The rules within a stage."""
    return {name: tuple(a for a in axes if a not in along) for name, axes in rules.items()}


def _arrays(context: LayerContext) -> dict[str, Any]:
    """What of the context belongs to rows, and travels with their microbatch."""
    turns = {name: (turn.cos_BTr, turn.sin_BTr) for name, turn in context.rotations.items()}
    return {
        "positions": jnp.asarray(context.positions_BT),
        "segments": context.segment_ids_BT,
        "rotations": turns,
    }


def _with_arrays(context: LayerContext, arrays: dict[str, Any]) -> LayerContext:
    turns = {
        name: context.rotations[name]._replace(cos_BTr=cos, sin_BTr=sin)
        for name, (cos, sin) in arrays["rotations"].items()
    }
    return dataclasses.replace(
        context,
        positions_BT=arrays["positions"],
        segment_ids_BT=arrays["segments"],
        rotations=turns,
    )


def _of_layers(mesh: Mesh, microbatches: int, repeats: int, sums: jax.Array) -> jax.Array:
    """What each stage's layers counted at each tick [ticks, P, layers of a part, ...], summed over
    microbatches and in the order of layers [L, ...]; bubbles left out."""
    stages, rest = sums.shape[1], sums.shape[2:]
    whole = NamedSharding(mesh, PartitionSpec())
    sums = jax.lax.with_sharding_constraint(sums, whole)
    work = microbatches * repeats
    by_stage = [
        jnp.sum(sums[p : p + work, p].reshape(repeats, microbatches, *rest), axis=1)
        for p in range(stages)
    ]
    return jnp.stack(by_stage, axis=1).reshape(-1, *rest[1:])


def _deal_layers(states: dict[str, Any], ring: "_Ring", repeats: int) -> dict[str, tuple[Any, ...]]:
    """Each part's parameters [L, ...] as the stages have them: for each repeat [P, layers, ...].

    Stacks lie on the stages in the order of layers; for several repeats their parts are exchanged.
    Those whose layers do not divide lie otherwise, and are exchanged too.
    """
    leaves, tree = jax.tree.flatten(states)
    variables = jax.tree.leaves(states, is_leaf=lambda node: isinstance(node, nnx.Variable))
    specs = [
        partition_spec(variable.get_metadata()["axes"][1:], current_rules())
        for _, variable in zip(leaves, variables, strict=True)
    ]

    def deal(leaves: list[jax.Array]) -> list[list[jax.Array]]:
        return [_own_parts(leaf, ring, repeats) for leaf in leaves]

    dealt = jax.shard_map(
        deal,
        mesh=ring.mesh,
        in_specs=([PartitionSpec(ring.along, *spec) for spec in specs],),
        out_specs=[[PartitionSpec(ring.along, None, *spec)] * repeats for spec in specs],
    )(leaves)
    of_repeats = [jax.tree.unflatten(tree, [parts[r] for parts in dealt]) for r in range(repeats)]
    return {part: tuple(of_repeat[part] for of_repeat in of_repeats) for part in states}


def _own_parts(leaf: jax.Array, ring: "_Ring", repeats: int) -> list[jax.Array]:
    """From a stage's R consecutive parts [R layers, ...], all stages', to those that it runs.

    Each stage sends one part and receives one at a time, R times. Part n goes in round
    n + n // lcm(P, R) mod R: no two parts of one stage, from it or to it, share a round.
    """
    if repeats == 1:
        return [leaf[None]]
    stages, parts = ring.stages, leaf.reshape(repeats, -1, *leaf.shape[1:])
    stage, cycle = jax.lax.axis_index(ring.along), math.lcm(stages, repeats)
    received = []
    for number in range(repeats):
        sends = [(number - p * repeats // cycle) % repeats for p in range(stages)]
        pairs = [(p, (p * repeats + sends[p]) % stages) for p in range(stages)]
        part = jax.lax.dynamic_index_in_dim(parts, jnp.asarray(sends)[stage], keepdims=False)
        received.append(jax.lax.ppermute(part, ring.along, pairs))
    rounds = jnp.stack(received)
    wanted = [stage + r * stages for r in range(repeats)]
    return [jax.lax.dynamic_index_in_dim(rounds, (n + n // cycle) % repeats) for n in wanted]


@dataclass(frozen=True)
class _Ring:
    """Where microbatches lie and how they move; arrays are those of rows [B, T, ...]."""

    mesh: Mesh
    along: tuple[str, ...]
    """Axes of the mesh that the stages lie along."""
    stages: int
    slots: int
    """m, microbatches of each stage."""
    batch: tuple[str, ...]
    """Axes of the mesh that divide the batch, the stages among them."""
    length: tuple[str, ...]

    def deal(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The slots [P, m, b, T, ...] of a batch [B, T, ...]; no row leaves its device."""

        def local(arrays: list[jax.Array]) -> list[jax.Array]:
            shapes = [(self.slots, len(a) // self.slots, *a.shape[1:]) for a in arrays]
            return [a.reshape(1, *shape) for a, shape in zip(arrays, shapes, strict=True)]

        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=([self._whole(array) for array in arrays],),
            out_specs=[self._moving(array.ndim - 2, slots=True) for array in arrays],
        )(list(arrays))

    def advance(
        self, tick: jax.Array, waiting: list[jax.Array], made: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The slots and the stages' next inputs, after a tick.

        Args:
          tick: its number.
          waiting: slots [P, m, b, T, ...].
          made: what the stages made [P, b, T, ...].
        """

        def local(
            tick: jax.Array, waiting: list[jax.Array], made: list[jax.Array]
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            moved = [
                self._advance(tick, slots[0], new[0])
                for slots, new in zip(waiting, made, strict=True)
            ]
            return [slots[None] for slots, _ in moved], [taken[None] for _, taken in moved]

        specs = (
            [self._moving(array.ndim - 4, slots=True) for array in waiting],
            [self._moving(array.ndim - 3, slots=False) for array in made],
        )
        return jax.shard_map(
            local, mesh=self.mesh, in_specs=(PartitionSpec(), *specs), out_specs=specs
        )(tick, waiting, made)

    def _advance(
        self, tick: jax.Array, slots: jax.Array, new: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """`advance` on one stage: its slots [m, ...] and what it made [...]."""
        P, m, stage = self.stages, self.slots, jax.lax.axis_index(self.along)
        left = [(p, (p - 1) % P) for p in range(P)]
        turned = jax.lax.ppermute(_get(slots, tick % m), self.along, left)
        slots = _put(slots, tick % m, turned)
        # The slot that the microbatch was taken from has turned so often since.
        home = P - 1 - (P - 1) // m
        done, taken = tick - (P - 1), (tick - (P - 1)) % m
        back = new if home == P - 1 else jax.lax.ppermute(new, self.along, [(P - 1, home)])
        is_there = (stage == home) & (done >= 0)
        slots = _put(slots, taken, jnp.where(is_there, back, _get(slots, taken)))
        onward = jax.lax.ppermute(new, self.along, [(p, p + 1) for p in range(P - 1)])
        return slots, jnp.where(stage == 0, _get(slots, (tick + 1) % m), onward)

    def collect(self, slots: jax.Array) -> jax.Array:
        """The batch [B, T, ...] of the slots [P, m, b, T, ...] after the last tick."""

        def local(slots: jax.Array) -> jax.Array:
            P, found = self.stages, []
            for slot in range(self.slots):
                turns = (1 + (P - 2 - slot) // self.slots) % P
                pairs = [((p - turns) % P, p) for p in range(P)]
                part = slots[0, slot]
                found.append(jax.lax.ppermute(part, self.along, pairs) if turns else part)
            return jnp.concatenate(found)

        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=self._moving(slots.ndim - 4, slots=True),
            out_specs=self._whole(slots[0, 0]),
        )(slots)

    def _whole(self, array: jax.Array) -> PartitionSpec:
        return PartitionSpec(self.batch, self.length or None, *[None] * (array.ndim - 2))

    def _moving(self, trailing: int, *, slots: bool) -> PartitionSpec:
        """Of arrays [P, b, T, ...] or [P, m, b, T, ...] with this many trailing dimensions."""
        rows = tuple(axis for axis in self.batch if axis not in self.along)
        moving = (rows or None, self.length or None, *[None] * trailing)
        return PartitionSpec(self.along, *((None,) if slots else ()), *moving)


def _make_ring(
    mesh: Mesh, outer: Rules, along: tuple[str, ...], x_BTD: jax.Array, microbatches: int
) -> _Ring:
    """Where a batch is, by the rules within a stage (in use) and outside.

    Raises:
      ConfigError: for a batch that does not divide.
    """
    rows, shared, stages = x_BTD.shape[0], axes_in_use("batch"), shards(along)
    if rows % (microbatches * shards(shared)):
        over = f" over {shards(shared)} data shards" if shared else ""
        raise ConfigError(
            f"a batch of {rows} rows does not divide into {microbatches} microbatches{over} "
            f"(pipeline.microbatches, of {stages} stages); make batch_size / accumulate a multiple "
            f"of {microbatches * shards(shared)}, or change pipeline.microbatches"
        )
    batch = tuple(axis for axis in outer["batch"] if axis in (*along, *shared))
    return _Ring(
        mesh=mesh,
        along=along,
        stages=stages,
        slots=microbatches // stages,
        batch=(*(axis for axis in along if axis not in batch), *batch),
        length=dividing("length", x_BTD.shape[1]) or (),
    )


def _get(slots: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(slots, index, keepdims=False)


def _put(slots: jax.Array, index: jax.Array, value: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(slots, value, index, 0)
