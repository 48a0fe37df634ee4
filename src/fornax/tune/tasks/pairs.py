"""Tasks of pairs of completions: their rows, log-probabilities beside a reference's, means.

Legend: N examples of a split or sequences, P rows of a batch, T tokens of a row, K kept positions.

Prompts need no logits: with `keep` [N, K], the positions whose next token belongs to the
completion, only those go through the vocabulary projection, the largest product of a small model.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fornax import adapters
from fornax.mesh import fit_mesh, make_mesh
from fornax.models import Decoder, Remat, Routing, token_logprobs
from fornax.quant import check_training, quantize_products
from fornax.train.task import Batch, Batches, Hosts, Loss, Means, PostTraining, Task
from fornax.tune.config import ReferenceConfig, TuneConfig
from fornax.tune.data import ExtendedStream, Loaded, LoaderOptions, PairTokens, preference_batches
from fornax.tune.data.tokenizer import check_same_tokens
from fornax.tune.losses import average
from fornax.tune.policy import Origin, Policy, read_origin
from fornax.tune.policy import policy as policy_of
from fornax.tune.splits import described, loader_options
from fornax.tune.stores import (
    ReferenceKey,
    data_fingerprint,
    for_each_example,
    stored,
    weights_fingerprint,
)

__all__ = [
    "Completions",
    "PairRows",
    "completion_logprobs",
    "keep_positions",
    "kept_room",
    "mean_over",
    "pair_task",
    "reference_logprobs",
    "reference_of",
]


Rows = dict[str, np.ndarray]
ModelT = TypeVar("ModelT", bound=nnx.Module, contravariant=True)


class PairLoss(Protocol[ModelT]):
    """Sums over the examples of a batch."""

    def __call__(self, model: ModelT, batch: Batch, *, remat: str | Remat = "none") -> Loss:
        """The loss and its metrics; `remat` is what the backward pass computes again."""
        ...


def pair_task(
    config: TuneConfig,
    policy: Policy,
    splits: Mapping[str, Loaded[PairTokens]],
    *,
    loss: PairLoss[Decoder],
    batches: Callable[[str, Hosts], Batches],
    unit: str,
    measure: Callable[[Decoder, Batch], Means] | None = None,
    notes: tuple[str, ...] = (),
) -> Task:
    """A task whose steps take `config.batch_size` examples each.

    Args:
      config: the run.
      policy: the model that is trained.
      splits: `train`, and `eval` where there is one.
      loss: of training, and without `remat` of evaluation.
      batches: rows of a split.
      unit: what the loss's weight counts.
      measure: see `PostTraining.measure`.
      notes: lines for the log, after those on model and data.
    """
    remat = config.resolved_remat()
    return Task(
        build=policy.build,
        pretrained=policy.pretrained,
        loss=lambda model, batch, key: loss(model, batch, remat=remat),
        evaluate=lambda model, batch: loss(model, batch),
        batches=batches,
        unit=unit,
        post=PostTraining(
            trained=policy.trained,
            measure=measure,
            steps_per_epoch=len(splits["train"]) / config.batch_size,
            notes=(policy.text, *described(splits), *notes),
        ),
    )


def mean_over(loss: jax.Array, metrics: Mapping[str, jax.Array], weights: jax.Array) -> Loss:
    """The sums whose mean is that of examples with these weights.

    Args:
      loss: float32 [P], of each example.
      metrics: the same by name.
      weights: float32 [P]; an example of weight 0 may have any loss.
    """
    weight = jnp.sum(weights)

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(weights > 0, x, 0) * weights)

    return Loss(
        total=total(loss),
        weight=weight,
        metrics={name: (total(value), weight) for name, value in metrics.items()},
    )


class Completions(NamedTuple):
    """Log-probs of completions; the leading dimensions are those of the batch."""

    logps: jax.Array
    """float32: the sum of log-probs over the completion's tokens, its EOS included."""
    lengths: jax.Array
    """float32: tokens of the completion."""
    routing: Routing | None = None
    """What the routers did with the whole rows; None without experts."""

    @property
    def averages(self) -> jax.Array:
        """Log-prob per token; 0 for an empty completion."""
        return average(self.logps, self.lengths)


def completion_logprobs(
    model: Decoder, batch: Batch, *, remat: str | Remat = "none"
) -> Completions:
    """Sums of log-probs of completions, and their lengths.

    Args:
      model: a decoder, with adapters or without.
      batch: tokens, targets, segment_ids, positions int32 [..., T], loss_weights float32 [..., T]
        (above 0 where the target is the completion's); optionally keep int32 [..., K], from
        `keep_positions`.
      remat: what the backward pass computes again.

    Returns:
      Sums and lengths of shape [...].
    """
    shape = batch["tokens"].shape[:-1]

    def flat(name: str) -> jax.Array:
        return batch[name].reshape(-1, batch[name].shape[-1])

    weights_NT = flat("loss_weights")
    found = token_logprobs(
        model,
        flat("tokens"),
        jnp.where(weights_NT > 0, flat("targets"), -1),  # a negative target counts 0
        positions_BT=flat("positions"),
        segment_ids_BT=flat("segment_ids"),
        keep_BK=flat("keep") if "keep" in batch else None,
        remat=remat,
    )
    return Completions(
        logps=jnp.sum(found.logprobs, axis=-1).reshape(shape),
        lengths=jnp.sum(weights_NT > 0, axis=-1).astype(jnp.float32).reshape(shape),
        routing=found.routing,
    )


def reference_logprobs(model: Decoder, batch: Batch) -> jax.Array:
    """Sums of the reference's log-probs, float32 [...], without a gradient.

    Those that the rows bring as `ref_logps`, or the model's without its adapters.
    """
    if "ref_logps" in batch:
        return batch["ref_logps"]
    with adapters.disabled(model):
        return jax.lax.stop_gradient(completion_logprobs(model, batch).logps)


def kept_room(longest: int, length: int) -> int:
    """How many positions to keep in rows of `length` whose completions are `longest` at most: an
    eighth of the row, or the next multiple of it, so that few shapes are compiled."""
    step = max(1, length // 8)
    return min(length, -(-max(longest, 1) // step) * step)


def keep_positions(loss_weights: np.ndarray, room: int) -> np.ndarray:
    """Where a row's weights are above 0, in order, then other positions to fill `room`.

    Args:
      loss_weights: float32 [..., T], at most `room` of a row above 0.
      room: K.

    Returns:
      int32 [..., K].
    """
    order = np.argsort(loss_weights <= 0, axis=-1, kind="stable")
    return np.ascontiguousarray(order[..., :room], dtype=np.int32)


def with_kept_positions(rows: Rows, longest: int) -> Rows:
    """Rows that name the positions which the vocabulary projection needs.

    How many that are depends on the length of the rows alone, so that there is one program for
    each length.

    Args:
      rows: of pairs.
      longest: tokens of the longest completion of the data.

    Returns:
      `keep` int32 [..., K], where that leaves positions out.
    """
    length = rows["tokens"].shape[-1]
    room = kept_room(longest, length)
    return {"keep": keep_positions(rows["loss_weights"], room)} if room < length else {}


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Whose log-probs are stored, and where."""

    policy: Policy
    """The reference's weights, as they are loaded."""
    path: str
    """Where they are from."""
    out: Path
    """The run directory."""


def reference_of(
    config: ReferenceConfig, origin: Origin, policy: Policy, out: Path
) -> Reference | None:
    """The reference whose log-probs are stored: the policy as it starts, or `reference_model`;
    None where it is the policy without its adapters.

    Raises:
      ConfigError: when that model's tokens are not the policy's.
    """
    if config.reference != "stored":
        return None
    if config.reference_model is None:
        return Reference(policy=policy, path=config.model, out=out)
    model = config.reference_model
    other = dataclasses.replace(
        config, model=model, lora=None, reference_model=None, freeze_router=False
    )
    theirs = read_origin(other)
    check_training(config.quant, theirs.model_config, config.mesh)
    check_same_tokens(
        theirs.tokenizer,
        origin.tokenizer,
        names=("reference_model", model),
        others=("model", config.model),
    )
    return Reference(policy=policy_of(other, theirs), path=model, out=out)


@dataclass(kw_only=True)
class PairRows:
    """`Task.batches` of pairs."""

    config: TuneConfig
    splits: Mapping[str, Loaded[PairTokens]]
    """`train`, and `eval` where there is one."""
    columns: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    """For each split, further numbers of its examples, by name, [N, ...]."""
    reference: Reference | None = None
    """Whose log-probs each row brings as `ref_logps` [P, 2]; None: none."""
    _logps: dict[str, np.ndarray] = field(default_factory=dict)

    def __call__(self, split: str, hosts: Hosts) -> Batches:
        """A stream of a split."""
        if self.reference is not None and not self._logps:
            self._logps = self._compute(self.reference, hosts)
        columns = dict(self.columns.get(split, {}))
        if self._logps:
            columns["ref_logps"] = self._logps[split]
        return self._open(
            split, loader_options(self.config, hosts, train=split == "train"), columns
        )

    def _open(
        self, split: str, options: LoaderOptions, columns: Mapping[str, np.ndarray]
    ) -> ExtendedStream:
        loaded = self.splits[split]
        stream = preference_batches(loaded, options, self.config.max_length, columns=columns)
        longest = max(_trained(pair) for pair in loaded.items)
        return ExtendedStream(stream, lambda rows: with_kept_positions(rows, longest))

    def _compute(self, reference: Reference, hosts: Hosts) -> dict[str, np.ndarray]:
        """Log-probs of every example of every split: from disk, or by one pass of the model."""
        config = self.config
        shapes = nnx.state(nnx.eval_shape(lambda: reference.policy.build(nnx.Rngs(0))))
        mesh = make_mesh(fit_mesh(config.mesh, shapes, jax.device_count()))
        rules = config.mesh.resolved_rules()
        weights = weights_fingerprint(reference.path)
        models: list[Decoder] = []

        def logprobs(model: Decoder, batch: Batch) -> jax.Array:
            # By the policy's own products, so that equal weights give equal numbers.
            return completion_logprobs(quantize_products(model, config.quant, None), batch).logps

        def compute(split: str) -> np.ndarray:
            if not models:
                models.append(reference.policy.pretrained(mesh, rules))
            return for_each_example(
                models[0],
                logprobs,
                self._open(split, loader_options(config, hosts, train=False), {}),
                len(self.splits[split].items),
                hosts=hosts,
                mesh=mesh,
                rules=rules,
            )

        found = {}
        for split, loaded in self.splits.items():
            key = ReferenceKey(weights=weights, data=_fingerprint(loaded), compute=_how(config))
            found[split] = stored(reference.out, split, key, lambda split=split: compute(split))
        return found


def _trained(pair: PairTokens) -> int:
    return max(pair.chosen.trained, pair.rejected.trained)


def _fingerprint(loaded: Loaded[PairTokens]) -> str:
    sides = (side for pair in loaded.items for side in (pair.chosen, pair.rejected))
    return data_fingerprint(array for side in sides for array in (side.tokens, side.mask))


def _how(config: TuneConfig) -> str:
    quantized = None if config.lora is None else config.lora.quantize
    how = f"params {config.dtypes.params}, compute {config.dtypes.compute}, base {quantized}"
    if config.quant.scheme is not None:
        how += f", products {config.quant.scheme} without {list(config.quant.exclude)}"
    return how
