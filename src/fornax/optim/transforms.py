"""Optax transformations that the chain needs and Optax does not have in this form.

All work on nested dicts of arrays (see `tree.nest`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import optax

from fornax.optim.averages import warmed_up
from fornax.optim.tree import at_paths, flatten, nest
from fornax.optim.views import View

__all__ = [
    "EmaState",
    "SlowState",
    "average_parameters",
    "clip_by_global_norm",
    "follow_slowly",
    "increment",
    "per_matrix",
    "transformation",
]

State = TypeVar("State")


def transformation(
    init: Callable[[optax.Params], State],
    update: Callable[[optax.Updates, State, Any], tuple[optax.Updates, State]],
) -> optax.GradientTransformation:
    """An Optax transformation whose state has a type; Optax's own annotation is any tree."""
    return optax.GradientTransformation(
        cast("optax.TransformInitFn", init), cast("optax.TransformUpdateFn", update)
    )


def increment(count: jax.Array) -> jax.Array:
    """`optax.safe_increment` of an array."""
    return cast("jax.Array", optax.safe_increment(count))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_global_norm`; `update(..., global_norm=norm)` saves it the norm.

    With a norm all updates are multiplied by the same factor, which XLA makes part of the loop
    that reads them. Optax chooses between each array and a quotient: on a CPU XLA stores the
    updates for the norm and the quotients once more.
    """
    plain = optax.clip_by_global_norm(max_norm)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        global_norm: jax.Array | None = None,
        **_: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        if global_norm is None:
            return plain.update(updates, state, params)
        factor = jnp.minimum(1, max_norm / global_norm)
        return jax.tree.map(lambda x: x * factor.astype(x.dtype), updates), state

    return optax.GradientTransformationExtraArgs(plain.init, update)


def per_matrix(
    make: Callable[[str], optax.GradientTransformation], views: Mapping[str, View]
) -> optax.GradientTransformation:
    """Apply a transformation to each matrix or vector on its own.

    A parameter of stacked layers is mapped over its layers, and dimensions that are one feature
    dimension (heads and their width) are merged, so a statistic of a whole array, such as
    Adafactor's row means, is that of one weight matrix, as if layers were never stacked.

    Args:
      make: path to the transformation of that parameter's (R, C) or (C,) arrays.
      views: how to see each parameter.

    Returns:
      A transformation whose state holds, at each parameter's path, that parameter's own state with
      the batch dimensions in front.
    """

    def over_batch(function: Callable[..., object], view: View) -> Callable[..., Any]:
        for _ in view.batch:
            function = jax.vmap(function)
        return function

    def init(params: optax.Params) -> optax.OptState:
        states = {
            path: over_batch(make(path).init, views[path])(views[path].to_core(param))
            for path, param in flatten(params).items()
        }
        return nest(states)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        params_by_path = flatten(params)
        new_updates, new_states = {}, {}
        for path, update in flatten(updates).items():
            view = views[path]
            own_state = _lookup(state, path)
            step = over_batch(make(path).update, view)
            core, new_states[path] = step(
                view.to_core(update), own_state, view.to_core(params_by_path[path])
            )
            new_updates[path] = view.from_core(core)
        return at_paths(new_updates)(updates), nest(new_states)

    return optax.GradientTransformation(init, update)


def _lookup(tree: Any, path: str) -> optax.OptState:
    for part in path.split("/"):
        tree = tree[part]
    return tree


class SlowState(NamedTuple):
    """State of `follow_slowly`: Optax's own, and the slow parameters."""

    inner: optax.OptState
    slow: optax.Params


def follow_slowly(
    fast: optax.GradientTransformation,
    sync_period: int,
    slow_step_size: float,
    reset_state: bool,
) -> optax.GradientTransformation:
    """`optax.lookahead` with the slow parameters in its state instead of in a pair.

    Its updates are those of the fast parameters, so it takes and gives plain parameter trees.
    """
    lookahead: Any = optax.lookahead(fast, sync_period, slow_step_size, reset_state)

    def init(params: optax.Params) -> SlowState:
        pair = optax.LookaheadParams.init_synced(params)
        # Copies: a state that shares the parameters' buffers cannot be donated with them.
        return SlowState(lookahead.init(pair), jax.tree.map(jnp.copy, params))

    def update(
        updates: optax.Updates, state: SlowState, params: optax.Params
    ) -> tuple[optax.Updates, SlowState]:
        pair = optax.LookaheadParams(fast=params, slow=state.slow)
        both, inner = lookahead.update(updates, state.inner, pair)
        return both.fast, SlowState(inner, optax.apply_updates(state.slow, both.slow))

    return transformation(init, update)


class EmaState(NamedTuple):
    """State of `average_parameters`: updates averaged so far, and the float32 average."""

    count: jax.Array
    average: optax.Params


def average_parameters(
    decay: float, debias: bool, warmup: bool = False
) -> optax.GradientTransformation:
    """Keep a running average of the parameters as they are after the update.

    average <- decay * average + (1 - decay) * (params + updates), in float32. It changes no update
    and must be the last of a chain.
    """
    decay_at = warmed_up(decay) if warmup else lambda count: decay

    def init(params: optax.Params) -> EmaState:
        start = jax.tree.map(
            lambda p: jnp.zeros(p.shape, jnp.float32) if debias else jnp.array(p, jnp.float32),
            params,
        )
        return EmaState(jnp.zeros([], jnp.int32), start)

    def update(
        updates: optax.Updates, state: EmaState, params: optax.Params
    ) -> tuple[optax.Updates, EmaState]:
        after = optax.apply_updates(params, updates)
        share = decay_at(state.count.astype(jnp.float32))
        average = jax.tree.map(
            lambda a, p: share * a + (1 - share) * p.astype(jnp.float32), state.average, after
        )
        return updates, EmaState(increment(state.count), average)

    return transformation(init, update)
