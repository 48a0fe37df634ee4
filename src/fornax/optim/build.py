"""From an `OptimConfig` to the chain that trains: `build`, and the small interface of `Built`."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from fornax.config.errors import ConfigError
from fornax.optim.averages import Averages, average_with, power_decay, power_exponent
from fornax.optim.config import EMA, AdamW, NormClip, OptimConfig, Optimizer
from fornax.optim.optimizers import Parameters, make_clip, make_optimizer, split_off_fallback
from fornax.optim.rounding import UpdateCount, count_updates, is_rounded, round_as, widen
from fornax.optim.rules import Assignment, assign, decayed
from fornax.optim.schedules import ScheduleFn, build_schedule
from fornax.optim.shardings import state_shardings, unmatched
from fornax.optim.transforms import EmaState, SlowState, average_parameters, follow_slowly
from fornax.optim.tree import at_paths, flatten, nest, rebuild
from fornax.optim.user import Factory, TaskOptimizer
from fornax.optim.views import View, make_views

__all__ = ["Built", "build"]

Node = TypeVar("Node")

_FROZEN = Assignment(None)


@dataclass(frozen=True)
class Built:
    """An optimization chain, ready for one tree of parameters.

    All functions are pure and trace under `jax.jit`. Parameters go in and out as the tree they
    are; the state keeps nested dicts keyed by their paths.
    """

    config: OptimConfig
    """What it was built from."""
    transform: optax.GradientTransformationExtraArgs
    """The whole chain as Optax has it: gradients to updates."""
    schedule: ScheduleFn
    """Call number (from 0) to learning rate; under accumulation several calls share one."""
    assignments: Mapping[str, Assignment]
    """What really updates each parameter, fallbacks included, by path."""
    views: Mapping[str, View]
    """How each parameter is seen, by path."""
    abstract_params: object
    """The parameters' shapes and dtypes."""

    def init(self, params: optax.Params) -> optax.OptState:
        """The state before the first update. It shares no buffer with `params`."""
        return self.transform.init(widen(params))

    def update(
        self,
        grads: optax.Updates,
        state: optax.OptState,
        params: optax.Params,
        norm: jax.Array | None = None,
    ) -> tuple[optax.Params, optax.OptState]:
        """New parameters (same tree and dtypes) and new state.

        Where the global norm of `grads` is known, clipping by it need not compute it again.

        The chain sees float32 in place of bfloat16, and keeps float32 state; its result is rounded
        stochastically to bfloat16 parameters, by random bits that the number of the update gives.

        Where both are donated, jit a function that takes them in the order it returns them: XLA
        pairs donated buffers with results of their shape in order, and pairs that do not match
        cost a copy of every array.
        """
        wide = widen(params)
        known = {} if norm is None or not self.clips_norm_first else {"global_norm": norm}
        updates, new_state = self.transform.update(widen(grads), state, wide, **known)
        after = optax.apply_updates(wide, updates)
        return round_as(params, after, _found(state, UpdateCount)), new_state

    @property
    def clips_norm_first(self) -> bool:
        """Whether the norm of the gradients that `update` is given reaches a clipping, and is that
        of what it clips."""
        return (
            bool(self.config.clip)
            and isinstance(self.config.clip[0], NormClip)
            and self.config.lookahead is None
            and self.config.accumulate == 1
            and _FROZEN not in self.assignments.values()
        )

    def eval_params(self, params: optax.Params, state: optax.OptState) -> optax.Params:
        """The parameters to evaluate: EMA's average, Lookahead's slow ones, else `params`."""
        average = _averaged(state, self.config.ema)
        if average is None:
            return params
        wanted = flatten(params)
        cast = {path: x.astype(wanted[path].dtype) for path, x in flatten(average).items()}
        return rebuild(params, cast)

    def power_averages(self, state: optax.OptState) -> Averages | None:
        """The averages of `ema.widths`, in their order; None where none are kept."""
        return _found(state, Averages)

    def state_shardings(self, param_shardings: object) -> object:
        """Shardings of the state, like `init`'s result, from those of the parameters.

        Args:
          param_shardings: a tree like the parameters of NamedShardings on one mesh.
        """
        return state_shardings(self._abstract_state, self.views, flatten(param_shardings))

    def replicated(self, param_shardings: object) -> dict[str, jax.ShapeDtypeStruct]:
        """State arrays, abstract and by path, that match no parameter: every device holds them
        whole."""
        return unmatched(self._abstract_state, self.views, flatten(param_shardings))

    @property
    def _abstract_state(self) -> object:
        return jax.eval_shape(self.init, self.abstract_params)


def build(
    config: OptimConfig,
    *,
    total_steps: int,
    params: optax.Params,
    axes: object = None,
    optimizer: Factory | None = None,
) -> Built:
    """Build the chain that `config` declares.

    The chain: frozen gradients become zero, the clippings act in order, each parameter goes to its
    optimizer, Lookahead or EMA follow, and accumulation wraps it all.

    Args:
      config: what to build.
      total_steps: calls of `Built.update` in the whole run; schedules end there.
      params: tree of arrays, ShapeDtypeStructs or NNX variables, whose paths name the parameters.
      axes: tree like `params` of tuples of logical axis names; None reads them from variables.
      optimizer: a factory (`fornax.optim.user`) in place of `config.optimizer`.

    Raises:
      ConfigError: for a rule that matches nothing, a parameter no rule covers or of a dtype that
        is not trained, a schedule longer than the run, a combination that cannot work.
    """
    config = _with_factory(config, optimizer)
    views = make_views(params, axes)
    _require_float(params)
    assigned = assign(config, tuple(views))
    assignments = {path: _actual(t, views[path]) for path, t in assigned.items()}
    named = config.decay is not None or bool(config.no_decay)
    known = Parameters(views, decayed(config, views), named)
    if total_steps < 1 or total_steps % config.accumulate:
        raise ConfigError(
            f"total_steps={total_steps} is not a multiple of accumulate={config.accumulate} above 0"
            ", so the last gradients would never be applied; use a multiple"
        )
    schedule = build_schedule(
        config.schedule,
        peak=config.learning_rate,
        total_steps=total_steps // config.accumulate,
    )
    chain = _with_averages(config, _core(config, schedule, known, assignments))
    if config.accumulate > 1:
        chain = optax.MultiSteps(chain, config.accumulate).gradient_transformation()
    if any(map(is_rounded, jax.tree.leaves(params))):
        chain = optax.chain(chain, count_updates())
    return Built(
        config=config,
        transform=_on_any_tree(optax.with_extra_args_support(chain)),
        schedule=_per_call(schedule, config.accumulate),
        assignments=assignments,
        views=views,
        abstract_params=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params),
    )


def _with_factory(config: OptimConfig, factory: Factory | None) -> OptimConfig:
    if factory is None:
        return config
    named = config.optimizer
    if named is not None and named != AdamW():
        raise ConfigError(
            f"optim.optimizer is {named.type}, and the task brings an optimizer of its "
            "own; leave optim.optimizer out, or name it in a group"
        )
    optimizer: Any = TaskOptimizer(factory)
    return replace(config, optimizer=optimizer)


def _require_float(params: optax.Params) -> None:
    for path, leaf in flatten(params).items():
        if leaf.dtype not in (jnp.float64, jnp.float32, jnp.bfloat16):
            raise ConfigError(
                f"parameter {path} is {leaf.dtype}, in which updates would be lost; train it in "
                "float32 or bfloat16"
            )


def _core(
    config: OptimConfig,
    schedule: ScheduleFn,
    params: Parameters,
    assignments: Mapping[str, Assignment],
) -> optax.GradientTransformation:
    clips = [_scoped("gradient_clipping", make_clip(clip, params)) for clip in config.clip]
    frozen = {path: assignment == _FROZEN for path, assignment in assignments.items()}
    if any(frozen.values()):
        clips.insert(0, optax.masked(optax.set_to_zero(), at_paths(frozen)))
    optimize = _by_treatment(schedule, params, assignments)
    return optax.chain(*clips, optimize) if clips else optimize


def _scoped(name: str, transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same, its operations in a `jax.named_scope`."""
    return transform._replace(update=jax.named_scope(name)(transform.update))


def _by_treatment(
    schedule: ScheduleFn, params: Parameters, assignments: Mapping[str, Assignment]
) -> optax.GradientTransformation:
    """One optimizer where one serves all, else `optax.partition` with a label a assignment."""
    distinct = list(dict.fromkeys(assignments.values()))
    labels = {path: _label(distinct.index(t), t.optimizer) for path, t in assignments.items()}
    transforms: dict[Hashable, optax.GradientTransformation] = {}
    for position, assignment in enumerate(distinct):
        paths = tuple(path for path, t in assignments.items() if t == assignment)
        transforms[_label(position, assignment.optimizer)] = _optimize(
            assignment, schedule, params, paths
        )
    if len(distinct) == 1:
        return next(iter(transforms.values()))
    return optax.partition(transforms, at_paths(labels))


def _actual(assignment: Assignment, view: View) -> Assignment:
    """The assignment with a fallback in place of an optimizer that passes the parameter on."""
    if assignment.optimizer is None:
        return assignment
    optimizer, factor = split_off_fallback(assignment.optimizer, view)
    return replace(
        assignment,
        optimizer=optimizer,
        learning_rate_factor=assignment.learning_rate_factor * factor,
    )


def _label(position: int, optimizer: Optimizer | TaskOptimizer | None) -> str:
    return f"{position}-{optimizer.type if optimizer else 'frozen'}"


def _optimize(
    assignment: Assignment, schedule: ScheduleFn, params: Parameters, paths: tuple[str, ...]
) -> optax.GradientTransformation:
    if assignment.optimizer is None:
        return optax.set_to_zero()
    factor = assignment.learning_rate_factor
    own = schedule if factor == 1.0 else (lambda count: factor * schedule(count))
    return make_optimizer(assignment.optimizer, own, params, paths)


def _with_averages(
    config: OptimConfig, chain: optax.GradientTransformation
) -> optax.GradientTransformation:
    if config.lookahead is not None:
        look = config.lookahead
        return follow_slowly(chain, look.sync_period, look.slow_step_size, look.reset_state)
    if config.ema is not None:
        ema = config.ema
        parts = [chain, average_parameters(ema.decay, ema.debias, ema.warmup)]
        if ema.widths:
            parts.append(average_with(*(power_decay(power_exponent(w)) for w in ema.widths)))
        return optax.chain(*parts)
    return chain


def _on_any_tree(
    chain: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """The chain between trees of the caller's kind, its insides on nested dicts."""

    def init(params: optax.Params) -> optax.OptState:
        return chain.init(nest(flatten(params)))

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        nested, state = chain.update(nest(flatten(updates)), state, nest(flatten(params)), **extra)
        return rebuild(updates, flatten(nested)), state

    return optax.GradientTransformationExtraArgs(init, update)


def _per_call(schedule: ScheduleFn, calls: int) -> ScheduleFn:
    return schedule if calls == 1 else (lambda call: schedule(call // calls))


def _averaged(state: optax.OptState, ema: EMA | None) -> optax.Params | None:
    """The averaged or slow parameters inside a state, if it has them."""
    slow, kept = _found(state, SlowState), _found(state, EmaState)
    if slow is not None:
        return slow.slow
    if kept is None:
        return None
    return _debiased(kept, ema.decay) if ema and ema.debias else kept.average


def _found(state: optax.OptState, kind: type[Node]) -> Node | None:
    """The first node of a kind inside a state, or None."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return next((node for node in nodes if isinstance(node, kind)), None)


def _debiased(state: EmaState, decay: float) -> optax.Params:
    """An average that started at zero, divided by the weight it has gathered."""
    weight = 1 - decay ** jnp.maximum(state.count, 1)
    return jax.tree.map(lambda average: average / weight, state.average)
