"""Everything a run needs before its first step: mesh, model, optimizer, state, data, programs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from fornax import kernels, optim
from fornax.checkpoint import Checkpointer
from fornax.config.errors import ConfigError, ShardingError
from fornax.config.host_memory import trim_heap
from fornax.config.suggest import first_few
from fornax.mesh import (
    MeshConfig,
    Rules,
    fit_mesh,
    hosts,
    make_mesh,
    path_name,
    stage_axes,
    use_mesh,
)
from fornax.models import DecoderConfig, PipelineConfig, layers_outside
from fornax.train.compile_service import CompileService
from fornax.train.compiler_options import step_options
from fornax.train.config import TrainConfig, TrainerConfig
from fornax.train.diloco import OuterState
from fornax.train.goodput import Ledger
from fornax.train.hosts import abstract_batch, data_shards, find_hosts, padding_text, to_global
from fornax.train.memory_tier import MemoryTier, Remembered
from fornax.train.skip_list import NumberedBatches, SkipList
from fornax.train.state import (
    ModelParts,
    TrainState,
    abstract_frozen,
    abstract_state,
    as_tree,
    fresh_state,
    split_model,
)
from fornax.train.step import StepParts, make_eval_step, make_train_step
from fornax.train.task import Hosts, Task

__all__ = [
    "Programs",
    "Start",
    "first_state",
    "from_checkpoint",
    "from_scratch",
    "of_all_hosts",
    "prepare",
    "start",
]

Rows = dict[str, np.ndarray]


@dataclass(kw_only=True)
class Programs:
    """The functions of a run, each compiled when the first batch of some shapes comes."""

    parts: StepParts
    abstract: TrainState
    abstract_frozen: Any
    """What the parameters that are not trained look like."""
    hosts: Hosts
    ledger: Ledger
    notes: tuple[str, ...] = ()
    """What there is to say of the layout, a line each."""
    frozen: Any = field(default_factory=dict)
    """The parameters that are not trained; `start` puts them here."""
    compilations: int = 0
    """How many programs were compiled so far."""
    log: Callable[[str], None] = field(default=lambda text: None)
    """Shows a line of text: which implementation each kernel got, once."""
    told: Callable[[str, jax.stages.Compiled, object], None] | None = None
    """Told each program that a batch of new shapes needed, by name, with that abstract batch."""
    service: CompileService | None = None
    """Compiles for a group of processes, or has what it needs; None: each process by itself."""
    _said: set[kernels.Choice] = field(default_factory=set)
    _compiled: dict[Any, tuple[Any, Any]] = field(default_factory=dict)

    def step(self, state: TrainState, rows: Rows) -> tuple[TrainState, Any]:
        """Start one step on this host's rows; `state` is given up."""
        run, shapes = self._program("step", self.lower_step, rows)
        batch = to_global(rows, shapes)
        with self.ledger.program():
            results = run(state, batch, self.frozen)
        return self._tried(results)

    def evaluate(self, state: TrainState, rows: Rows) -> Any:
        """The sums of one evaluation batch."""
        run, shapes = self._program("evaluate", self.lower_evaluation, rows)
        return self._tried(run(state, to_global(rows, shapes), self.frozen))

    def compile(self, name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """The executable of a program that all processes have lowered."""
        return lowered.compile() if self.service is None else self.service.compile(name, lowered)

    def _tried(self, results: Any) -> Any:
        if self.service is not None:
            self.service.end_trials(results)
        return results

    def _program(
        self, name: str, lower: Callable[[object], jax.stages.Lowered], rows: Rows
    ) -> tuple[Any, Any]:
        """The compiled program for rows of these shapes, and their abstract global batch."""
        key = (name, *((k, x.shape, x.dtype) for k, x in sorted(rows.items())))
        if key not in self._compiled:
            with self.ledger.phase("compile"):
                self._check_rows(rows, micro=name == "step")
                shapes = self.shapes_of(rows)
                with kernels.recording_choices() as made:
                    lowered = lower(shapes)
                trim_heap()  # what the step's allocator keeps, while a compiler needs as much
                compiled = self.compile(name, lowered)
                trim_heap()  # what the compiler leaves, 0.7 GB for a U-Net on a CPU
                self._compiled[key] = (compiled, shapes)
                self.compilations += 1
                if self.told is not None:
                    self.told(name, compiled, shapes)
            for choice in made.keys() - self._said:
                self._said.add(choice)
                self.log(f"kernel {choice}")
        return self._compiled[key]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to tell before the first step, a line each."""
        parts = self.parts
        found = list(self.notes)
        whole = parts.optim.replicated(parts.param_shardings) if parts.mesh.size > 1 else {}
        if whole:
            size = sum(leaf.size * leaf.dtype.itemsize for leaf in whole.values())
            found.append(
                f"optimizer state that matches no parameter by path or shape: {len(whole)} arrays, "
                f"{size / 2**20:.1f} MiB, whole on every device (first: {next(iter(whole))})"
            )
        return tuple(found)

    def model(self, state: TrainState, *, averaged: bool = False) -> Any:
        """The model of a state; its arrays are the state's and the frozen ones themselves.

        `averaged` takes the parameters that evaluation does.
        """
        held = self.parts.model.holding(self.frozen)
        params = state.params
        if averaged:
            params = self.parts.optim.eval_params(params, state.optimizer)
        return held.merge(params, state.other, jax.random.key(0))

    def lower_step(self, batch: object) -> jax.stages.Lowered:
        """The training step, traced for an abstract global batch; the state is donated."""
        where = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        step = make_train_step(self.parts)
        jitted = jax.jit(
            step,
            donate_argnums=0,
            out_shardings=(where, None),
            compiler_options=step_options(self.parts.mesh),
        )
        return jitted.lower(self.abstract, batch, self.abstract_frozen)

    def lower_evaluation(self, batch: object) -> jax.stages.Lowered:
        """The evaluation step, traced for an abstract global batch."""
        jitted = jax.jit(make_eval_step(self.parts))
        return jitted.lower(self.abstract, batch, self.abstract_frozen)

    def shapes_of(self, rows: Mapping[str, object]) -> Any:
        """The global batch that this host's rows (or their shapes) are part of, abstract."""
        return abstract_batch(rows, self.hosts, self.parts.mesh, self.parts.rules)

    def _check_rows(self, rows: Rows, *, micro: bool) -> None:
        counts = {name: len(x) for name, x in rows.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(f"the arrays of a batch differ in rows: {counts}")
        total = next(iter(counts.values())) * self.hosts.count
        multiple = data_shards(self.parts.mesh.shape, self.parts.rules)
        multiple *= self.parts.accumulate if micro else 1
        if total % multiple:
            raise ShardingError(
                f"the task's batches have {total} rows over all hosts, and arrays of a batch need "
                f"a multiple of {multiple} (data shards x micro-batches); give each host the rows "
                "that `hosts.rows(batch_size)` names, then rows of weight 0 up to "
                "`hosts.size(batch_size)`"
            )


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins."""

    state: TrainState
    step: int
    """Steps already done."""
    total: float
    """Units (tokens) already seen."""
    batches: NumberedBatches
    window: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """What the detector of loss spikes remembers."""
    outer: OuterState | None = None
    """What the outer optimizer of DiLoCo remembers; None where a run begins."""
    saved: bool = True
    """Whether this very state is on disk, or is the first."""
    origin: dict[int, dict] = field(default_factory=dict)
    """The position of the stream at its beginning, of this host's virtual shards; empty where no
    rewind may need it."""
    source: str = ""
    """Where it comes from: `memory`, `local disk` or `checkpoint`; nothing where a run begins."""


def prepare(
    config: TrainerConfig,
    task: Task,
    ledger: Ledger,
    devices: Sequence[jax.Device] | None = None,
    *,
    slices: int = 1,
) -> Programs:
    """Lay out the model and the optimizer over the devices (all, if None); computes nothing yet.

    Args:
      config: the run.
      task: what is trained.
      ledger: told what time is spent on.
      devices: of the mesh.
      slices: of a DiLoCo run, which share its batches: this process belongs to one of them.

    Raises:
      ShardingError: when the model does not divide over the mesh.
      ConfigError: when the optimizer's rules do not fit the model.
    """
    built = nnx.eval_shape(lambda: task.build(nnx.Rngs(config.seed)))
    count = jax.device_count() if devices is None else len(devices)
    fitted = fit_mesh(config.mesh, nnx.state(built), count)
    mesh, rules = make_mesh(fitted, devices), fitted.resolved_rules()
    model = split_model(built, task.post.trained)
    _require_trained(model.params, task.post.trained)
    _require_rounded(model.params, task, mesh, rules)
    chain = optim.build(
        config.optim, total_steps=config.steps, params=model.params, optimizer=task.optimizer
    )
    abstract = abstract_state(_builder(config, task, chain), model, chain, mesh, rules)
    parts = StepParts(
        task=task,
        model=model,
        optim=chain,
        skip=config.skip,
        accumulate=config.accumulate,
        mesh=mesh,
        rules=rules,
        param_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract.params),
    )
    return Programs(
        parts=parts,
        abstract=abstract,
        abstract_frozen=abstract_frozen(model, mesh, rules),
        hosts=find_hosts(mesh, rules, config.accumulate),
        ledger=ledger,
        notes=_notes(config, fitted, task, data_shards(mesh.shape, rules), slices, mesh),
    )


def _notes(
    config: TrainerConfig, fitted: MeshConfig, task: Task, shards: int, slices: int, mesh: Mesh
) -> tuple[str, ...]:
    """What the layout costs, a line each."""
    found = []
    if fitted != config.mesh:
        found.append(
            f"the parameters do not divide over all devices that are left: mesh.fsdp is "
            f"{fitted.fsdp} and mesh.data {fitted.data}, each with a whole copy of them"
        )
    along = stage_axes(fitted.resolved_rules())
    stages, over = (math.prod(mesh.shape[axis] for axis in axes) for axes in (along, along[:-1]))
    if stages > 1 and isinstance(config, TrainConfig) and config.model is not None:
        found.append(_pipeline_text(config.pipeline, config.model, stages, over))
    if task.quantizer is not None:
        found.append(f"quantization-aware training: {task.quantizer}")
    # A stream of samples packs rows of its own.
    padding = padding_text(config.batch_size // slices, shards, config.accumulate)
    if padding and task.post.follow is None:
        found.append(padding)
    return tuple(found)


def _pipeline_text(pipeline: PipelineConfig, model: DecoderConfig, stages: int, slices: int) -> str:
    count = pipeline.count(stages)
    outside = layers_outside(model.layer_kinds(), stages, pipeline, slices=slices)
    across = f", {stages // slices} in each of {slices} slices," if slices > 1 else ""
    idle = (stages - 1) / (pipeline.repeats * count + stages - 1)
    first = f"; {outside} of {model.num_layers} layers run before it, on all devices" * (
        outside > 0
    )
    return (
        f"a pipeline of {stages} stages{across} for {count} microbatches, of whose time {idle:.0%} "
        f"is the bubble{first}"
    )


def _require_trained(params: nnx.State, trained: object) -> None:
    if not jax.tree.leaves(params):
        raise ConfigError(
            f"no parameter of the model matches what the task trains ({trained}); attach adapters, "
            "or train all of it"
        )


def _require_rounded(params: nnx.State, task: Task, mesh: Mesh, rules: Rules) -> None:
    """Refuse to round what is not trained, or rows of which a device has a part."""
    quantizer = task.quantizer
    if quantizer is None:
        return
    leaves = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(params))[0]
    trained = {path_name(path) for path, _ in leaves}
    if frozen := [path for path in quantizer.parameters if path not in trained]:
        raise ConfigError(
            f"quant.qat rounds {first_few(frozen)}, which this run does not train; train all "
            "parameters, or keep them with quant.rules"
        )
    parts = math.prod(mesh.shape[axis] for axis in rules["activation_mlp"])
    rows = [path for path in quantizer.rounds_inputs if path.endswith("experts/down/kernel")]
    if rows and parts > 1:
        raise ConfigError(
            f"quant.qat rounds the inputs of {first_few(rows)} by row, and the mesh divides rows "
            f"of experts over {parts} devices (mesh.tensor); set mesh.tensor to 1, or take a "
            "scheme of weights alone, such as w8a16"
        )


def _builder(config: TrainerConfig, task: Task, chain: optim.Built) -> Callable[[], TrainState]:
    def build() -> TrainState:
        model = task.build(nnx.Rngs(config.seed))
        return _state_of(model, task.post.trained, config, chain)

    return build


def _state_of(
    model: nnx.Module, trained: object, config: TrainerConfig, chain: optim.Built
) -> TrainState:
    parts = split_model(model, trained)
    return fresh_state(
        nnx.to_pure_dict(parts.params),
        nnx.to_pure_dict(parts.other),
        chain,
        config.skip,
        config.seed,
    )


def start(
    config: TrainerConfig,
    programs: Programs,
    checkpointer: Checkpointer,
    skip: SkipList | None = None,
    *,
    memory: MemoryTier | None = None,
    allow_data_changes: bool = False,
    outer: OuterState | None = None,
) -> Start:
    """The state, the data position and the counts to begin with: of the newest snapshot in memory
    or on their hosts' disks that all processes have, or of a checkpoint that is newer, else fresh.

    The stream passes over the batches of `skip` (None: of an empty list), to which those of the
    checkpoint are added. `outer` is what the state of the outer optimizer looks like, where a
    checkpoint has one.
    """
    task, spikes = programs.parts.task, config.spikes
    inner = task.batches("train", programs.hosts)
    origin = {} if spikes is None else inner.state()
    drill = None if spikes is None else spikes.drill
    batches = NumberedBatches(inner, skip or SkipList(), task.left_out, drill)
    step = checkpointer.resume_step()
    held = None if memory is None else _remembered(memory, programs, batches.skip)
    if memory is not None and held is not None and held.step >= (step or 0):
        with programs.ledger.phase("restore"):
            begun = _from_memory(programs, memory, held, batches)
            programs.frozen = _first_frozen(config, programs)
            return replace(begun, origin=origin)
    if step is None:
        with programs.ledger.phase("initialise"):
            return from_scratch(config, programs, batches, origin)
    with programs.ledger.phase("restore"):
        begun = from_checkpoint(
            programs,
            checkpointer,
            batches,
            step,
            allow_data_changes=allow_data_changes,
            outer=outer,
        )
        programs.frozen = _first_frozen(config, programs)
        return replace(begun, origin=origin)


def from_scratch(
    config: TrainerConfig, programs: Programs, batches: NumberedBatches, origin: dict[int, dict]
) -> Start:
    """Before the first step; `batches` is at its beginning."""
    state = first_state(config, programs)
    return Start(state=state, step=0, total=0.0, batches=batches, origin=origin)


def from_checkpoint(
    programs: Programs,
    checkpointer: Checkpointer,
    batches: NumberedBatches,
    step: int,
    *,
    allow_data_changes: bool = False,
    outer: OuterState | None = None,
) -> Start:
    """After a complete step; moves `batches` there."""
    wanted = as_tree(programs.abstract) | ({} if outer is None else {"outer": outer})
    restored = checkpointer.restore(wanted, step)
    found = restored.state.pop("outer", None)
    metadata = restored.metadata
    batches.skip.batches.update(metadata.get("skipped_batches", ()))
    batches.restore(
        restored.data, metadata.get("batches", restored.step), allow_changes=allow_data_changes
    )
    return Start(
        state=TrainState(**restored.state),
        step=restored.step,
        total=metadata["total"],
        batches=batches,
        window=metadata.get("spikes", {}),
        outer=found,
        source="checkpoint",
    )


def _remembered(memory: MemoryTier, programs: Programs, skip: SkipList) -> Remembered | None:
    """The newest snapshot that was not trained on a batch of the skip list."""
    found = memory.newest(programs.abstract, skip.contradicts).values()
    return max(
        (each for each in found if not skip.contradicts(each.metadata)),
        key=lambda each: each.step,
        default=None,
    )


def _from_memory(
    programs: Programs, memory: MemoryTier, held: Remembered, batches: NumberedBatches
) -> Start:
    metadata = held.metadata
    batches.skip.batches.update(metadata["skipped_batches"])
    batches.restore(of_all_hosts(dict(held.data)), metadata["batches"])
    return Start(
        state=memory.restore(held.step, programs.abstract),
        step=held.step,
        total=metadata["total"],
        batches=batches,
        window=metadata.get("spikes", {}),
        saved=False,
        source=held.tier,
    )


def of_all_hosts(data: Mapping[int, dict]) -> dict[int, Any]:
    """The parts of a position of all processes."""
    said = hosts.gather(sorted(data.items()))
    return {int(shard): part for mine in said for shard, part in mine}


def first_state(config: TrainerConfig, programs: Programs) -> TrainState:
    """The state of a run that has no checkpoint, each array made where it will lie.

    The frozen parameters, where there are any, are put into `programs`.
    """
    parts = programs.parts
    shardings = jax.tree.map(lambda leaf: leaf.sharding, programs.abstract)
    if parts.task.pretrained is None:
        programs.frozen = _first_frozen(config, programs)
        build = _builder(config, parts.task, parts.optim)
        with use_mesh(parts.mesh, parts.rules):
            lowered = jax.jit(build, out_shardings=shardings).lower()
            return programs.compile("initial state", lowered)()
    model = _pretrained(programs)
    programs.frozen = _laid_out(model.frozen, programs)
    with use_mesh(parts.mesh, parts.rules):
        return jax.jit(
            lambda params, other: fresh_state(params, other, parts.optim, config.skip, config.seed),
            out_shardings=shardings,
        )(nnx.to_pure_dict(model.params), nnx.to_pure_dict(model.other))


def _first_frozen(config: TrainerConfig, programs: Programs) -> object:
    """The frozen parameters where they first come from, laid out on the mesh."""
    parts, wanted = programs.parts, programs.abstract_frozen
    task = parts.task
    if not jax.tree.leaves(wanted):
        return wanted
    if task.pretrained is not None:
        return _laid_out(_pretrained(programs).frozen, programs)

    def build() -> Any:
        model = task.build(nnx.Rngs(config.seed))
        return nnx.to_pure_dict(split_model(model, task.post.trained).frozen)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    with use_mesh(parts.mesh, parts.rules):
        return jax.jit(build, out_shardings=shardings)()


def _pretrained(programs: Programs) -> ModelParts:
    parts = programs.parts
    assert parts.task.pretrained is not None
    with use_mesh(parts.mesh, parts.rules):
        return split_model(parts.task.pretrained(parts.mesh, parts.rules), parts.task.post.trained)


def _laid_out(frozen: nnx.State, programs: Programs) -> object:
    """Arrays where they are needed; those that are there already are not copied."""
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, spec.sharding),
        nnx.to_pure_dict(frozen),
        programs.abstract_frozen,
    )
