"""The trainer's own program on some devices, run one step; and what it must agree with.

The program is `train.session.prepare`'s: the step of `fornax train`, compiled as it compiles it.
Two things are added around it, neither of which computes: the optimizer's state also keeps the
gradients it was given, and an attention implementation can be named.

The reference is the loss written down plainly (`Subject.plain_loss`), in float32, on one device,
the whole batch at once: nothing is recomputed, accumulated or sharded, and the gradient is
`jax.grad`'s.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fornax.optim.tree import flatten, nest, rebuild
from fornax.preflight.shrink import float32
from fornax.preflight.subject import Subject
from fornax.train import Ledger, Task, TrainerConfig
from fornax.train.session import Programs, prepare
from fornax.train.state import TrainState, split_model

__all__ = ["Outcome", "Program", "Reference", "Update", "joined", "make_reference", "make_update"]


Arrays = dict[str, np.ndarray]
"""By path, or by name of a batch; on the host."""


class Recorded(NamedTuple):
    """An optimizer's state, and the gradients that it was last given."""

    inner: optax.OptState
    gradients: optax.Updates


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What steps of a program left behind; arrays by path, on the host."""

    loss: float
    weight: float
    metrics: dict[str, float]
    gradients: Arrays
    params: Arrays
    optimizer: Arrays
    state: TrainState
    """On the devices."""
    disagreeing: tuple[str, ...]
    """Arrays whose copies on several devices are not the same."""


class Program:
    """The training step of one config on one mesh, compiled when it first runs."""

    def __init__(
        self,
        config: TrainerConfig,
        task: Task[Any],
        devices: Sequence[jax.Device],
    ):
        """Lay out the state.

        Args:
          config: a shrunk config.
          task: its task.
          devices: what its mesh lies on.
        """
        self.config = config
        self.plain = prepare(config, task, Ledger(), devices)
        """As the trainer has it."""
        self._recording = _recording(self.plain)

    def run(self, state: TrainState, rows: Mapping[str, np.ndarray]) -> Outcome:
        """Run one step from a state on the host or the devices, on the whole batch.

        With `optim.accumulate` it is as many steps as make one update, all on the same rows.
        """
        state = dataclasses.replace(
            state,
            optimizer=Recorded(
                state.optimizer, jax.tree.map(lambda x: np.zeros(x.shape, np.float32), state.params)
            ),
        )
        placed = _place(state, self._recording.abstract)
        metrics: dict[str, jax.Array] = {}
        for _ in range(self.config.optim.accumulate):
            placed, metrics = self._recording.step(placed, dict(rows))
        metrics = {name: x for name, x in metrics.items() if x.ndim == 0}
        numbers = {name: float(x) for name, x in jax.device_get(metrics).items()}
        recorded = placed.optimizer
        plain = dataclasses.replace(placed, optimizer=recorded.inner)
        disagreeing: list[str] = []
        trees = (recorded.gradients, placed.params, recorded.inner)
        found = [_gather(tree, disagreeing) for tree in trees]
        return Outcome(
            loss=numbers["loss"],
            weight=numbers["weight"],
            metrics=numbers,
            gradients=found[0],
            params=found[1],
            optimizer=found[2],
            state=plain,
            disagreeing=tuple(disagreeing),
        )


def _place(state: TrainState, abstract: TrainState) -> TrainState:
    """Arrays laid out, and rounded, as `abstract` says; fresh copies that may be donated."""

    def one(x: np.ndarray | jax.Array, spec: jax.ShapeDtypeStruct) -> jax.Array:
        value = np.array(x).astype(spec.dtype)
        return jax.device_put(value, spec.sharding)

    return jax.tree.map(one, state, abstract)


def _gather(tree: optax.Params, disagreeing: list[str]) -> Arrays:
    """The arrays of a tree by path, whole; appends those whose copies are not the same."""
    found: Arrays = {}
    for path, array in flatten(tree).items():
        copies: dict[tuple[tuple[int | None, int | None], ...], bytes] = {}
        for shard in array.addressable_shards:
            where = tuple((s.start, s.stop) for s in shard.index)
            content = np.asarray(shard.data).tobytes()
            if copies.setdefault(where, content) != content:
                disagreeing.append(path)
                break
        found[path] = np.asarray(array)
    return found


def _recording(programs: Programs) -> Programs:
    """The same programs with an optimizer that also keeps the gradients it is given."""
    built = programs.parts.optim

    def init(params: optax.Params) -> Recorded:
        return Recorded(built.transform.init(params), jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any
    ) -> tuple[optax.Updates, Recorded]:
        changes, inner = built.transform.update(updates, state.inner, params, **extra)
        return changes, Recorded(inner, updates)

    optim = dataclasses.replace(
        built, transform=optax.GradientTransformationExtraArgs(init, update)
    )
    abstract = programs.abstract
    gradients = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=p.sharding), abstract.params
    )
    return dataclasses.replace(
        programs,
        parts=dataclasses.replace(programs.parts, optim=optim),
        abstract=dataclasses.replace(abstract, optimizer=Recorded(abstract.optimizer, gradients)),
    )


Update = Callable[[TrainState, Mapping[str, np.ndarray]], Arrays]
"""A state on the host and gradients by path to the new parameters, and the optimizer's state below
`optimizer`, by path."""


def make_update(config: TrainerConfig, task: Task[Any]) -> Update:
    """The optimizer's update alone, on one device: what a step must make of its gradients.

    Args:
      config: of one device; its optimizer and its dtypes count.
      task: its task.
    """
    built = prepare(config, task, Ledger(), jax.devices()[:1]).parts.optim

    @jax.jit
    def run(
        params: optax.Params, inner: optax.OptState, grads: optax.Updates
    ) -> tuple[optax.Params, optax.OptState]:
        for _ in range(config.optim.accumulate):
            params, inner = built.update(grads, inner, params)
        return params, inner

    def update(state: TrainState, gradients: Mapping[str, np.ndarray]) -> Arrays:
        grads = rebuild(state.params, gradients)
        arrays = jax.device_put((state.params, state.optimizer, grads), jax.devices()[0])
        params, inner = run(*arrays)
        return joined(_gather(params, []), _gather(inner, []))

    return update


def joined(params: Arrays, optimizer: Arrays) -> Arrays:
    """Parameters, and the optimizer's state below `optimizer`, by path."""
    return {**params, **{f"optimizer/{path}": x for path, x in optimizer.items()}}


Reference = Callable[
    [Mapping[str, np.ndarray], Any, Mapping[str, np.ndarray]], tuple[float, Arrays, float]
]
"""Parameters by path, `TrainState.other` and a whole batch to the batch's mean loss, the gradients
by path, and the z-loss, a part of the loss."""


def make_reference(config: TrainerConfig, subject: Subject) -> Reference:
    """The reference of one config, on one device; compiled once for each shape of batch."""
    config = float32(config)
    task = subject.task(config)
    plain_loss = subject.plain_loss(config)
    parts = split_model(nnx.eval_shape(lambda: task.build(nnx.Rngs(config.seed))))

    def loss(
        params: optax.Params, other: Any, batch: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return plain_loss(parts.merge(params, other, jax.random.key(0)), batch)

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))

    def reference(
        params: Mapping[str, np.ndarray], other: Any, rows: Mapping[str, np.ndarray]
    ) -> tuple[float, Arrays, float]:
        with jax.default_matmul_precision("highest"):
            arrays = jax.device_put((nest(params), other, dict(rows)), jax.devices()[0])
            (loss, z_loss), grads = step(*arrays)
        gradients = {path: np.asarray(x) for path, x in flatten(grads).items()}
        return float(loss), gradients, float(z_loss)

    return reference
