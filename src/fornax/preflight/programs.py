"""The trainer's own program on some devices, run one step; and what it must agree with.

The program is `train.session.prepare`'s: the step of `fornax train`, compiled as it compiles it.
Two things are added around it, neither of which computes: the optimizer's state also keeps the
gradients it was given, and an attention implementation can be named.

The reference is the loss written down plainly, in float32, on one device, the whole batch at once.
It shares the parameters of the model with the trainer, and of its code embeddings, MLPs and the
output projection: attention is the formula's, of latents without keys and values made of them, a
linear layer's state goes from token to token, layers follow one another without a loop, every
expert sees every token, each module that predicts further tokens has its loss of what stands so
many tokens on, logits exist whole, nothing is recomputed, accumulated or sharded, and the
gradient is `jax.grad`'s.

Legend: B rows, T tokens of a row, D model width, V vocabulary.
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

from fornax.models import Decoder, Routing, router_losses
from fornax.models.attention import Attention
from fornax.models.experts import Experts
from fornax.models.gated_delta import GatedDeltaNet
from fornax.models.latent import LatentAttention
from fornax.models.mamba import Mamba2
from fornax.optim.tree import flatten, nest, rebuild
from fornax.preflight.attention import PlainAttention
from fornax.preflight.experts import PlainExperts
from fornax.preflight.latent import PlainLatent
from fornax.preflight.layers import plain_hidden
from fornax.preflight.linear import PlainGatedDelta, PlainMamba2
from fornax.preflight.shrink import float32
from fornax.train import Ledger, Loss, Task, TrainConfig, pretrain_task
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


class _Forced:
    """A decoder whose attention implementation is named."""

    def __init__(self, decoder: Decoder, implementation: str):
        self._decoder, self._implementation = decoder, implementation

    def hidden(self, *args: Any, **kwargs: Any) -> jax.Array:
        return self.hidden_and_routing(*args, **kwargs)[0]

    def hidden_and_routing(self, *args: Any, **kwargs: Any) -> tuple[jax.Array, Routing | None]:
        kwargs |= {"implementation": self._implementation}
        return self._decoder.hidden_and_routing(*args, **kwargs)

    def hidden_ahead(self, *args: Any, **kwargs: Any) -> Any:
        kwargs |= {"implementation": self._implementation}
        return self._decoder.hidden_ahead(*args, **kwargs)

    def __getattr__(self, name: str) -> object:
        return getattr(self._decoder, name)


def _forcing(task: Task, implementation: str) -> Task:
    def loss(decoder: Decoder, batch: Mapping[str, jax.Array], key: jax.Array) -> Loss:
        return task.loss(_Forced(decoder, implementation), batch, key)

    return dataclasses.replace(task, loss=loss)


Update = Callable[[TrainState, Mapping[str, np.ndarray]], Arrays]
"""A state on the host and gradients by path to the new parameters, and the optimizer's state below
`optimizer`, by path."""


def make_update(config: TrainConfig) -> Update:
    """The optimizer's update alone, on one device: what a step must make of its gradients.

    Args:
      config: of one device; its optimizer and its dtypes count.
    """
    built = prepare(config, pretrain_task(config), Ledger(), jax.devices()[:1]).parts.optim

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


def make_reference(config: TrainConfig) -> Reference:
    """The reference of one config, on one device; compiled once for each shape of batch."""
    config = float32(config)
    task = pretrain_task(config)
    parts = split_model(nnx.eval_shape(lambda: task.build(nnx.Rngs(config.seed))))

    def loss(
        params: optax.Params, other: Any, batch: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        decoder = parts.merge(params, other, jax.random.key(0))
        _make_plain(decoder)
        return plain_loss(decoder, batch, config.z_loss, config.mtp_weight)

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


_PLAIN: dict[type[nnx.Module], type[nnx.Module]] = {
    Attention: PlainAttention,
    Experts: PlainExperts,
    GatedDeltaNet: PlainGatedDelta,
    LatentAttention: PlainLatent,
    Mamba2: PlainMamba2,
}


def _make_plain(decoder: Decoder) -> None:
    """Have a decoder's parts computed by the formula, in place."""
    for _, module in nnx.iter_modules(decoder):
        plain = _PLAIN.get(type(module))
        if plain is not None:
            object.__setattr__(module, "__class__", plain)


def plain_loss(
    decoder: Decoder, batch: Mapping[str, jax.Array], z_loss: float, mtp_weight: float | None
) -> tuple[jax.Array, jax.Array]:
    """Mean cross entropy of the next token with its z-loss (Chowdhery et al. 2022, section 5), the
    losses of modules that predict further tokens (DeepSeek-AI 2024, equations 24 and 25) and of
    routers, and the z-loss alone."""
    (x_BTD, *further), routing = plain_hidden(decoder, batch)
    targets_BT, weights_BT, ids_BT = (
        batch[name] for name in ("targets", "loss_weights", "segment_ids")
    )
    lse_BT, losses_BT = _cross_entropy(decoder, x_BTD, targets_BT)
    count = jnp.sum(weights_BT)
    extra = z_loss * jnp.sum(weights_BT * lse_BT**2) / count
    loss = jnp.sum(weights_BT * losses_BT) / count + extra
    for on, x_BTD in enumerate(further, start=1):  # from a token, the target of the one `on` later
        assert mtp_weight is not None
        _, losses_BT = _cross_entropy(decoder, x_BTD[:, :-on], targets_BT[:, on:])
        counted_BT = weights_BT[:, on:] * (ids_BT[:, on:] == ids_BT[:, :-on])
        loss += mtp_weight / len(further) * jnp.sum(counted_BT * losses_BT) / count
    experts = decoder.config.experts
    if experts is not None and routing is not None:
        found = router_losses(routing)
        loss += experts.balance_loss * found["balance"] + experts.router_z_loss * found["router_z"]
    return loss, extra


def _cross_entropy(
    decoder: Decoder, x_BTD: jax.Array, targets_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The log-sum-exp of each token's logits, and its cross entropy, in nats."""
    logits_BTV = decoder.logits(x_BTD)
    lse_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return lse_BT, lse_BT - target_BT
