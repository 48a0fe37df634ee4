"""What a run computes, by shapes alone: its task without data, the rows of a step, the passes
before a round. No data, tokenizer or weight is read.

Legend: B rows of a step, P pairs, T tokens of a row.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.filterlib import Filter

from fornax.config.errors import ConfigError
from fornax.models import Decoder
from fornax.train.task import Batch, Batches, Hosts, Loss, PostTraining, Task
from fornax.tune.config import (
    GRPOConfig,
    KTOConfig,
    PPOConfig,
    PreferenceConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
    TuneConfig,
)
from fornax.tune.methods import method_of
from fornax.tune.policy import ModelOrigin, policy
from fornax.tune.reward_model import scored
from fornax.tune.rl.forward import BothPolicies, Forward, ValueParam, attach_value_head
from fornax.tune.rl.task import Objective
from fornax.tune.tasks.grpo import grpo_objective
from fornax.tune.tasks.kto import LABEL, kto_baseline, kto_loss
from fornax.tune.tasks.pairs import PairLoss
from fornax.tune.tasks.ppo import ppo_objective
from fornax.tune.tasks.preference import needs_reference, preference_loss
from fornax.tune.tasks.reward_model import reward_loss
from fornax.tune.tasks.sft import sft_loss

__all__ = ["RunShapes", "run_shapes"]

Shapes = dict[str, jax.ShapeDtypeStruct]
_TOKENS = ("tokens", "targets", "segment_ids", "positions")


@dataclass(frozen=True, kw_only=True)
class RunShapes:
    """A run by shapes."""

    task: Task[Decoder]
    """Without batches."""
    batch: Shapes
    """The largest rows of a step, global: every row as long as `max_length`."""
    passes: Mapping[str, Forward]
    """Forward passes over the rows of each mini-batch before a round's first step, by name."""
    copies_reference: bool = False
    """Whether a frozen copy of the model stays in memory while it trains."""
    trained_parameters: int
    notes: tuple[str, ...] = ()
    """What is larger here than in the run, or is left out."""


@dataclass(frozen=True, kw_only=True)
class _Model:
    build: Callable[[nnx.Rngs], Decoder]
    trained: Filter


def run_shapes(config: TuneConfig, origin: ModelOrigin) -> RunShapes:
    """What `fornax tune` would run for `config`.

    Raises:
      ConfigError: a method whose steps depend on more than shapes; adapters that match no module.
    """
    made = scored(config, origin) if isinstance(config, RewardModelConfig) else None
    made = made or policy(config, origin)
    model = _Model(build=made.build, trained=made.trained)
    count = made.trained_parameters
    match config:
        case SFTConfig():
            loss = partial(sft_loss, config=config)
            batch = _rows((config.batch_size, config.max_length), "loss_weights")
            return RunShapes(
                task=_task(model, loss), batch=batch, passes={}, trained_parameters=count
            )
        case PreferenceConfig() | KTOConfig() | RewardModelConfig():
            return _pairs(config, model, count)
        case GRPOConfig():
            return _reinforced(config, model, count, grpo_objective(config))
        case PPOConfig():
            width = origin.model_config.hidden_size + 1
            model = _Model(
                build=lambda rngs: attach_value_head(made.build(rngs)),
                trained=nnx.Any(made.trained, ValueParam),
            )
            return _reinforced(config, model, count + width, ppo_objective(config))
    raise ConfigError(
        f"the steps of tune {method_of(config).name} are not known from its config alone: they "
        "depend on a teacher; describe the student's step as that of tune sft"
    )


def _pairs(
    config: PreferenceConfig | KTOConfig | RewardModelConfig, model: _Model, count: int
) -> RunShapes:
    shape = (config.batch_size, 2, config.max_length)
    batch = _rows(shape, "loss_weights")
    compared = isinstance(config, KTOConfig)
    loss: PairLoss[Decoder]
    if isinstance(config, RewardModelConfig):
        loss = partial(reward_loss, centre=config.centre)
    elif isinstance(config, KTOConfig):
        loss = partial(kto_loss, config=config)
        batch[LABEL] = _float(shape[:1])
    else:
        loss = partial(preference_loss, config=config.loss)
        compared = needs_reference(config.loss)
    notes = ["both answers of a pair are counted at max_length tokens"]
    if not isinstance(config, RewardModelConfig):
        notes.append("all positions of a row meet the vocabulary here: the run leaves out prompts")
        if compared and config.reference == "stored":
            batch["ref_logps"] = _float(shape[:2])
            notes.append("the pass that stores the reference's log-probabilities is not counted")
    task = _task(
        model,
        lambda decoder, rows, key: loss(decoder, rows, remat=config.resolved_remat()),
        measure=kto_baseline if isinstance(config, KTOConfig) else None,
    )
    return RunShapes(
        task=task, batch=batch, passes={}, trained_parameters=count, notes=tuple(notes)
    )


def _reinforced(config: RLConfig, model: _Model, count: int, objective: Objective) -> RunShapes:
    shape = (config.batch_size, config.max_length)
    weights = ("loss_mask", "sampler_logps", "advantages", "token_weights")
    batch = {**_rows(shape, *weights), "sequence_weights": _float(shape[:1])}
    task = _task(model, lambda decoder, rows, key: objective.loss(decoder, rows))
    abstract = nnx.eval_shape(lambda: model.build(nnx.Rngs(0)))
    for forward in filter(None, (objective.score, objective.reference)):
        found = nnx.eval_shape(forward, abstract, _rows(shape))
        batch |= {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in found.items()}
    if isinstance(config, PPOConfig):
        batch["returns"] = _float(shape)
    return RunShapes(
        task=task,
        batch=batch,
        passes=dict(_passes(config, objective)),
        copies_reference=objective.reference is not None and config.lora is None,
        trained_parameters=count,
        notes=(
            "each completion is counted in a row of its own, as long as max_length: the run packs "
            "shorter ones together",
        ),
    )


def _passes(config: RLConfig, objective: Objective) -> Iterator[tuple[str, Forward]]:
    """As `fornax.tune.rl.task` puts them together."""
    own, other = objective.score, objective.reference
    if other is not None and config.lora is not None:
        own, other = BothPolicies(own, other), None
    if own is not None:
        yield "score", own
    if other is not None:
        yield "score_reference", other


def _task(
    model: _Model,
    loss: Callable[[Decoder, Batch, jax.Array], Loss],
    measure: Callable[..., dict] | None = None,
) -> Task[Decoder]:
    def batches(split: str, hosts: Hosts) -> Batches:
        raise ValueError(f"a run by shapes has no {split} data")

    return Task(
        build=model.build,
        loss=loss,
        batches=batches,
        post=PostTraining(trained=model.trained, measure=measure),
    )


def _rows(shape: tuple[int, ...], *weights: str) -> Shapes:
    """int32 arrays that a decoder reads, and float32 `weights`, all of `shape`."""
    found = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in _TOKENS}
    return found | {name: _float(shape) for name in weights}


def _float(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
