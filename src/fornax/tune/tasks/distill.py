"""Distillation: a student learns the teacher's distribution of every next token.

Legend: B rows, T tokens of a row, D student width, E teacher width, V vocabulary, K top tokens.
"""

import math
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from fornax.kernels import linear_cross_entropy
from fornax.models import Remat
from fornax.train.task import Batch, Loss, Task
from fornax.tune import losses
from fornax.tune.configs.distill import DistillConfig, TopLogits
from fornax.tune.data import load_examples
from fornax.tune.lesson import FrozenParam, Lesson
from fornax.tune.policy import Origin
from fornax.tune.policy import policy as policy_of
from fornax.tune.splits import described, load_splits

__all__ = ["distill_loss", "make"]


def distill_loss(
    model: Any,
    batch: Batch,
    config: DistillConfig,
    *,
    vocabulary: int | None = None,
    teacher_softcap: float | None = None,
    remat: str | Remat = "none",
    hard: bool = False,
) -> Loss:
    """Sums over trained tokens; logits [B, T, V] of neither model ever exist whole.

    Args:
      model: the student; with full logits it has the teacher's projection as `teacher_head` [E, V].
      batch: tokens, targets, segment_ids, positions int32, loss_weights float32 [B, T]; and either
        teacher_hidden [B, T, E] or teacher_ids int32, teacher_logprobs float32 [B, T, K].
      config: divergence, temperature, weights.
      vocabulary: outputs that both models have, of full logits.
      teacher_softcap: the teacher's cap of logits.
      remat: what the backward pass computes again.
      hard: whether to report the cross entropy of the data although it has no weight.

    Returns:
      The weight counts tokens. Metrics: `divergence`, `agreement` (both models
      like the same token best), and with `hard` or a `hard_weight`
      `cross_entropy` and `accuracy` on the data's tokens.
    """
    x_BTD = model.hidden(
        batch["tokens"], batch["positions"], batch["segment_ids"], consecutive=True, remat=remat
    )
    w_DV = model.output_weights().astype(x_BTD.dtype)
    weights_BT = batch["loss_weights"]
    softcap = model.config.final_logit_softcap
    if isinstance(config.logits, TopLogits):
        sums = losses.linear_topk_distillation(
            x_BTD,
            w_DV,
            batch["teacher_ids"],
            batch["teacher_logprobs"],
            weights_BT,
            divergence=config.divergence,
            beta=config.beta,
            temperature=config.temperature,
            tail=config.logits.tail,
            softcap=softcap,
        )
    else:
        sums = losses.linear_distillation(
            x_BTD,
            w_DV,
            batch["teacher_hidden"],
            model.teacher_head.get_value(),
            weights_BT,
            divergence=config.divergence,
            beta=config.beta,
            temperature=config.temperature,
            softcap=softcap,
            teacher_softcap=teacher_softcap,
            vocabulary=vocabulary,
        )
    weight = sums.weight_sum
    total = sums.loss_sum
    metrics = {
        "divergence": (jax.lax.stop_gradient(total), weight),
        "agreement": (sums.agreement_sum, weight),
    }
    if hard or config.hard_weight:
        data = linear_cross_entropy(x_BTD, w_DV, batch["targets"], weights_BT, softcap=softcap)
        metrics["cross_entropy"] = (jax.lax.stop_gradient(data.loss_sum), weight)
        metrics["accuracy"] = (data.correct_sum, weight)
        if config.hard_weight:
            total = total + config.hard_weight * data.loss_sum
    return Loss(total=total, weight=weight, metrics=metrics)


def make(config: DistillConfig, origin: Origin, out: Path) -> Task:
    """The task of `fornax tune distill`; its data is read and checked here.

    Raises:
      DataError: with file and line of examples that cannot be used.
      ConfigError: when the teacher's vocabulary is another, or adapters fit nothing.
    """
    splits = load_splits(config, origin, load_examples, full=config.loss_on == "all")
    policy = policy_of(config, origin)
    lesson = Lesson(config=config, origin=origin, policy=policy, splits=splits, out=out)
    remat = config.resolved_remat()
    compared = lesson.compared

    def loss(model: Any, batch: Batch, key: jax.Array) -> Loss:
        del key
        return distill_loss(model, batch, config, remat=remat, **compared)

    return Task(
        build=lesson.build,
        pretrained=lesson.pretrained,
        trained=nnx.All(policy.trained, nnx.Not(FrozenParam)),
        loss=loss,
        evaluate=lambda model, batch: distill_loss(model, batch, config, hard=True, **compared),
        batches=lesson.batches,
        follow=None if config.on_policy is None else lesson.follow,
        observe=None if config.on_policy is None else lesson.observe,
        summarise=_summarise,
        steps_per_epoch=lesson.steps_per_epoch(),
        unit="trained_tokens",
        notes=(policy.text, *lesson.notes, *described(splits)),
    )


def _summarise(means: dict[str, float]) -> dict[str, float]:
    return {**means, "perplexity": math.exp(min(means["cross_entropy"], 700.0))}
