"""One training step as a pure function: gradients of weighted sums, the skip rule, the update.

Legend: A micro-batches, B rows of a batch, b = B / A rows of a micro-batch.

With accumulation the objective stays the mean over the whole batch: the gradients of the sums of
all micro-batches are added, and so are their weights, and one division follows. However unequal
the micro-batches' weights are, the result is that of one large batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from fornax.mesh import Rules, constrain, named_sharding, use_mesh
from fornax.optim import Built
from fornax.train.guard import SkipConfig, judge
from fornax.train.state import ModelParts, TrainState
from fornax.train.task import Batch, Loss, Task

__all__ = [
    "StepParts",
    "accepted",
    "batch_shardings",
    "make_eval_step",
    "make_train_step",
    "sum_gradients",
]

Metrics = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """What a step is made of."""

    task: Task
    model: ModelParts
    optim: Built
    skip: SkipConfig
    accumulate: int
    """Micro-batches a step."""
    mesh: Mesh
    rules: Rules
    param_shardings: Any
    """Like the parameters: where each, and so its gradient, lies."""

    def forward_params(self, params: object) -> Any:
        """The parameters that losses see, and gradients are taken at: those trained, or rounded."""
        if self.task.quantizer is None:
            return params
        with jax.named_scope("quantize"):
            rounded = self.task.quantizer.round(params)
        if self.mesh.size == 1:
            return rounded
        return jax.lax.with_sharding_constraint(rounded, self.param_shardings)

    def forward_model(self, params: object, other: object, key: jax.Array) -> Any:
        """The model of `forward_params`."""
        model = self.model.merge(params, other, key)
        if self.task.quantizer is not None:
            self.task.quantizer.round_inputs(model)
        return model


def batch_shardings(batch: Batch, mesh: Mesh, rules: Rules) -> dict[str, NamedSharding]:
    """Where the arrays of a batch lie: rows over `batch`, the dimension of length over `length`.

    Images and videos become tokens inside the network alone; what is beside them is as wide as a
    text or a vector, which no mesh need divide.
    """
    tokens = batch.get("tokens")

    def axes(x: Any) -> tuple[str | None, ...]:
        names: list[str | None] = ["batch", *[None] * (x.ndim - 1)]
        if "images" in batch:
            return tuple(names)
        length = (1 if x.ndim == 2 else None) if tokens is None else _length_of(x, tokens)
        if length is not None:
            names[length] = "length"
        return tuple(names)

    return {
        name: named_sharding(mesh, axes(x), rules, shape=x.shape, name=f"batch[{name!r}]")
        for name, x in batch.items()
    }


def _length_of(x: Any, tokens: Any) -> int | None:
    """Which dimension of `x` runs along the tokens: the one where theirs does, else the last."""
    size, usual = tokens.shape[-1], tokens.ndim - 1
    found = [dim for dim in range(1, x.ndim) if x.shape[dim] == size]
    if not found:
        return None
    return usual if usual in found else found[-1]


def make_train_step(parts: StepParts) -> Callable[..., tuple[TrainState, Metrics]]:
    """The function (state, batch, frozen parameters) -> (state, metrics); pure, to be jitted.

    Metrics are float32 scalars: `loss`, `grad_norm` (before clipping), `weight`, `learning_rate`,
    `skipped` (0 or 1), and the means and maxima of the task's own; and its counts, arrays.
    """

    def step(state: TrainState, batch: Batch, frozen: object = None) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        held = replace(parts, model=parts.model.holding(frozen or {}))
        with use_mesh(parts.mesh, parts.rules):
            params = parts.forward_params(state.params)
            loss, other, grads = sum_gradients(held, params, state.other, batch, key)
            if parts.task.settle is not None:
                model = held.model.merge(state.params, other, key)
                parts.task.settle(model, loss)
                other = held.model.other_of(model)
        scale = jnp.where(loss.weight > 0, 1 / jnp.where(loss.weight > 0, loss.weight, 1), 0)
        mean = loss.total * scale
        with jax.named_scope("grad_norm"):
            norm = optax.tree.norm(grads) * scale
        accept, guard = judge(parts.skip, state.guard, loss=mean, norm=norm, weight=loss.weight)
        params, optimizer = _update(parts, state, grads, scale, norm, accept)
        new = TrainState(
            step=state.step + 1,
            updates=state.updates + accept.astype(jnp.int32),
            params=params,
            other=jax.tree.map(lambda a, b: jnp.where(accept, a, b), other, state.other),
            optimizer=optimizer,
            guard=guard,
            rng=state.rng,
        )
        metrics = {name: total / weight for name, (total, weight) in loss.metrics.items()}
        metrics |= loss.maxima | loss.counts
        metrics |= {
            "loss": mean,
            "grad_norm": norm,
            "weight": loss.weight,
            "learning_rate": jnp.asarray(parts.optim.schedule(state.updates), jnp.float32),
            "skipped": 1 - accept.astype(jnp.float32),
        }
        return new, metrics

    return step


def _update(
    parts: StepParts,
    state: TrainState,
    sums: object,
    scale: jax.Array,
    norm: jax.Array,
    accept: jax.Array,
) -> tuple[Any, Any]:
    """New parameters and optimizer state, or the old ones.

    The division is inside, so that it is fused into the update and its result is never stored.
    """

    def make() -> tuple[Any, Any]:
        with use_mesh(parts.mesh, parts.rules), jax.named_scope("optimizer"):
            means = jax.tree.map(lambda g: g * scale, sums)
            return parts.optim.update(means, state.optimizer, state.params, norm)

    kept = (state.params, state.optimizer)
    return accepted(accept, make, kept, branch=parts.mesh.devices.flat[0].platform != "tpu")


def accepted(accept: jax.Array, make: Callable[[], Any], kept: Any, *, branch: bool) -> Any:
    """What `make` returns where a step is accepted, else what was kept, bitwise identical.

    In a branch, because choosing element by element keeps old and new alive side by side: XLA then
    copies every donated array (measured on a CPU with AdamW: the update took half as long again).
    Not for TPUs, whose compiler chooses in the loop of the update: in a branch it lays arrays out
    again, and pads some (a third of a modulation's kernel [3072, 6, 3072], copied there and back).

    Args:
      accept: bool [].
      make: what is accepted, traced once.
      kept: a tree of the same shapes and dtypes.
      branch: whether nothing is computed where a step is not accepted.
    """
    if branch:
        return jax.lax.cond(accept, make, lambda: kept)
    return jax.tree.map(lambda new, old: jnp.where(accept, new, old), make(), kept)


def sum_gradients(
    parts: StepParts, params: object, other: object, batch: Batch, key: jax.Array
) -> tuple[Loss, Any, Any]:
    """The loss sums of a whole batch, the model's untrained arrays after it, and the gradients of
    the sum (float32, not divided by the weight), at `StepParts.forward_params`."""

    def of_micro_batch(
        params: object, other: object, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, tuple[Loss, Any]]:
        model_key, loss_key = jax.random.split(key)
        model = parts.forward_model(params, other, model_key)
        loss = parts.task.loss(model, {**batch, **measured}, loss_key)
        return loss.total, (loss, parts.model.other_of(model))

    def gradients(other: object, batch: Batch, key: jax.Array) -> tuple[Loss, Any, Any]:
        grad = jax.grad(of_micro_batch, has_aux=True)
        grads, (loss, other) = grad(params, other, batch, key)
        return loss, other, _lay_out(parts, grads)

    measured = _measured(parts, params, other, batch, parts.accumulate)
    if parts.accumulate == 1:
        return gradients(other, batch, jax.random.fold_in(key, 0))

    def add(carry: tuple[Loss, object, object], item: tuple[jax.Array, Batch]) -> tuple[Any, None]:
        number, micro = item
        loss, other, grads = carry
        more_loss, other, more = gradients(other, micro, jax.random.fold_in(key, number))
        grads = jax.tree.map(jnp.add, grads, _keep_apart(parts, more))
        return (_both(loss, more_loss), other, grads), None

    micro_batches = _split_rows(batch, parts.accumulate)
    first = jax.tree.map(lambda x: x[0], micro_batches)
    shapes = jax.eval_shape(gradients, other, first, key)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    least = jax.tree.map(lambda x: x - jnp.inf, zeros[0].maxima)
    start = (replace(zeros[0], maxima=least), other, zeros[2])
    numbered = (jnp.arange(parts.accumulate), micro_batches)
    return jax.lax.scan(add, start, numbered)[0]


def _both(one: Loss, other: Loss) -> Loss:
    """The loss of two micro-batches together."""
    sums = jax.tree.map(jnp.add, replace(one, maxima={}), replace(other, maxima={}))
    return replace(sums, maxima=jax.tree.map(jnp.maximum, one.maxima, other.maxima))


def _measured(
    parts: StepParts, params: object, other: object, batch: Batch, accumulate: int
) -> dict[str, jax.Array]:
    """The means over the whole batch that the task measures before its loss."""
    measure = parts.task.post.measure
    if measure is None:
        return {}

    def sums(micro: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
        model = parts.forward_model(params, other, jax.random.key(0))
        model.eval()
        return measure(model, micro)

    if accumulate == 1:
        found = sums(batch)
    else:
        found = jax.lax.map(sums, _split_rows(batch, accumulate))
        found = jax.tree.map(lambda parts_A: jnp.sum(parts_A, axis=0), found)
    return {
        f"measured/{name}": total / jnp.where(weight > 0, weight, 1)
        for name, (total, weight) in found.items()
    }


def _lay_out(parts: StepParts, grads: object) -> Any:
    """Gradients in float32, each laid out as its parameter, so that they are reduced once."""
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    if parts.mesh.size == 1:
        return grads
    return jax.lax.with_sharding_constraint(grads, parts.param_shardings)


def _keep_apart(parts: StepParts, grads: object) -> Any:
    """Gradients whose reduction over devices XLA does not merge with what is done to them next.

    libtpu 0.0.42 moves reductions out of the loop over micro-batches, and stops with an internal
    error where FSDP's are among them.
    """
    return grads if parts.mesh.size == 1 else jax.lax.optimization_barrier(grads)


def _split_rows(batch: Batch, count: int) -> Batch:
    """[B, ...] to [A, b, ...]: micro-batch i takes rows i, i + A, …

    Every device then gives each micro-batch a share of its own rows, and none moves.
    """

    def split(x: jax.Array) -> jax.Array:
        rows = x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
        return constrain(rows, (None, "batch", *(None,) * (x.ndim - 1)))

    return {name: split(x) for name, x in batch.items()}


def make_eval_step(parts: StepParts) -> Callable[..., Loss]:
    """The function (state, batch, frozen parameters) -> sums over one evaluation batch; pure.

    It evaluates the optimizer's averaged parameters where it keeps an average.
    """

    def evaluate(state: TrainState, batch: Batch, frozen: object = None) -> Loss:
        key = jax.random.key(0)
        with use_mesh(parts.mesh, parts.rules):
            params = parts.optim.eval_params(state.params, state.optimizer)
            params = parts.forward_params(params)
            held = replace(parts, model=parts.model.holding(frozen or {}))
            batch = {**batch, **_measured(held, params, state.other, batch, 1)}
            model = held.forward_model(params, state.other, key)
            model.eval()
            if parts.task.evaluate is not None:
                return parts.task.evaluate(model, batch)
            return parts.task.loss(model, batch, key)

    return evaluate
