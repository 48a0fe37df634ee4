"""Everything a run needs before its first step: mesh, model, optimizer, state, data, programs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from fornax import optim
from fornax.checkpoint import Checkpointer
from fornax.mesh import make_mesh, use_mesh
from fornax.train.config import TrainerConfig
from fornax.train.goodput import Ledger
from fornax.train.hosts import abstract_batch, check_rows, find_hosts, to_global
from fornax.train.state import TrainState, abstract_state, as_tree, fresh_state, split_model
from fornax.train.step import StepParts, make_eval_step, make_train_step
from fornax.train.task import Batches, Hosts, Task

__all__ = ["Programs", "Start", "first_state", "prepare", "start"]

Rows = dict[str, np.ndarray]


@dataclass(kw_only=True)
class Programs:
    """The compiled functions of a run; each is compiled when the first batch shows its shapes."""

    parts: StepParts
    abstract: TrainState
    hosts: Hosts
    ledger: Ledger
    compiled: Any = None
    """The compiled training step: (state, global batch) to (state, metrics)."""
    _evaluate: Any = None
    _shapes: Any = None
    _eval_shapes: Any = None

    def step(self, state: TrainState, rows: Rows) -> tuple[TrainState, Any]:
        """Start one step on this host's rows; `state` is given up."""
        if self.compiled is None:
            with self.ledger.phase("compile"):
                self._shapes = self.shapes_of(rows)
                self.compiled = self.lower_step(self._shapes).compile()
        return self.compiled(state, to_global(rows, self._shapes))

    def evaluate(self, state: TrainState, rows: Rows) -> Any:
        """The sums of one evaluation batch."""
        if self._evaluate is None:
            with self.ledger.phase("compile"):
                self._eval_shapes = self.shapes_of(rows)
                self._evaluate = self.lower_evaluation(self._eval_shapes).compile()
        return self._evaluate(state, to_global(rows, self._eval_shapes))

    def lower_step(self, batch: Any) -> jax.stages.Lowered:
        """The training step, traced for an abstract global batch; the state is donated."""
        where = jax.tree.map(lambda leaf: leaf.sharding, self.abstract)
        step = make_train_step(self.parts)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(where, None))
        return jitted.lower(self.abstract, batch)

    def lower_evaluation(self, batch: Any) -> jax.stages.Lowered:
        """The evaluation step, traced for an abstract global batch."""
        return jax.jit(make_eval_step(self.parts)).lower(self.abstract, batch)

    def shapes_of(self, rows: Mapping[str, Any]) -> Any:
        """The global batch that this host's rows (or their shapes) are part of, abstract."""
        return abstract_batch(rows, self.hosts, self.parts.mesh, self.parts.rules)


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
    model = split_model(nnx.eval_shape(lambda: task.build(nnx.Rngs(config.seed))))
    chain = optim.build(config.optim, total_steps=config.steps, params=model.params)
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
    return Programs(parts=parts, abstract=abstract, hosts=hosts, ledger=ledger)


def _builder(config: TrainerConfig, task: Task, chain: optim.Built) -> Callable[[], TrainState]:
    def build() -> TrainState:
        return _state_of(task.build(nnx.Rngs(config.seed)), config, chain)

    return build


def _state_of(model: nnx.Module, config: TrainerConfig, chain: optim.Built) -> TrainState:
    parts = split_model(model)
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
    parts = programs.parts
    batches = parts.task.batches("train", programs.hosts)
    if checkpointer.latest_step() is None:
        with programs.ledger.phase("initialise"):
            return Start(state=first_state(config, programs), step=0, total=0.0, batches=batches)
    with programs.ledger.phase("restore"):
        restored = checkpointer.restore(as_tree(programs.abstract))
        batches.restore(restored.data, allow_changes=allow_data_changes)
    return Start(
        state=TrainState(**restored.state),
        step=restored.step,
        total=restored.metadata["total"],
        batches=batches,
    )


def first_state(config: TrainerConfig, programs: Programs) -> TrainState:
    """The state of a run that has no checkpoint, each array made where it will lie."""
    parts = programs.parts
    shardings = jax.tree.map(lambda leaf: leaf.sharding, programs.abstract)
    build = _builder(config, parts.task, parts.optim)
    pretrained = parts.task.pretrained
    with use_mesh(parts.mesh, parts.rules):
        if pretrained is None:
            return jax.jit(build, out_shardings=shardings)()
        model = pretrained(parts.mesh, parts.rules)
        params = nnx.to_pure_dict(split_model(model).params)
        return jax.jit(
            lambda params, other: fresh_state(params, other, parts.optim, config.skip, config.seed),
            out_shardings=shardings,
        )(params, nnx.to_pure_dict(split_model(model).other))
