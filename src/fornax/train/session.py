"""Everything a run needs before its first step: mesh, model, optimizer, state, data, programs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx

from fornax import kernels, optim
from fornax.checkpoint import Checkpointer
from fornax.config.errors import ConfigError
from fornax.mesh import make_mesh, use_mesh
from fornax.train.config import TrainerConfig
from fornax.train.goodput import Ledger
from fornax.train.hosts import abstract_batch, check_rows, find_hosts, to_global
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
from fornax.train.task import Batches, Hosts, Task

__all__ = ["Programs", "Start", "first_state", "prepare", "start"]

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
    frozen: Any = field(default_factory=dict)
    """The parameters that are not trained; `start` puts them here."""
    compilations: int = 0
    """How many programs were compiled so far."""
    say: Callable[[str], None] = field(default=lambda text: None)
    """Shows a line of text: which implementation each kernel got, once."""
    _said: set[kernels.Choice] = field(default_factory=set)
    _compiled: dict[Any, tuple[Any, Any]] = field(default_factory=dict)

    def step(self, state: TrainState, rows: Rows) -> tuple[TrainState, Any]:
        """Start one step on this host's rows; `state` is given up."""
        run, shapes = self._program("step", self.lower_step, rows)
        return run(state, to_global(rows, shapes), self.frozen)

    def evaluate(self, state: TrainState, rows: Rows) -> Any:
        """The sums of one evaluation batch."""
        run, shapes = self._program("evaluate", self.lower_evaluation, rows)
        return run(state, to_global(rows, shapes), self.frozen)

    def _program(
        self, name: str, lower: Callable[[Any], jax.stages.Lowered], rows: Rows
    ) -> tuple[Any, Any]:
        """The compiled program for rows of these shapes, and their abstract global batch."""
        key = (name, *((k, x.shape, x.dtype) for k, x in sorted(rows.items())))
        if key not in self._compiled:
            with self.ledger.phase("compile"):
                shapes = self.shapes_of(rows)
                _check_shapes(shapes, self.parts, micro=name == "step")
                with kernels.recording_choices() as made:
                    lowered = lower(shapes)
                self._compiled[key] = (lowered.compile(), shapes)
                self.compilations += 1
            for choice in made.keys() - self._said:
                self._said.add(choice)
                self.say(f"kernel {choice}")
        return self._compiled[key]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to tell before the first step, a line each."""
        parts = self.parts
        if parts.mesh.size == 1:
            return ()
        whole = parts.optim.replicated(parts.param_shardings)
        if not whole:
            return ()
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in whole.values())
        return (
            f"optimizer state that matches no parameter by path or shape: {len(whole)} arrays, "
            f"{size / 2**20:.1f} MiB, whole on every device (first: {next(iter(whole))})",
        )

    def model(self, state: TrainState) -> Any:
        """The model of a state; its arrays are the state's and the frozen ones themselves."""
        held = self.parts.model.holding(self.frozen)
        return held.merge(state.params, state.other, jax.random.key(0))

    def lower_step(self, batch: Any) -> jax.stages.Lowered:
        """The training step, traced for an abstract global batch; the state is donated."""
        where = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        step = make_train_step(self.parts)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(where, None))
        return jitted.lower(self.abstract, batch, self.abstract_frozen)

    def lower_evaluation(self, batch: Any) -> jax.stages.Lowered:
        """The evaluation step, traced for an abstract global batch."""
        jitted = jax.jit(make_eval_step(self.parts))
        return jitted.lower(self.abstract, batch, self.abstract_frozen)

    def shapes_of(self, rows: Mapping[str, Any]) -> Any:
        """The global batch that this host's rows (or their shapes) are part of, abstract."""
        return abstract_batch(rows, self.hosts, self.parts.mesh, self.parts.rules)


def _check_shapes(
    shapes: Mapping[str, jax.ShapeDtypeStruct], parts: StepParts, *, micro: bool
) -> None:
    counts = {name: spec.shape[0] for name, spec in shapes.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"the arrays of a batch differ in rows: {counts}")
    rows = next(iter(counts.values()))
    check_rows(rows, parts.accumulate if micro else 1, parts.mesh, parts.rules)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins."""

    state: TrainState
    step: int
    """Steps already done."""
    total: float
    """Units (tokens) already seen."""
    batches: Batches


def prepare(
    config: TrainerConfig,
    task: Task,
    ledger: Ledger,
    devices: Sequence[jax.Device] | None = None,
) -> Programs:
    """Lay out the model and the optimizer over the devices (all, if None); computes nothing yet.

    Raises:
      ShardingError: when model or batch do not divide over the mesh.
      ConfigError: when the optimizer's rules do not fit the model.
    """
    mesh, rules = make_mesh(config.mesh, devices), config.mesh.resolved_rules()
    check_rows(config.batch_size, config.accumulate, mesh, rules)
    built = nnx.eval_shape(lambda: task.build(nnx.Rngs(config.seed)))
    model = split_model(built, task.trained)
    _require_trained(model.params, task.trained)
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
    hosts = find_hosts(config.batch_size, mesh, rules)
    return Programs(
        parts=parts,
        abstract=abstract,
        abstract_frozen=abstract_frozen(model, mesh, rules),
        hosts=hosts,
        ledger=ledger,
    )


def _require_trained(params: nnx.State, trained: Any) -> None:
    if not jax.tree.leaves(params):
        raise ConfigError(
            f"no parameter of the model matches what the task trains ({trained}); attach adapters, "
            "or train all of it"
        )


def _builder(config: TrainerConfig, task: Task, chain: optim.Built) -> Callable[[], TrainState]:
    def build() -> TrainState:
        model = task.build(nnx.Rngs(config.seed))
        return _state_of(model, task.trained, config, chain)

    return build


def _state_of(
    model: nnx.Module, trained: Any, config: TrainerConfig, chain: optim.Built
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
    *,
    allow_data_changes: bool = False,
) -> Start:
    """The state, the data position and the counts to begin with: a checkpoint's, else fresh."""
    batches = programs.parts.task.batches("train", programs.hosts)
    step = checkpointer.resume_step()
    if step is None:
        with programs.ledger.phase("initialise"):
            state = first_state(config, programs)
            return Start(state=state, step=0, total=0.0, batches=batches)
    with programs.ledger.phase("restore"):
        restored = checkpointer.restore(as_tree(programs.abstract), step)
        batches.restore(restored.data, allow_changes=allow_data_changes)
        programs.frozen = _first_frozen(config, programs)
    return Start(
        state=TrainState(**restored.state),
        step=restored.step,
        total=restored.metadata["total"],
        batches=batches,
    )


def first_state(config: TrainerConfig, programs: Programs) -> TrainState:
    """The state of a run that has no checkpoint, each array made where it will lie.

    The frozen parameters, where there are any, are put into `programs`.
    """
    parts = programs.parts
    shardings = jax.tree.map(lambda leaf: leaf.sharding, programs.abstract)
    if parts.task.pretrained is None:
        programs.frozen = _first_frozen(config, programs)
        with use_mesh(parts.mesh, parts.rules):
            return jax.jit(_builder(config, parts.task, parts.optim), out_shardings=shardings)()
    model = _pretrained(programs)
    programs.frozen = _laid_out(model.frozen, programs)
    with use_mesh(parts.mesh, parts.rules):
        return jax.jit(
            lambda params, other: fresh_state(params, other, parts.optim, config.skip, config.seed),
            out_shardings=shardings,
        )(nnx.to_pure_dict(model.params), nnx.to_pure_dict(model.other))


def _first_frozen(config: TrainerConfig, programs: Programs) -> Any:
    """The frozen parameters where they first come from, laid out on the mesh."""
    parts, wanted = programs.parts, programs.abstract_frozen
    task = parts.task
    if not jax.tree.leaves(wanted):
        return wanted
    if task.pretrained is not None:
        return _laid_out(_pretrained(programs).frozen, programs)

    def build() -> Any:
        model = task.build(nnx.Rngs(config.seed))
        return nnx.to_pure_dict(split_model(model, task.trained).frozen)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    with use_mesh(parts.mesh, parts.rules):
        return jax.jit(build, out_shardings=shardings)()


def _pretrained(programs: Programs) -> ModelParts:
    parts = programs.parts
    assert parts.task.pretrained is not None
    with use_mesh(parts.mesh, parts.rules):
        return split_model(parts.task.pretrained(parts.mesh, parts.rules), parts.task.trained)


def _laid_out(frozen: nnx.State, programs: Programs) -> Any:
    """Arrays where they shall lie; those that lie there already are not copied."""
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, spec.sharding),
        nnx.to_pure_dict(frozen),
        programs.abstract_frozen,
    )
