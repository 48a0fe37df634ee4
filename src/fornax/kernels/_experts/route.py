"""The choice of a router: which experts a token runs through, and with which weights.

Legend: M tokens, E experts, k experts of a token, G groups of experts.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import KernelError
from fornax.kernels._experts import native

__all__ = ["route_top_k"]


@dataclass(frozen=True)
class _Rule:
    """The static arguments of `route_top_k`."""

    k: int
    score: str
    num_groups: int
    groups_per_token: int
    group_score: str
    normalize: bool
    normalize_eps: float
    scale: float


def route_top_k(
    logits_ME: jax.Array,
    k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    selection_bias_E: jax.Array | None = None,
    num_groups: int = 1,
    groups_per_token: int = 1,
    group_score: Literal["max", "top2"] = "max",
    normalize: bool = True,
    normalize_eps: float = 0.0,
    scale: float = 1.0,
    given_Mk: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Choose each token's k best experts, and weigh them by their scores.

    On one CPU one native call does it all, where XLA has a dozen operations; elsewhere, without a
    C++ compiler, with given experts and for a number of tokens that is open in an exported function
    it is XLA's. The gradient is that of the formula, through the weights.

    Args:
        logits_ME: float32.
        k: experts of a token.
        score: softmax over all experts, or each logit's sigmoid.
        selection_bias_E: float32, added to the scores for the choice only (Wang et al. 2024).
        num_groups: G, of experts that are consecutive.
        groups_per_token: groups that a token may choose from (DeepSeek-V2, section 2.2.2).
        group_score: a group's best score, or the sum of its two best.
        normalize: whether weights are divided by their sum.
        normalize_eps: added to that sum.
        scale: factor on the weights.
        given_Mk: integers, experts chosen before; below 0 where they are to be chosen.

    Returns:
        float32 weights [M, k] and int32 experts [M, k], the best first, of equal ones the first.

    Raises:
        KernelError: logits that are not float32 [M, E], or k beyond the experts to choose from.
    """
    if logits_ME.ndim != 2 or logits_ME.dtype != jnp.float32:
        raise KernelError(
            f"route_top_k: logits{logits_ME.shape} of {logits_ME.dtype} must be float32 [M, E]"
        )
    E = logits_ME.shape[1]
    if E % num_groups or not 0 < k <= E // num_groups * groups_per_token:
        raise KernelError(
            f"route_top_k: k={k} must be above 0 and at most the experts that a token can choose "
            f"from: {groups_per_token} of {num_groups} groups that divide {E} experts"
        )
    rule = _Rule(
        k,
        score,
        num_groups,
        groups_per_token,
        group_score,
        normalize,
        float(normalize_eps),
        float(scale),
    )
    if given_Mk is not None:
        return _plain(rule, logits_ME, selection_bias_E, given_Mk)
    return _route(rule, logits_ME, selection_bias_E)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _route(
    rule: _Rule, logits_ME: jax.Array, bias_E: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    if not native.takes(logits_ME):
        return _plain(rule, logits_ME, bias_E)
    shape = (logits_ME.shape[0], rule.k)
    results = (jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32))
    call = jax.ffi.ffi_call("fornax_route", results, vmap_method="sequential")
    weights_Mk, experts_Mk = call(
        logits_ME,
        jnp.zeros(0, jnp.float32) if bias_E is None else bias_E.astype(jnp.float32),
        groups=np.int64(rule.num_groups),
        open=np.int64(rule.groups_per_token),
        sigmoid=np.bool_(rule.score == "sigmoid"),
        two_best=np.bool_(rule.group_score == "top2"),
        normalise=np.bool_(rule.normalize),
        eps=np.float32(rule.normalize_eps),
        scale=np.float32(rule.scale),
    )
    return weights_Mk, experts_Mk


@_route.defjvp
def _route_jvp(rule: _Rule, primals: tuple, tangents: tuple) -> tuple:
    return jax.jvp(functools.partial(_plain, rule), primals, tangents)


def _plain(
    rule: _Rule, logits_ME: jax.Array, bias_E: jax.Array | None, given_Mk: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    if rule.score == "softmax":
        scores_ME = jax.nn.softmax(logits_ME, axis=-1)
    else:
        scores_ME = jax.nn.sigmoid(logits_ME)
    if bias_E is not None:
        ranked_ME = scores_ME + bias_E
    elif rule.groups_per_token == rule.num_groups:
        ranked_ME = logits_ME  # in the scores' order, and without ties where those round to one
    else:
        ranked_ME = scores_ME
    ranked_ME = _open_groups(rule, jax.lax.stop_gradient(ranked_ME))
    _, experts_Mk = jax.lax.top_k(ranked_ME, rule.k)
    if given_Mk is not None:
        experts_Mk = jnp.where(given_Mk >= 0, given_Mk.astype(experts_Mk.dtype), experts_Mk)
    weights_Mk = jnp.take_along_axis(scores_ME, experts_Mk, axis=-1)
    if rule.normalize:
        total_M1 = jnp.sum(weights_Mk, axis=-1, keepdims=True)
        weights_Mk = weights_Mk / (total_M1 + rule.normalize_eps)
    return weights_Mk * rule.scale, experts_Mk.astype(jnp.int32)


def _open_groups(rule: _Rule, ranked_ME: jax.Array) -> jax.Array:
    """The scores, minus infinity in the groups that a token may not choose from."""
    if rule.groups_per_token == rule.num_groups:
        return ranked_ME
    grouped_MGe = ranked_ME.reshape(ranked_ME.shape[0], rule.num_groups, -1)
    best_MGb = jax.lax.top_k(grouped_MGe, 1 if rule.group_score == "max" else 2)[0]
    _, open_Mg = jax.lax.top_k(jnp.sum(best_MGb, axis=-1), rule.groups_per_token)
    is_open_MG = jnp.any(jax.nn.one_hot(open_Mg, rule.num_groups, dtype=bool), axis=1)
    return jnp.where(is_open_MG[:, :, None], grouped_MGe, -jnp.inf).reshape(ranked_ME.shape)
