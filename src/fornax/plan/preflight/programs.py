"""The trainer's own program on some devices, run one step, with everything it did brought back.

The program is `train.session.prepare`'s: the step of `fornax train`, compiled as it compiles it.
Two things are added around it, neither of which computes: the optimizer's state also keeps the
gradients it was given, and an attention implementation can be named.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fornax.optim.tree import flatten, rebuild
from fornax.train import Ledger, Task, TrainConfig, pretrain_task
from fornax.train.session import Programs, prepare
from fornax.train.state import TrainState

__all__ = ["Outcome", "Program", "Recorded", "Update", "gather", "joined", "place"]


class Recorded(NamedTuple):
    """An optimizer's state, and the gradients that it was last given."""

    inner: Any
    gradients: Any


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What steps of a program left behind; arrays by path, on the host."""

    loss: float
    weight: float
    metrics: dict[str, float]
    gradients: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    state: TrainState
    """On the devices."""
    disagreeing: tuple[str, ...]
    """Arrays whose copies on several devices are not the same."""


class Program:
    """The training step of one config on one mesh, compiled when it first runs."""

    def __init__(
        self,
        config: TrainConfig,
        devices: Sequence[jax.Device],
        *,
        implementation: str | None = None,
    ):
        """Lay out the state.

        Args:
          config: a shrunk config.
          devices: what its mesh lies on.
          implementation: attention implementation to force; None leaves the choice to the trainer.
        """
        self.config = config
        task = pretrain_task(config)
        if implementation is not None:
            task = _forcing(task, implementation)
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
        placed = place(state, self._recording.abstract)
        metrics: dict[str, jax.Array] = {}
        for _ in range(self.config.optim.accumulate):
            placed, metrics = self._recording.step(placed, dict(rows))
        numbers = {name: float(x) for name, x in jax.device_get(metrics).items()}
        recorded = placed.optimizer
        plain = dataclasses.replace(placed, optimizer=recorded.inner)
        disagreeing: list[str] = []
        trees = (recorded.gradients, placed.params, recorded.inner)
        found = [gather(tree, disagreeing) for tree in trees]
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


def place(state: Any, abstract: Any) -> Any:
    """Arrays laid out, and rounded, as `abstract` says; fresh copies that may be donated."""

    def one(x: Any, spec: jax.ShapeDtypeStruct) -> jax.Array:
        value = np.array(x).astype(spec.dtype)
        return jax.device_put(value, spec.sharding)

    return jax.tree.map(one, state, abstract)


def gather(tree: Any, disagreeing: list[str]) -> dict[str, np.ndarray]:
    """The arrays of a tree by path, whole; appends those whose copies are not the same."""
    found: dict[str, np.ndarray] = {}
    for path, array in flatten(tree).items():
        copies: dict[Any, bytes] = {}
        for shard in array.addressable_shards:
            place_ = tuple((s.start, s.stop) for s in shard.index)
            content = np.asarray(shard.data).tobytes()
            if copies.setdefault(place_, content) != content:
                disagreeing.append(path)
                break
        found[path] = np.asarray(array)
    return found


def _recording(programs: Programs) -> Programs:
    """The same programs with an optimizer that also keeps the gradients it is given."""
    built = programs.parts.optim

    def init(params: Any) -> Recorded:
        return Recorded(built.transform.init(params), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
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


class _Forced:
    """A decoder whose attention implementation is named."""

    def __init__(self, decoder: Any, implementation: str):
        self._decoder, self._implementation = decoder, implementation

    def hidden(self, *args: Any, **kwargs: Any) -> jax.Array:
        return self._decoder.hidden(*args, **kwargs, implementation=self._implementation)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


def _forcing(task: Task, implementation: str) -> Task:
    def loss(decoder: Any, batch: Any, key: jax.Array) -> Any:
        return task.loss(_Forced(decoder, implementation), batch, key)

    return dataclasses.replace(task, loss=loss)


class Update:
    """The optimizer's update alone, on one device: what a step must make of its gradients."""

    def __init__(self, config: TrainConfig):
        """Prepare.

        Args:
          config: of one device; its optimizer and its dtypes count.
        """
        built = prepare(config, pretrain_task(config), Ledger(), jax.devices()[:1]).parts.optim

        def run(params: Any, inner: Any, grads: Any) -> tuple[Any, Any]:
            for _ in range(config.optim.accumulate):
                params, inner = built.update(grads, inner, params)
            return params, inner

        self._run = jax.jit(run)

    def __call__(self, state: TrainState, gradients: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """New parameters, and the optimizer's state below `optimizer`, by path.

        Args:
          state: on the host.
          gradients: by path, as the optimizer is given them.
        """
        grads = rebuild(state.params, gradients)
        arrays = jax.device_put((state.params, state.optimizer, grads), jax.devices()[0])
        params, inner = self._run(*arrays)
        return joined(gather(params, []), gather(inner, []))


def joined(params: dict[str, np.ndarray], optimizer: dict[str, np.ndarray]) -> dict[str, Any]:
    """Parameters, and the optimizer's state below `optimizer`, by path."""
    return {**params, **{f"optimizer/{path}": x for path, x in optimizer.items()}}
