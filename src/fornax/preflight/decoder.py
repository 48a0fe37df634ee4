"""Pretraining of decoders, as a preflight sees it.

The reference shares the parameters of the model with the trainer, and of its code embeddings, MLPs
and the output projection: attention is the formula's, of latents without keys and values made of
them, a linear layer's state goes from token to token, layers follow one another without a loop,
every expert sees every token, each module that predicts further tokens has its loss of what stands
so many tokens on, and logits exist whole.

Legend: B rows, T tokens of a row, D model width, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fornax.models import Decoder, Routing, abstract_decoder, router_losses
from fornax.models.attention import Attention
from fornax.models.experts import Experts
from fornax.models.gated_delta import GatedDeltaNet
from fornax.models.latent import LatentAttention
from fornax.models.mamba import Mamba2
from fornax.preflight.attention import PlainAttention
from fornax.preflight.experts import PlainExperts
from fornax.preflight.latent import PlainLatent
from fornax.preflight.layers import plain_hidden
from fornax.preflight.linear import PlainGatedDelta, PlainMamba2
from fornax.preflight.shrink import Shrunk
from fornax.preflight.shrink_decoder import shrink
from fornax.preflight.subject import PlainLoss, Rows, Subject
from fornax.train import Hosts, Loss, Task, TrainConfig, pretrain_task

__all__ = ["DECODER"]


def _task(config: TrainConfig, implementation: str | None = None) -> Task[Decoder]:
    task = pretrain_task(config)
    return task if implementation is None else _forcing(task, implementation)


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


def _plain_loss_of(config: TrainConfig) -> PlainLoss:
    def loss(decoder: Decoder, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        _make_plain(decoder)
        return plain_loss(decoder, batch, config.z_loss, config.mtp_weight)

    return loss


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


def first_rows(config: TrainConfig) -> Rows:
    """The first batch of a config, packed as it packs, with padding and unequal rows.

    Every second row ends after a third: micro-batches, and devices, then hold unequal weights, so
    that a mean of means is not the mean.
    """
    batches = pretrain_task(config).batches("train", Hosts())
    try:
        rows = next(batches)
    finally:
        batches.close()
    B, T = rows["tokens"].shape
    ends = np.array([T - row % 5 if row % 2 == 0 else T // 3 + row % 3 for row in range(B)])
    inside_BT = np.arange(T) < ends[:, None]
    return {name: np.where(inside_BT, x, 0).astype(x.dtype) for name, x in rows.items()}


def _terms(config: TrainConfig, rows: Rows) -> int:
    model = config.model
    assert model is not None
    return max(
        rows["tokens"].size,
        model.hidden_size,
        *model.mlp_widths,
        model.vocab_size,
        model.num_heads * model.head_width,
    )


def _without_remat(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, remat="none", remat_save=(), remat_offload=())


def _shrink(config: TrainConfig, quick: bool) -> Shrunk[TrainConfig]:
    from fornax.quant import QuantConfig

    floats = dataclasses.replace(config, quant=QuantConfig())
    return shrink(floats, depth="quick" if quick else "whole")


def _model(config: TrainConfig) -> Decoder:
    assert config.model is not None
    return abstract_decoder(config.model, dtype=config.dtypes.param_dtype)


def _sizes(config: TrainConfig) -> dict[str, Any]:
    model = config.model
    assert model is not None
    names = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "head_width")
    return {
        **{name: getattr(model, name) for name in names},
        "kv_heads": model.kv_heads,
        "vocab_size": model.vocab_size,
        "layers": [dataclasses.asdict(kind) for kind in model.layer_kinds()],
        "seq_len": config.seq_len,
        "batch_size": config.batch_size,
        "summary": f"{model.num_layers} layers, width {model.hidden_size}, {model.num_heads} heads "
        f"over {model.kv_heads} key heads, {config.batch_size} rows of {config.seq_len} tokens",
    }


def _left_out(config: TrainConfig) -> str | None:
    if config.quant.scheme is None:
        return None
    return (
        f"products in {config.quant.scheme}: all checks multiply in {config.dtypes.compute}, for "
        "rounding to codes changes a loss by more than a fault of the mesh may"
    )


DECODER = Subject(
    shrink=_shrink,
    task=_task,
    model=_model,
    plain_loss=_plain_loss_of,
    rows=first_rows,
    weights="loss_weights",
    content="tokens",
    zeros=None,
    terms=_terms,
    without_remat=_without_remat,
    sizes=_sizes,
    left_out=_left_out,
)
