"""The limit of top-k and top-p by bisection, for rows that keep many tokens.

Legend: G x L the vocabulary in lanes, of one row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["limit_of_row"]


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
