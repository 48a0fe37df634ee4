"""Pretraining: predict the next token of packed documents.

Legend: B batch, T tokens of a row, D model width, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from fornax.config.errors import ConfigError
from fornax.data import DataConfig, Dataset, Mixture, open_batches, read_manifest
from fornax.data.remote import find_workers
from fornax.kernels import linear_cross_entropy
from fornax.mesh import Rules
from fornax.mesh.hosts import most
from fornax.models import (
    Decoder,
    DecoderConfig,
    PipelineConfig,
    Remat,
    abstract_decoder,
    flops_per_token,
)
from fornax.quant import check_training, plan_qat
from fornax.train.config import TrainConfig
from fornax.train.routing import settle_routing, with_routing
from fornax.train.task import Batch, Batches, Hosts, Loss, Task, in_eight_bits
from fornax.train.weights import load_decoder

__all__ = ["next_token_loss", "pretrain_task", "row_shapes"]


def pretrain_task(config: TrainConfig, *, read_data: bool = True) -> Task:
    """The task of `fornax train`.

    Args:
      config: the run, its model filled in.
      read_data: whether to look at the dataset; False for a run that is only compiled, whose data
        may be elsewhere.
    """
    model = config.model
    if model is None:
        raise ValueError("resolve config.model from init_from before making the task")

    check_training(config.quant, model, config.mesh)
    if read_data:
        check_vocabulary(config.data, model)
    per_byte = tokens_per_byte(config.data) if read_data else None

    def build(rngs: nnx.Rngs) -> nnx.Module:
        return Decoder(
            model,
            rngs=rngs,
            dtype=config.dtypes.param_dtype,
            compute_dtype=config.dtypes.compute_dtype,
        )

    remat = config.resolved_remat()

    def loss(decoder: Any, batch: Batch, key: jax.Array) -> Loss:
        return next_token_loss(
            decoder,
            batch,
            remat=remat,
            z_loss=config.z_loss,
            pipeline=config.pipeline,
            mtp_weight=config.mtp_weight,
        )

    def batches(split: str, hosts: Hosts) -> Batches:
        return open_batches(
            config.data,
            batch_size=config.batch_size,
            seq_len=config.seq_len,
            split=split,
            process_index=hosts.index,
            process_count=hosts.count,
            row_multiple=hosts.multiple,
            agree=most,
            workers=find_workers(),
        )

    def pretrained(mesh: Mesh, rules: Rules) -> nnx.Module:
        return load_decoder(
            str(config.init_from),
            dtype=config.dtypes.param_dtype,
            compute_dtype=config.dtypes.compute_dtype,
            mesh=mesh,
            rules=rules,
            mtp=config.mtp_weight is not None,
        )

    task: Task[Any] = Task(
        build=build,
        loss=loss,
        evaluate=lambda decoder, batch: next_token_loss(
            decoder,
            batch,
            balance=False,
            pipeline=config.pipeline,
            mtp_weight=None if config.mtp_weight is None else 0.0,
        ),
        batches=batches,
        settle=None if model.experts is None else settle_routing,
        left_out=tuple((r.start, r.stop) for r in config.data.skip_steps),
        summarise=lambda means: _summarise(means, per_byte),
        pretrained=None if config.init_from is None else pretrained,
        unit="tokens",
        flops_per_unit=flops_per_token(model, config.seq_len),
        quantizer=plan_qat(abstract_decoder(model), config.quant),
    )
    return in_eight_bits(task, config.quant, model, config.seq_len)


def row_shapes(config: TrainConfig, hosts: Hosts) -> dict[str, jax.ShapeDtypeStruct]:
    """What a host's rows of one step look like, without reading any."""
    shape = (hosts.size(config.batch_size), config.seq_len)
    numbers = ("tokens", "targets", "segment_ids", "positions")
    shapes = {name: jax.ShapeDtypeStruct(shape, np.int32) for name in numbers}
    return {**shapes, "loss_weights": jax.ShapeDtypeStruct(shape, np.float32)}


def check_vocabulary(data: DataConfig, model: DecoderConfig) -> None:
    """Refuse tokens the model has no embedding for: an index beyond an array is not an error to
    XLA.

    Raises:
      ConfigError: naming the dataset.
    """
    for whole in (data.source, data.eval_source):
        sources = [p.source for p in whole.parts] if isinstance(whole, Mixture) else [whole]
        for source in sources:
            if not isinstance(source, Dataset) or not source.path:
                continue
            manifest = read_manifest(source.path, data.storage())
            if manifest.vocab_size is not None and manifest.vocab_size > model.vocab_size:
                raise ConfigError(
                    f"{source.path} has {manifest.vocab_size} token ids and model.vocab_size is "
                    f"{model.vocab_size}; set it to {manifest.vocab_size} or more"
                )


def tokens_per_byte(data: DataConfig) -> float | None:
    """Tokens for each byte of text in the evaluation split, where `dataset.json` says so."""
    source = data.source if data.eval_source is None else data.eval_source
    if not isinstance(source, Dataset) or not source.path:
        return None
    split = read_manifest(source.path, data.storage()).splits
    held_out = split.get("eval")
    if held_out is None or not held_out.text_bytes or not held_out.tokens:
        return None
    return held_out.tokens / held_out.text_bytes


def _summarise(means: dict[str, float], per_byte: float | None) -> dict[str, float]:
    """Adds perplexity, and bits per byte: nats per token / ln 2 * tokens per byte of the split.

    A document's first token is predicted from nothing and not scored; it counts at the mean.
    """
    found = {**means, "perplexity": math.exp(min(means["loss"], 700.0))}
    if per_byte is not None:
        found["bits_per_byte"] = means["loss"] / math.log(2) * per_byte
    return found


def next_token_loss(
    decoder: Decoder,
    batch: Batch,
    *,
    remat: str | Remat = "none",
    z_loss: float = 0.0,
    disturb: Callable[[jax.Array], jax.Array] | None = None,
    balance: bool = True,
    pipeline: PipelineConfig | None = None,
    mtp_weight: float | None = None,
) -> Loss:
    """Weighted cross entropy of the next token, in nats; logits [B, T, V] never exist whole.

    Args:
      decoder: the model.
      batch: tokens, targets, segment_ids, positions int32 [B, T], positions counting from 0 in each
        document; loss_weights float32 [B, T].
      remat: what the backward pass computes again.
      z_loss: weight of the squared log-normaliser, part of `total` and of the metric `z_loss`.
      disturb: applied to the embeddings [B, T, D].
      balance: whether the losses of a mixture's routers are part of `total`, and its experts have
        the room that `capacity_factor` says, as in pretraining. False: the task's loss alone, of
        the model as it is served, which drops no token.
      pipeline: see `Decoder.hidden_and_routing`.
      mtp_weight: lambda of the loss of the modules that predict further tokens, see
        `add_further_tokens`; 0 only measures them, None leaves them out.

    Returns:
      Sums over tokens; the metric `accuracy`; `cross_entropy` when more is part of `total`, which
      are `z_loss` and those of `add_further_tokens`; of a model with experts also the metrics of
      `with_routing`.
    """
    inputs = (batch["tokens"], batch["positions"], batch["segment_ids"])
    ahead: list[jax.Array] = []
    if mtp_weight is None:
        x_BTD, routing = decoder.hidden_and_routing(
            *inputs,
            consecutive=True,
            remat=remat,
            pipeline=pipeline,
            disturb=disturb,
            drop_tokens=balance,
        )
    else:
        x_BTD, ahead, routing = decoder.hidden_ahead(
            *inputs, consecutive=True, remat=remat, disturb=disturb, drop_tokens=balance
        )
    with jax.named_scope("loss"):
        sums = linear_cross_entropy(
            x_BTD,
            decoder.output_weights().astype(x_BTD.dtype),
            batch["targets"],
            batch["loss_weights"],
            z_loss=z_loss,
            softcap=decoder.config.final_logit_softcap,
        )
    weight = sums.weight_sum
    metrics = {"accuracy": (sums.correct_sum, weight)}
    if z_loss:
        metrics["z_loss"] = (sums.z_loss_sum, weight)
    if z_loss or mtp_weight:
        metrics["cross_entropy"] = (jax.lax.stop_gradient(sums.loss_sum) - sums.z_loss_sum, weight)
    loss = Loss(total=sums.loss_sum, weight=weight, metrics=metrics)
    if mtp_weight is not None:
        with jax.named_scope("mtp_loss"):
            loss = add_further_tokens(loss, decoder, batch, ahead, mtp_weight)
    return with_routing(loss, decoder, routing, balance=balance)


def add_further_tokens(
    loss: Loss, decoder: Decoder, batch: Batch, ahead: list[jax.Array], mtp_weight: float
) -> Loss:
    """The loss with that of multi-token prediction: lambda over the number of modules, times the
    sum of their losses (DeepSeek-AI 2024, arXiv:2412.19437, equations 24 and 25).

    Module k predicts from each token the (k + 1)-th after it, where that and all between are of the
    token's document and in its row. As in the report each module's loss is divided by the number of
    all tokens that are predicted, not of those that it predicts.

    Args:
      loss: of the next token.
      decoder: the model.
      batch: that of `next_token_loss`.
      ahead: each module's output [B, T, D], from `Decoder.hidden_ahead`.
      mtp_weight: lambda.

    Returns:
      The loss with the metrics `mtp_loss` and `mtp_accuracy`: the means of cross entropy, and of
      being right, over all tokens that modules predict.
    """
    segments_BT = batch["segment_ids"]
    index_T = jnp.arange(segments_BT.shape[1])
    found = []
    for count, x_BTD in enumerate(ahead, start=1):

        def later(x_BT: jax.Array, count: int = count) -> jax.Array:
            return jnp.roll(x_BT, -count, axis=1)

        same_BT = (later(segments_BT) == segments_BT) & (index_T < len(index_T) - count)
        sums = linear_cross_entropy(
            x_BTD,
            decoder.output_weights().astype(x_BTD.dtype),
            later(batch["targets"]),
            later(batch["loss_weights"]) * same_BT,
            softcap=decoder.config.final_logit_softcap,
        )
        found.append((sums.loss_sum, sums.correct_sum, sums.weight_sum))
    total, correct, weight = (jnp.stack(parts).sum() for parts in zip(*found, strict=True))
    metrics = {
        "mtp_loss": (jax.lax.stop_gradient(total), weight),
        "mtp_accuracy": (correct, weight),
    }
    return replace(
        loss,
        total=loss.total + mtp_weight / len(ahead) * total if mtp_weight else loss.total,
        metrics={**loss.metrics, **metrics},
    )
