"""A tiny Qwen3-MoE, and what it computes written down plainly, in float64.

Legend: T tokens, D width, V vocabulary, E experts, k experts per token, L layers with experts.
"""

import functools
import math
from typing import Any

import jax
import numpy as np
from flax import nnx

from fornax.models import Decoder, DecoderConfig, ExpertsConfig

EXPERTS = ExpertsConfig(num_experts=8, experts_per_token=2, intermediate_size=24, balance_loss=0.1)
CONFIG = DecoderConfig(
    vocab_size=290,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qk_norm="head",
    tie_embeddings=False,
    max_position_embeddings=128,
    initializer_range=0.3,
    eos_token_ids=(1,),
    family="qwen3_moe",
    mlp_pattern=("mlp", "experts", "experts"),
    experts=EXPERTS,
)


@functools.cache
def decoder() -> Decoder:
    return Decoder(CONFIG, rngs=nnx.Rngs(0))


def wide(state: nnx.State) -> Any:
    """Parameters as nested dicts of numpy arrays in float64."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(state))


def reference(params: Any, tokens_T: Any, routed_TLk: Any = None, xp: Any = np) -> tuple[Any, Any]:
    """Log-probabilities [T, V] after each token of one sequence, and the experts taken [T, L, k].

    Every expert runs for every token; the weights of those that it does not take are 0.

    Args:
      params: of `decoder`, from `wide`.
      tokens_T: token ids; padding at the end changes nothing before it.
      routed_TLk: the experts to take; None: the best.
      xp: numpy, or jax.numpy for gradients.
    """
    layers, taken = params["layers"], []
    x = params["embed"]["embedding"][tokens_T]
    for number, kind in enumerate(("mlp", "experts", "experts")):
        h = norm(x, layers["attention_norm"]["scale"][number], xp)
        x = x + attention(layers["attention"], number, h, xp)
        h = norm(x, layers["mlp_norm"]["scale"][number], xp)
        if kind == "mlp":
            gate, up, down = (layers["mlp"][name]["kernel"][0] for name in ("gate", "up", "down"))
            x = x + (silu(h @ gate, xp) * (h @ up)) @ down
            continue
        own = {name: layers["experts"][name]["kernel"][number - 1] for name in layers["experts"]}
        scores_TE = softmax(h @ own["router"], xp)
        chosen_Tk = xp.argsort(-scores_TE, axis=-1)[:, :2]
        if routed_TLk is not None:
            chosen_Tk = routed_TLk[:, number - 1]
        taken.append(chosen_Tk)
        weights_TE = scores_TE * xp.any(chosen_Tk[:, :, None] == np.arange(8), axis=1)
        weights_TE = weights_TE / xp.sum(weights_TE, axis=-1, keepdims=True)
        inner_TEF = silu(xp.einsum("td,edf->tef", h, own["gate"]), xp)
        inner_TEF = inner_TEF * xp.einsum("td,edf->tef", h, own["up"])
        x = x + xp.einsum("te,tef,efd->td", weights_TE, inner_TEF, own["down"])
    logits_TV = norm(x, params["final_norm"]["scale"], xp) @ params["lm_head"]["kernel"]
    return xp.log(softmax(logits_TV, xp)), xp.stack(taken, axis=1)


def norm(x: Any, scale: Any, xp: Any) -> Any:
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def silu(x: Any, xp: Any) -> Any:
    return x / (1 + xp.exp(-x))


def softmax(x: Any, xp: Any) -> Any:
    e = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    return e / xp.sum(e, axis=-1, keepdims=True)


def attention(of: Any, number: int, h_TD: Any, xp: Any) -> Any:
    q, k, v = (xp.einsum("td,dnh->tnh", h_TD, of[name]["kernel"][number]) for name in "qkv")
    q = turned(norm(q, of["q_norm"]["scale"][number], xp), xp)
    k = turned(norm(k, of["k_norm"]["scale"][number], xp), xp)
    k, v = xp.repeat(k, 2, axis=1), xp.repeat(v, 2, axis=1)
    scores = xp.einsum("tnh,snh->nts", q, k) / math.sqrt(8)
    seen = np.tril(np.ones(scores.shape[1:], bool))
    shares = softmax(xp.where(seen, scores, -1e30), xp)
    return xp.einsum("nts,snh,nhd->td", shares, v, of["o"]["kernel"][number])


def turned(x_TNH: Any, xp: Any) -> Any:
    """Rotary embedding of base 10,000, halves paired."""
    angle = np.arange(len(x_TNH))[:, None] * 10_000.0 ** (-np.arange(4) / 4)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    one, two = x_TNH[..., :4], x_TNH[..., 4:]
    return xp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)
