"""The facts of a step whose model closed forms do not know: from its trace, and its mesh.

Of a trace everything is counted, recomputation as the remat policy has it. The trace is of the rows
of one device at their whole length; where `context` divides the length each device does its part.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fornax import kernels, optim
from fornax.config.errors import ConfigError
from fornax.kernels.registry import Choice
from fornax.mesh import Rules, check_use, fit_mesh, path_name, safe_rules
from fornax.optim.tree import flatten
from fornax.plan.closed_form.state import StateArray, divided_arrays
from fornax.plan.closed_form.work import elementwise_update
from fornax.plan.facts import Exchange, Memory, MemoryPart, StepFacts, Work
from fornax.plan.topology import Topology
from fornax.plan.traced.jaxpr import Traced, walk
from fornax.train import TrainerConfig
from fornax.train.hosts import data_shards, padding_text
from fornax.train.state import ModelParts, split_model
from fornax.train.task import Hosts, Task

__all__ = ["Sampled", "TracedStep", "forward_facts", "held_bytes", "train_facts"]

_CODE = 40 * 2**20
"""Bytes of a program for TPUs; scanned blocks make it about the same for all."""
_GAPS = 0.015
"""Share of the temporaries that compilers leave unused between them."""
Shapes = Mapping[str, Any]
"""Arrays of a batch by name, with shape and dtype: the rows of the whole step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step on a topology, traced."""

    facts: StepFacts
    parameters: int
    """Of the model, frozen ones included."""
    model_flops: float
    """Of a step over all chips, without what is computed again; of a forward pass its own."""
    kernels: tuple[Choice, ...]
    """Which implementation each kernel call gets on these chips."""
    mesh: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
    """What a sampler runs at each step."""

    run: Any
    """(model, batch) to the network's output, under guidance where there is any."""
    batch: Shapes


@dataclasses.dataclass(frozen=True)
class _Local:
    """A model and a mesh from one device's point of view."""

    config: TrainerConfig
    topology: Topology
    model: Any
    """Abstract."""
    trained: Any
    sizes: Mapping[str, int]
    rules: Rules

    def group(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    @property
    def context(self) -> int:
        return self.group(self.rules["length"])

    def rows(self, count: int, accumulate: int) -> int:
        """Rows of a micro-batch on one device."""
        shards = data_shards(self.sizes, self.rules)
        return Hosts(multiple=shards * accumulate).padded(count) // accumulate // shards

    @functools.cached_property
    def logical(self) -> Mapping[str, tuple[str | None, ...]]:
        """Logical axes of each parameter's dimensions."""
        leaves = jax.tree_util.tree_flatten_with_path(
            nnx.state(self.model, nnx.Param), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
        )[0]
        return {path_name(path): leaf.get_metadata()["axes"] for path, leaf in leaves}

    @functools.cached_property
    def arrays(self) -> tuple[tuple[StateArray, ...], tuple[StateArray, ...]]:
        """What is trained with its optimizer's state, and what is frozen."""
        parts = split_model(self.model, self.trained)
        built = optim.build(self.config.optim, total_steps=self.config.steps, params=parts.params)
        state = jax.eval_shape(built.init, nnx.to_pure_dict(parts.params))
        tpu = self.topology.chip.platform == "tpu"
        place = functools.partial(divided_arrays, built=built)
        sizes = tuple(self.sizes.values())
        own = place(parts.params, optimizer=state, sizes=sizes, rules=self.rules, tpu=tpu)
        if not jax.tree.leaves(parts.frozen):
            return own, ()
        frozen = place(parts.frozen, optimizer={}, sizes=sizes, rules=self.rules, tpu=tpu)
        return own, frozen


def _local(config: TrainerConfig, task: Task, topology: Topology, use: str) -> _Local:
    model = nnx.eval_shape(lambda: task.build(nnx.Rngs(0)))
    mesh = fit_mesh(config.mesh, nnx.state(model, nnx.Param), topology.num_devices)
    sizes = mesh.resolved_sizes(topology.num_devices)
    check_use(mesh, use)
    if topology.chip.platform == "tpu" and sizes["slice"] != topology.slices:
        raise ConfigError(
            f"mesh.slice={sizes['slice']} and {topology.name} has {topology.slices} slices; set "
            f"mesh.slice to {topology.slices}"
        )
    rules = safe_rules(sizes, mesh.resolved_rules())
    return _Local(config, topology, model, task.post.trained, sizes, rules)


def train_facts(
    config: TrainerConfig,
    task: Task,
    batch: Shapes,
    topology: Topology,
    *,
    use: str = "plan diffusion",
    plain: Task | None = None,
) -> TracedStep:
    """A training step.

    Args:
      config: mesh, optimizer, dtypes, rows and micro-batches.
      task: its model, its loss, and what it measures before.
      batch: the rows of the whole step.
      topology: the chips.
      use: what is planned, of `fornax.mesh.capabilities.USES`.
      plain: the same task, whose loss computes nothing again: its FLOPs are the model's. None takes
        three times the forward pass, which is so where all that is multiplied is trained.

    Raises:
      ConfigError: a mesh axis whose exchanges are not known here.
      ShardingError: what does not divide over the mesh.
    """
    local = _local(config, task, topology, use)
    rows = local.rows(config.batch_size, config.accumulate)
    parts = split_model(local.model, local.trained)
    own, frozen = local.arrays
    arguments = tuple(map(nnx.to_pure_dict, (parts.params, parts.frozen, parts.other)))
    part = {name: _with_rows(x, rows) for name, x in batch.items()}
    scale = _shares(arguments[:2], own, frozen)
    choices: dict[Any, Choice] = {}

    def traced(task: Task, *, gradients: bool = True) -> Traced:
        run = _step_of(task, parts, gradients=gradients)
        return _traced(run, (*arguments, part), scale, config, topology, choices)

    forward, whole = traced(task, gradients=False), traced(task)
    once = 3 * forward.flops if plain is None else traced(plain).flops
    count = 4 * sum(math.prod(a.shape) for a in own if a.owner == "parameters")
    accumulate, devices = config.accumulate, topology.chip.devices
    work = [dataclasses.replace(w, count=w.count * accumulate) for w in whole.work]
    shards = data_shards(local.sizes, local.rules)
    model_flops = once * accumulate * shards
    padding = padding_text(config.batch_size, shards, accumulate)
    facts = StepFacts(
        memory=_memory(local, whole, count, _bytes_of(part) * accumulate),
        work=(*_divided(work, local.context), *elementwise_update(own, accumulate)),
        exchanges=tuple(_exchanges(local, (*own, *frozen), forward, whole, accumulate)),
        dtype=config.dtypes.compute,
        mesh=local.sizes,
        repeated_flops=max(0.0, whole.flops - once) * (accumulate * devices / local.context),
        notes=(*((padding,) if padding else ()), *_notes(choices.values())),
    )
    return TracedStep(
        facts=facts,
        parameters=_parameters(local.model),
        model_flops=model_flops,
        kernels=tuple(dict.fromkeys(choices.values())),
        mesh=local.sizes,
    )


def _step_of(task: Task, parts: ModelParts, *, gradients: bool) -> Callable[..., Any]:
    """(trained, frozen, other, batch) to the loss, with its gradients or alone."""

    def merged(params: Any, frozen: Any, other: Any) -> Any:
        return parts.holding(frozen).merge(params, other, jax.random.key(0))

    def loss(params: Any, frozen: Any, other: Any, batch: Any) -> jax.Array:
        return task.loss(merged(params, frozen, other), batch, jax.random.key(0)).total

    def run(params: Any, frozen: Any, other: Any, batch: Any) -> Any:
        if task.post.measure is not None:
            means = task.post.measure(merged(params, frozen, other), batch)
            given = {f"measured/{name}": total / weight for name, (total, weight) in means.items()}
            batch = {**batch, **given}
        found = jax.value_and_grad(loss) if gradients else loss
        return found(params, frozen, other, batch)

    return run


def forward_facts(
    config: TrainerConfig,
    task: Task,
    sampled: Sampled,
    topology: Topology,
    *,
    use: str = "plan diffusion",
    training: bool = False,
) -> TracedStep:
    """One evaluation of the network without gradients.

    Arguments and errors as of `train_facts`; the rows are those of `sampled.batch`. The weights are
    in the compute dtype, as a sampler has them; with `training` the trainer's own, with the
    optimizer's state beside them.
    """
    local = _local(config, task, topology, use)
    count = next(iter(sampled.batch.values())).shape[0]
    rows = local.rows(count, 1)
    graphdef, params, other = nnx.split(local.model, nnx.Param, ...)
    compute = config.dtypes.compute_dtype

    def run(params: Any, other: Any, batch: Any) -> Any:
        return sampled.run(nnx.merge(graphdef, params, other), batch)

    weights = nnx.to_pure_dict(params)
    arguments = (weights if training else _cast(weights, compute), nnx.to_pure_dict(other))
    part = {name: _with_rows(x, rows) for name, x in sampled.batch.items()}
    own, frozen = local.arrays
    everything = [a for a in (*own, *frozen) if a.owner == "parameters"]
    held = {
        a.name: a.bytes if training else math.prod(a.shape) * compute.itemsize for a in everything
    }
    state = sum(a.bytes for a in own if a.owner == "optimizer") if training else 0
    leaves = flatten(arguments[0])
    scale = {
        number: held[name] / max(1, _bytes_of({name: leaf}))
        for number, (name, leaf) in enumerate(leaves.items())
    }
    choices: dict[Any, Choice] = {}
    found = _traced(run, (*arguments, part), scale, config, topology, choices)
    devices = topology.chip.devices
    sizes = {
        "parameters": sum(held.values()),
        "optimizer": state,
        "activations": found.peak_bytes / local.context,
        "batch": _bytes_of(part),
        "other": _code(topology) + _GAPS * found.peak_bytes,
    }
    facts = StepFacts(
        memory=Memory(
            parts=tuple(MemoryPart(owner=o, bytes=round(s) * devices) for o, s in sizes.items()),
            usable=int(topology.chip.usable_bytes),
        ),
        work=tuple(_divided(found.work, local.context)),
        exchanges=tuple(_exchanges(local, everything, found, None, 1)),
        dtype=config.dtypes.compute,
        mesh=local.sizes,
        repeated_flops=0.0,
        notes=_notes(choices.values()),
    )
    return TracedStep(
        facts=facts,
        parameters=_parameters(local.model),
        model_flops=found.flops * data_shards(local.sizes, local.rules),
        kernels=tuple(dict.fromkeys(choices.values())),
        mesh=local.sizes,
    )


def held_bytes(config: TrainerConfig, task: Task, topology: Topology, *, use: str) -> int:
    """Bytes of a chip that the parameters of a task's model take, in their own dtype; arguments and
    errors as of `train_facts`."""
    own, frozen = _local(config, task, topology, use).arrays
    held = sum(array.bytes for array in (*own, *frozen) if array.owner == "parameters")
    return held * topology.chip.devices


def _traced(
    function: Any,
    arguments: tuple[Any, ...],
    scale: Mapping[int, float],
    config: TrainerConfig,
    topology: Topology,
    choices: dict[Any, Choice],
) -> Traced:
    """The program as TPUs would run it, whose kernels a trace shows; `choices` gets those of the
    topology's own platform."""
    with kernels.target_platform("tpu"), kernels.recording_calls() as calls:
        closed = jax.make_jaxpr(function)(*arguments)
    platform = topology.chip.platform
    for (name, call), choice in calls.items():
        if platform == "tpu":
            choices[name, call] = choice
        elif name == "attention":
            there = dataclasses.replace(call, platform=platform)
            choices[name, call] = kernels.attention_operation.choice(there)
    return walk(closed, scale=scale, dtype=config.dtypes.compute)


def _shares(
    trees: tuple[Any, ...], own: tuple[StateArray, ...], frozen: tuple[StateArray, ...]
) -> dict[int, float]:
    """Of each parameter, by its place among the arguments, the share that one device holds."""
    held = {a.name: math.prod(a.shape) for a in (*own, *frozen) if a.owner == "parameters"}
    found, number = {}, 0
    for tree in trees:
        for name, leaf in flatten(tree).items():
            found[number] = held[name] / max(1, math.prod(leaf.shape))
            number += 1
    return found


def _with_rows(array: Any, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype)


def _cast(tree: Any, dtype: Any) -> Any:
    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        wide = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(leaf.shape, dtype if wide else leaf.dtype)

    return jax.tree.map(one, tree)


def _bytes_of(batch: Shapes) -> float:
    return float(sum(math.prod(x.shape) * x.dtype.itemsize for x in batch.values()))


def _parameters(model: Any) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def _code(topology: Topology) -> int:
    return _CODE if topology.chip.platform == "tpu" else 0


def _divided(work: Iterable[Work], context: int) -> Iterator[Work]:
    """Each device's part where the length is divided: of products it has all weights."""
    for one in work:
        if context == 1:
            yield one
            continue
        weights = 0.0
        if one.kind == "products" and one.sides is not None:
            weights = min(one.bytes, 2.0 * one.sides[1] * one.sides[2])
        yield dataclasses.replace(
            one, flops=one.flops / context, bytes=weights + (one.bytes - weights) / context
        )


def _memory(local: _Local, whole: Traced, gradients: float, batch: float) -> Memory:
    own, frozen = local.arrays
    held = {
        owner: sum(a.bytes for a in (*own, *frozen) if a.owner == owner)
        for owner in ("parameters", "optimizer")
    }
    sums = gradients if local.config.accumulate > 1 else 0.0
    alive = max(0.0, whole.peak_bytes - gradients) / local.context
    sizes = {
        **held,
        "gradients": gradients + sums,
        "activations": alive,
        "temporaries": _gathered(local, (*own, *frozen)),
        "batch": batch / local.context,
        "other": _code(local.topology) + _GAPS * alive,
    }
    devices = local.topology.chip.devices
    return Memory(
        parts=tuple(MemoryPart(owner=o, bytes=round(s) * devices) for o, s in sizes.items()),
        usable=int(local.topology.chip.usable_bytes),
    )


def _gathered(local: _Local, arrays: Iterable[StateArray]) -> float:
    """Bytes of weights put together for their products, twice the largest, and as gradients."""
    item = local.config.dtypes.compute_dtype.itemsize
    sizes = [
        math.prod(array.shape) * local.group(_axes(array)) / _layers(local, array)
        for array in arrays
        if array.owner == "parameters" and local.group(_axes(array)) > 1
    ]
    return 4.0 * item * max(sizes, default=0.0)


def _axes(array: StateArray) -> tuple[str, ...]:
    return tuple(axis for dim in array.axes for axis in dim)


def _layers(local: _Local, array: StateArray) -> int:
    """Blocks of a stack of equal ones, which are gathered one after the other."""
    axes = local.logical.get(array.name, ())
    return array.shape[0] if axes[:1] == ("layers",) else 1


def _exchanges(
    local: _Local,
    arrays: Iterable[StateArray],
    forward: Traced,
    whole: Traced | None,
    accumulate: int,
) -> Iterator[Exchange]:
    """Weights gathered and gradients reduced, block by block; keys and values where the length is
    divided."""
    item = local.config.dtypes.compute_dtype.itemsize
    trained = {a.name for a in local.arrays[0]} if whole is not None else set()
    adding = (*local.rules["batch"], *local.rules["length"])
    adding = tuple(axis for axis in adding if local.sizes[axis] > 1)
    sums: Counter[tuple[tuple[str, ...], int, bool]] = Counter()
    for array in arrays:
        if array.owner == "parameters":
            key = (_axes(array), _layers(local, array), array.name in trained)
            sums[key] += math.prod(array.shape) // _layers(local, array)
    for (axes, layers, learns), held in sums.items():
        size = held * local.group(axes) * item
        count = layers * accumulate
        if axes:
            times = 2 if whole is not None else 1
            yield Exchange(
                name="gather weights", kind="all-gather", axes=axes, bytes=size, count=count * times
            )
        if learns and axes:
            yield Exchange(
                name="reduce gradients", kind="reduce-scatter", axes=axes, bytes=size, count=count
            )
        rest = tuple(axis for axis in adding if axis not in axes)
        if learns and rest:
            yield Exchange(
                name="add up gradients over replicas",
                kind="all-reduce",
                axes=rest,
                bytes=held * item,
                count=count,
            )
    if local.context > 1:
        yield from _keys(local, forward, whole, accumulate)


def _keys(
    local: _Local, forward: Traced, whole: Traced | None, accumulate: int
) -> Iterator[Exchange]:
    """Keys and values of all tokens, forward, and again with what is computed again; their
    gradients back."""
    axes = local.rules["length"]
    gathers = Counter(forward.keys if whole is None else whole.keys)
    for size, count in gathers.items():
        yield Exchange(
            name="gather keys and values",
            kind="all-gather",
            axes=axes,
            bytes=int(size),
            count=round(count * accumulate),
            blocking=True,
        )
    for size, count in Counter(forward.keys if whole is not None else {}).items():
        yield Exchange(
            name="reduce gradients of keys and values",
            kind="reduce-scatter",
            axes=axes,
            bytes=int(size),
            count=round(count * accumulate),
            blocking=True,
        )


def _notes(choices: Iterable[Choice]) -> tuple[str, ...]:
    notes = [
        "work, traffic and memory are read from the traced step: elementwise work counts as fused "
        "into what uses it",
    ]
    if any(
        c.operation == "attention" and c.implementation in ("blockwise", "xla") for c in choices
    ):
        notes.append(
            "some attention runs as plain XLA operations here, which pass scores through memory"
        )
    return tuple(notes)
