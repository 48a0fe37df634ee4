"""Which tokens top-k, top-p and min-p keep, found without sorting the vocabulary.

A token's depth is how far its logit lies below the row's highest one. Each filter keeps the depths
up to a limit, so tokens of equal depth stay or go together. The limit mostly lies among the 128
least depths, which are cheap to find; where it does not, bisection finds it.

Legend: M samples, G x L the vocabulary in lanes, C least depths.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fornax.kernels import reductions

__all__ = ["TokenFilters", "filtered", "limit_of_row"]

LEAST = 128
"""C, unless the vocabulary is smaller."""


class TokenFilters(NamedTuple):
    """How the rows are drawn: by exp(logit / temperature), among the tokens that filters keep.

    min-p comes first, then top-k, then top-p (Holtzman et al. 2020), each of what is left. Equal
    logits stay or go together.
    """

    temperature_M: jax.Array
    """float32; 0 takes the likeliest token, whatever the filters."""
    top_k_M: jax.Array
    """int32, at least 1: this many of the likeliest tokens; V or more keeps all."""
    top_p_M: jax.Array
    """float32, above 0: the fewest likeliest tokens whose share of the sum is this; 1 keeps all."""
    min_p_M: jax.Array
    """float32: tokens of at least this share of the likeliest one's probability; 0 keeps all."""


def filtered(depth_MGL: jax.Array, weight_MGL: jax.Array, filters: TokenFilters) -> jax.Array:
    """Weights of the tokens kept, 0 for the others; min-p first, then top-k, then top-p.

    Args:
        depth_MGL: float32, at least 0; inf for forbidden tokens.
        weight_MGL: exp(-depth).
        filters: of each sample.
    """
    kept_MGL = jnp.where(weight_MGL >= filters.min_p_M[:, None, None], weight_MGL, 0)
    limited_M = (filters.top_k_M < depth_MGL[0].size) | (filters.top_p_M < 1)
    limit_M = lax.cond(
        jnp.any(limited_M),
        lambda: _limits(depth_MGL, kept_MGL, filters),
        lambda: jnp.full(limited_M.shape, jnp.inf),
    )
    return jnp.where(depth_MGL <= limit_M[:, None, None], kept_MGL, 0)


def _limits(depth_MGL: jax.Array, kept_MGL: jax.Array, filters: TokenFilters) -> jax.Array:
    limit_M, known_M = _near_limits(depth_MGL, kept_MGL, filters)

    def far(row: tuple) -> jax.Array:
        limit, known, depth_GL, kept_GL, top_k, top_p = row
        return lax.cond(known, lambda: limit, lambda: limit_of_row(depth_GL, kept_GL, top_k, top_p))

    # Row by row: how one row is searched must not depend on the others, down to the last bit.
    rows = (limit_M, known_M, depth_MGL, kept_MGL, filters.top_k_M, filters.top_p_M)
    return lax.cond(jnp.all(known_M), lambda: limit_M, lambda: lax.map(far, rows))


def _near_limits(
    depth_MGL: jax.Array, kept_MGL: jax.Array, filters: TokenFilters
) -> tuple[jax.Array, jax.Array]:
    """Limits that lie among the least depths, and whether they do.

    A limit less than the last of those depths is known: no token up to it is missing there.
    """
    vocab_size = depth_MGL[0].size
    least_MC = _least(depth_MGL.reshape(len(depth_MGL), -1))
    last_M = least_MC[:, -1]
    count = least_MC.shape[1]
    whole_M = filters.top_k_M >= vocab_size
    kth_M1 = jnp.minimum(filters.top_k_M, count)[:, None] - 1
    limit_k_M = jnp.where(whole_M, jnp.inf, jnp.take_along_axis(least_MC, kth_M1, axis=1)[:, 0])
    known_M = whole_M | ((filters.top_k_M <= count) & (limit_k_M < last_M))

    weight_MC = jnp.exp(-least_MC)
    cut_MC = (weight_MC >= filters.min_p_M[:, None]) & (least_MC <= limit_k_M[:, None])
    sum_MC = reductions.prefix(jnp.where(cut_MC, weight_MC, 0))
    total_M = jnp.where(whole_M, reductions.total(kept_MGL), sum_MC[:, -1])
    enough_MC = sum_MC >= (filters.top_p_M * total_M)[:, None]
    first_M1 = jnp.argmax(enough_MC, axis=1)[:, None]
    limit_p_M = jnp.take_along_axis(least_MC, first_M1, axis=1)[:, 0]
    known_p_M = jnp.any(enough_MC, axis=1) & (limit_p_M < last_M)
    limit_M = jnp.where(filters.top_p_M < 1, jnp.minimum(limit_k_M, limit_p_M), limit_k_M)
    return limit_M, known_M & ((filters.top_p_M >= 1) | known_p_M)


def _least(depth_MV: jax.Array) -> jax.Array:
    """The C least depths of each row in order, [M, C].

    The groups with the C least minima hold them all.
    """
    samples, vocab_size = depth_MV.shape
    count = min(LEAST, vocab_size)
    size = max(1, round(math.sqrt(vocab_size / count)))
    padding = -vocab_size % size
    depth_MV = jnp.pad(depth_MV, ((0, 0), (0, padding)), constant_values=jnp.inf)
    depth_MSN = depth_MV.reshape(samples, size, -1)
    _, group_MC = lax.top_k(-jnp.min(depth_MSN, axis=1), count)
    found_MSC = jnp.take_along_axis(depth_MSN, group_MC[:, None, :], axis=2)
    return -lax.top_k(-found_MSC.reshape(samples, -1), count)[0]


def limit_of_row(
    depth_GL: jax.Array, kept_GL: jax.Array, top_k: jax.Array, top_p: jax.Array
) -> jax.Array:
    """The depth up to which tokens are kept.

    Args:
        depth_GL: float32, at least 0.
        kept_GL: float32, weight of each token; 0 for those that are out already.
        top_k: int32.
        top_p: float32; 1 keeps all that top-k keeps.
    """
    limit_k = lax.cond(
        top_k < _sum((kept_GL > 0).astype(jnp.int32)),
        lambda: _limit(depth_GL, (kept_GL > 0).astype(jnp.float32), top_k.astype(jnp.float32)),
        lambda: jnp.array(jnp.inf),
    )
    kept_GL = jnp.where(depth_GL <= limit_k, kept_GL, 0)
    return lax.cond(
        top_p < 1,
        lambda: _limit(depth_GL, kept_GL, top_p * _sum(kept_GL)),
        lambda: limit_k,
    )


class _Search(NamedTuple):
    below: jax.Array
    """A depth up to which there is not enough."""
    above: jax.Array
    """A depth up to which there is."""
    inside: jax.Array
    """Tokens between the two, the upper one included."""


def _limit(depth_GL: jax.Array, amount_GL: jax.Array, goal: jax.Array) -> jax.Array:
    """How deep one must go for the amounts to add up to the goal.

    Ends when one token, or several of equal depth, are left between the bounds: the upper bound
    then separates the tokens as the depth of that token would.
    """
    reach_GL = jnp.where(amount_GL > 0, depth_GL, -1.0)

    def amount(depth: jax.Array) -> jax.Array:
        return _sum(jnp.where(reach_GL <= depth, amount_GL, 0))

    def inside(below: jax.Array, above: jax.Array) -> jax.Array:
        return _sum(((reach_GL > below) & (reach_GL <= above)).astype(jnp.int32))

    def halve(search: _Search) -> _Search:
        middle = _middle(search)
        enough = amount(middle) >= goal
        below = jnp.where(enough, search.below, middle)
        above = jnp.where(enough, middle, search.above)
        return _Search(below, above, inside(below, above))

    below = jnp.zeros(())
    above = jnp.where(amount(below) >= goal, 0.0, jnp.max(reach_GL))
    return lax.while_loop(_open, halve, _Search(below, above, inside(below, above))).above


def _open(search: _Search) -> jax.Array:
    middle = _middle(search)
    apart = (middle > search.below) & (middle < search.above)
    return apart & (search.inside > 1)


def _middle(search: _Search) -> jax.Array:
    return search.below + (search.above - search.below) / 2


def _sum(x_GL: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sum(x_GL, axis=0))
