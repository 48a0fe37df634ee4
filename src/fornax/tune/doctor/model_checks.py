"""Checks of model and loss: adapters, packing, gradients, accumulation, the reference.

Legend: A micro-batches, B rows, T tokens of a row.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fornax.config.suggest import first_few
from fornax.mesh import use_mesh
from fornax.train.hosts import to_global
from fornax.train.step import sum_gradients
from fornax.train.task import Batch, Loss, Task
from fornax.tune.config import DPO, IPO, KTOConfig, PreferenceConfig, RobustDPO
from fornax.tune.doctor.results import Outcome, failed, passed, skipped
from fornax.tune.doctor.trial_run import Rows, TrialRun, quick_options, spans

__all__ = [
    "Gradients",
    "accumulation",
    "adapters_at_start",
    "every_gradient",
    "packing",
    "reference",
]


Arrays = Mapping[str, "jax.Array | Arrays"]
"""Nested mappings of arrays."""

_NUDGE = 1e-3
_SMALLEST = 0.05
"""A norm below which gradients are rounding: a teacher that the student equals, for instance."""


@dataclass(kw_only=True)
class Gradients:
    """Means over a batch, by how many micro-batches it is divided into."""

    trial: TrialRun
    rows: Rows
    """A multiple of `trial.unit` rows."""
    _found: dict[int, tuple[float, Arrays]] = field(default_factory=dict)

    def of(self, accumulate: int) -> tuple[float, Arrays]:
        """The mean loss and its gradients, with the run's own loss."""
        if accumulate not in self._found:
            self._found[accumulate] = self._compute(accumulate)
        return self._found[accumulate]

    def _compute(self, accumulate: int) -> tuple[float, Arrays]:
        trial = self.trial
        state, programs = trial.state, trial.programs
        parts = replace(programs.parts, accumulate=accumulate, task=_without_noise(trial))

        def run(
            params: Arrays, other: Arrays, batch: Batch, frozen: Arrays
        ) -> tuple[jax.Array, Arrays]:
            held = replace(parts, model=parts.model.holding(frozen))
            with use_mesh(parts.mesh, parts.rules):
                loss, _, sums = sum_gradients(held, params, other, batch, jax.random.key(0))
            return loss.total / loss.weight, jax.tree.map(lambda g: g / loss.weight, sums)

        batch = to_global(self.rows, programs.shapes_of(self.rows))
        jitted = jax.jit(run, compiler_options=quick_options())
        loss, found = jitted(self.start, state.other, batch, programs.frozen)
        return float(loss), found

    @functools.cached_property
    def start(self) -> Arrays:
        """The trained parameters, those that are zero moved a little."""
        params = self.trial.state.params
        draw = np.random.default_rng(0)

        def nudged(x: jax.Array, largest: np.ndarray) -> jax.Array:
            if largest > 0:
                return x
            noise = (_NUDGE * draw.standard_normal(x.shape)).astype(x.dtype)
            return jax.device_put(noise, x.sharding)

        return jax.tree.map(nudged, params, jax.device_get(_largest(params)))

    def distance(self, accumulate: int) -> float:
        """How far the gradients of A micro-batches lie from those of one, over their norm."""
        one, other = self.of(1)[1], self.of(accumulate)[1]
        apart, norm = _norms(one, other)
        return float(apart) / max(float(norm), _SMALLEST)

    def without(self) -> tuple[list[str], list[str]]:
        """Paths of trained parameters with a gradient of zero, and with one that is not a
        number."""
        largest = _largest(self.of(1)[1])
        pairs, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(largest))
        named = [("/".join(str(key.key) for key in path), float(x)) for path, x in pairs]
        zero = [name for name, x in named if x == 0]
        return zero, [name for name, x in named if x != x or x == float("inf")]


@jax.jit
def _norms(one: Arrays, other: Arrays) -> tuple[jax.Array, jax.Array]:
    return optax.tree.norm(jax.tree.map(jnp.subtract, one, other)), optax.tree.norm(one)


@jax.jit
def _largest(grads: Arrays) -> Arrays:
    return jax.tree.map(lambda g: jnp.max(jnp.abs(g)), grads)


def _without_noise(trial: TrialRun) -> Task:
    """The task; where its loss draws noise, with the loss of its evaluation."""
    task = trial.task
    if not trial.noisy:
        return task
    quiet = task.evaluate

    def loss(model: nnx.Module, batch: Batch, key: jax.Array) -> Loss:
        model.eval()
        return task.loss(model, batch, key) if quiet is None else quiet(model, batch)

    return replace(task, loss=loss)


def adapters_at_start(trial: TrialRun, rows: Rows) -> Outcome:
    """Fresh adapters change nothing."""
    if trial.config.lora is None:
        return skipped("all of the model is trained")
    rows = _flat(rows)
    with_them, without = (trial.logprobs(rows, base=base) for base in (False, True))
    apart = float(np.abs(with_them - without)[rows["segment_ids"] > 0].max())
    if apart <= trial.tolerance:
        return passed(f"log-probs with and without adapters differ by {apart:.1g}")
    return failed(
        f"the fresh adapters already change the model: log-probs of its data's tokens differ by up "
        f"to {apart:.3g} nats from those of the base. Training would start from a worse model than "
        "the one you chose, and a reference by adapter switching would not be where the policy "
        "starts. Their second factor must begin at zero (and a DoRA magnitude at the norm of its "
        "weights): if adapters were attached or loaded by code of yours, let `adapters.attach` do "
        "it; to continue from trained adapters, merge them first with `fornax convert --merge-lora`"
    )


def packing(trial: TrialRun, rows: Rows) -> Outcome:
    """A packed row's log-probs are those of its examples alone."""
    packed = _flat(rows)
    pieces = [
        (row, span)
        for row in range(len(packed["tokens"]))
        for span in spans(packed["segment_ids"][row], packed["positions"][row])
    ]
    crowded = [row for row, _ in pieces]
    pieces = [(row, span) for row, span in pieces if crowded.count(row) > 1]
    if not pieces:
        return skipped("every example has a row of its own")
    pieces = pieces[: len(packed["tokens"])]
    alone = {name: np.zeros_like(x) for name, x in packed.items()}
    for place, (row, span) in enumerate(pieces):
        size = span.stop - span.start
        for name in ("tokens", "targets"):
            alone[name][place, :size] = packed[name][row, span]
        alone["segment_ids"][place, :size] = 1
        alone["positions"][place, :size] = np.arange(size)
    together_BT, apart_BT = trial.logprobs(packed), trial.logprobs(alone)
    worst = max(
        float(np.abs(together_BT[row, span] - apart_BT[place, : span.stop - span.start]).max())
        for place, (row, span) in enumerate(pieces)
    )
    if worst <= 10 * trial.tolerance:
        return passed(f"log-probs of {len(pieces)} packed examples and alone differ by {worst:.1g}")
    return failed(
        f"an example's log-probs change by up to {worst:.3g} nats with its neighbours in the row: "
        "examples see each other, because attention does not keep to segments or positions do not "
        "start again with each. The model would learn from contexts that it never has. Give each "
        "example its own row (--packing none) until that is fixed; with attention of your own, "
        "compare its output under `segment_ids_BT` with that of rows by themselves"
    )


def every_gradient(gradients: Gradients) -> Outcome:
    """Each trained parameter has a finite gradient that is not zero."""
    zero, wild = gradients.without()
    if wild:
        return failed(
            f"the gradient of {first_few(wild)} is not a finite number. Look for NaN or infinity "
            "in the weights of the model directory, or for a loss that divides by zero on this "
            "data; float16 weights are a common source: use --dtypes.params float32"
        )
    if zero:
        return failed(
            f"{first_few(zero)} would be trained and gets no gradient: the loss does not depend on "
            "it, so it would never move while its weight decay and its memory are paid for. It is "
            "not read in the forward pass, or something stops its gradient. Take it out of "
            "lora.targets (or of what the task trains), or fix the module that should use it"
        )
    return passed("every trained parameter has one")


def accumulation(gradients: Gradients) -> Outcome:
    """1, 2 and 4 micro-batches give one update."""
    limit = 1e-4 if gradients.trial.tolerance < 0.01 else 0.05
    losses = {count: gradients.of(count)[0] for count in (1, 2, 4)}
    worst = max(gradients.distance(count) for count in (2, 4))
    spread = max(abs(x - losses[1]) for x in losses.values())
    if worst <= limit and spread <= limit * max(1.0, abs(losses[1])):
        return passed(f"gradients of 1, 2 and 4 micro-batches differ by {worst:.1g} of their norm")
    shown = ", ".join(f"{x:.5g}" for x in losses.values())
    return failed(
        f"1, 2 and 4 micro-batches give other gradients (apart by {worst:.2g} of their norm) and "
        f"losses ({shown}): the loss takes a mean inside each micro-batch, so that a token counts "
        "for more where its micro-batch has fewer. The result would depend on --accumulate. Return "
        "sums in `Loss.total` and `Loss.weight` and let the trainer divide once; what needs a mean "
        "over the whole batch goes into `PostTraining.measure`"
    )


def reference(trial: TrialRun, rows: Rows, observed: dict[str, float]) -> Outcome:
    """The policy is its own reference before the first step.

    Args:
      trial: whose.
      rows: a first batch.
      observed: of reinforcement, the metrics of the round.
    """
    config = trial.config
    other = getattr(config, "reference_model", None)
    if other is not None:
        return skipped(f"the reference is another model, {other}")
    if isinstance(config, PreferenceConfig):
        if not isinstance(config.loss, DPO | RobustDPO | IPO):
            return skipped(f"{config.loss.type} has no reference")
        found = trial.evaluate(rows)
        apart = max(abs(found[f"reward_{n}"]) / config.loss.beta for n in ("chosen", "rejected"))
        if not isinstance(config.loss, IPO):  # whose rewards are averages over tokens already
            apart /= max(found["length_chosen"], found["length_rejected"], 1)
        expected = _start_of(config.loss, found)
        off = abs(found["loss"] - expected) > 1e-3 * max(1.0, expected) + trial.tolerance
        told = f"the loss starts at {found['loss']:.4f} (expected {expected:.4f})"
    elif isinstance(config, KTOConfig):
        found = trial.evaluate(rows)
        sizes = rows["loss_weights"][:, 0].sum(-1)
        rewards = max(abs(found[f"reward_{n}"]) for n in ("desirable", "undesirable"))
        apart = max(rewards / config.beta, abs(found["kl"])) / max(float(sizes.max()), 1)
        off, told = False, f"rewards start at {rewards:.2g}, the baseline at {found['kl']:.2g}"
    else:
        found = observed | (trial.evaluate(rows) if "ref_logps" in rows else {})
        kl = found.get("kl", found.get("kl_reference"))
        if kl is None:
            return skipped("nothing is compared with a reference")
        apart, off, told = abs(kl), False, f"the divergence starts at {kl:.2g} nats per token"
    if apart <= trial.tolerance and not off:
        return passed(told)
    return failed(
        f"the reference is not the policy before the first step: they lie {apart:.3g} nats per "
        f"token apart, and {told}. Rewards and divergences would count from a model that you do "
        "not train. Either the log-probs of the reference are of other weights, tokenizer or "
        "template (delete the run's reference/ folder and start it again), or the adapters are not "
        "neutral at the start (see the check of adapters), or the model draws dropout"
    )


def _start_of(loss: DPO | RobustDPO | IPO, found: dict[str, float]) -> float:
    """The loss of a policy that is its own reference."""
    if isinstance(loss, IPO):
        return 1 / (4 * loss.beta**2)
    return math.log(2) + getattr(loss, "nll_weight", 0.0) * found["nll_chosen"]


def _flat(rows: Rows) -> Rows:
    """tokens, targets, segment_ids, positions as [B, T]."""
    names = ("tokens", "targets", "segment_ids", "positions")
    return {name: rows[name].reshape(-1, rows[name].shape[-1]) for name in names}
