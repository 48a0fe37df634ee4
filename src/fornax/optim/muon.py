"""Muon: momentum whose matrices are replaced by the nearest orthogonal ones, approximately.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". Shapes: x_RC one
matrix of R rows and C columns; leading dimensions (stacked layers, experts) are separate matrices.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fornax import kernels
from fornax.optim.config import Muon
from fornax.optim.transforms import increment, transformation
from fornax.optim.tree import at_paths, flatten
from fornax.optim.views import View

__all__ = ["MuonState", "orthogonalize", "scale_by_muon"]

Coefficients = tuple[float, float, float]
"""(a, b, c) of an iteration's polynomial a s + b s^3 + c s^5 of the singular values."""

_STANDARD: Coefficients = (3.4445, -4.7750, 2.0315)
_DION: tuple[Coefficients, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


class MuonState(NamedTuple):
    """State of `scale_by_muon`: updates made so far, and the momentum in the parameters' shapes."""

    count: jax.Array
    mu: optax.Updates


def scale_by_muon(config: Muon, views: Mapping[str, View]) -> optax.GradientTransformation:
    """Momentum, orthogonalized matrix by matrix and scaled to the size that the config asks for.

    With bias-corrected momentum m and gradient g, both at update t, the Nesterov direction is
    beta m_(t+1) + (1 - beta) g_t, as in `optax.contrib.muon`.

    Args:
      config: the options.
      views: how to see each parameter, by path; all must be matrices.
    """
    beta = config.beta

    def init(params: optax.Params) -> MuonState:
        mu = jax.tree.map(lambda p: jnp.zeros(p.shape, config.mu_dtype or p.dtype), params)
        return MuonState(jnp.zeros([], jnp.int32), mu)

    def direction(grad: jax.Array, mu: jax.Array, count: jax.Array) -> jax.Array:
        if not config.nesterov:
            return mu / (1 - beta**count)
        ahead = mu / (1 - beta ** (count + 1))
        return beta * ahead + (1 - beta) * (grad / (1 - beta**count))

    def update(
        updates: optax.Updates, state: MuonState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, MuonState]:
        del params
        count = jnp.asarray(increment(state.count))
        grads = flatten(updates)
        old = flatten(state.mu)
        mu = {path: (1 - beta) * grad + beta * old[path] for path, grad in grads.items()}
        found = {}
        for path, grad in grads.items():
            view = views[path]
            x_RC = view.to_core(direction(grad, mu[path], count))
            found[path] = view.from_core(_scaled(config, x_RC)).astype(grad.dtype)
        kept = {path: m.astype(old[path].dtype) for path, m in mu.items()}
        return at_paths(found)(updates), MuonState(count, at_paths(kept)(state.mu))

    return transformation(init, update)


def _scaled(config: Muon, x_RC: jax.Array) -> jax.Array:
    """The update of matrices whose momentum is `x_RC`."""
    steps = config.ns_steps
    y_RC = orthogonalize(
        x_RC,
        (_STANDARD,) * steps if config.ns_coeffs == "standard" else _DION[-steps:],
        preconditioning=config.preconditioning,
        eps=config.eps,
        dtype=config.ns_dtype,
    )
    if config.adaptive:
        y_RC = jnp.sum(x_RC * y_RC, axis=(-2, -1), keepdims=True) * y_RC
    rows, cols = x_RC.shape[-2:]
    if config.consistent_rms is None:
        return jnp.sqrt(jnp.maximum(1, cols / rows)) * y_RC
    return (jnp.sqrt(jnp.maximum(rows, cols)) * config.consistent_rms) * y_RC


def orthogonalize(
    x_RC: jax.Array,
    coefficients: Sequence[Coefficients],
    *,
    preconditioning: str = "frobenius",
    eps: float = 1e-8,
    dtype: str = "float32",
) -> jax.Array:
    """Matrices with the singular vectors of `x_RC` and singular values near one.

    Each iteration is a x + (b g + c g g^T) x with g = x x^T, on the shorter side.

    Args:
      x_RC: [..., R, C].
      coefficients: (a, b, c) of each iteration.
      preconditioning: what x is divided by first: its Frobenius or spectral norm, or, within the
        first iteration, the root of the row sums of |g| (`aol`, Boissin et al. 2025) or of g's
        Frobenius norm (`schatten`, Grishina et al. 2025).
      eps: added to the norm, or the least row sum or norm of g.
      dtype: of the products' operands; sums and x itself are at least float32.

    Returns:
      [..., R, C] in the dtype of x.
    """
    if dtype == "bfloat16" and preconditioning == "frobenius":
        found = kernels.orthogonalize(x_RC, tuple(coefficients), eps=eps)
        if found is not None:
            return found
    wide = jnp.promote_types(x_RC.dtype, jnp.float32)
    operand = wide if dtype == "float32" else jnp.dtype(dtype)

    def rounded(a: jax.Array) -> jax.Array:
        return kernels.round_operand(a, operand)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(rounded(a), rounded(b), preferred_element_type=wide)

    def by_rows(a: jax.Array, b: jax.Array) -> jax.Array:
        """a b^T. XLA's CPU backend makes a float32 product of one in bfloat16 with b.mT."""
        batch, last = tuple(range(a.ndim - 2)), (a.ndim - 1,)
        numbers = ((last, last), (batch, batch))
        return jax.lax.dot_general(rounded(a), rounded(b), numbers, preferred_element_type=wide)

    tall = x_RC.shape[-2] > x_RC.shape[-1]
    x = (x_RC.mT if tall else x_RC).astype(wide)
    if preconditioning in ("frobenius", "spectral"):
        order = "fro" if preconditioning == "frobenius" else 2
        x = x / (jnp.linalg.norm(x, ord=order, axis=(-2, -1), keepdims=True) + eps)
    for step, (a, b, c) in enumerate(coefficients):
        gram = by_rows(x, x)
        if step == 0 and preconditioning in ("aol", "schatten"):
            scale = _first_scale(gram, preconditioning, eps)
            x, gram = x * scale, gram * scale * scale.mT
        x = a * x + product(b * gram + c * by_rows(gram, gram), x)
    return (x.mT if tall else x).astype(x_RC.dtype)


def _first_scale(gram: jax.Array, preconditioning: str, eps: float) -> jax.Array:
    """What rows of x are multiplied by, [..., R, 1]."""
    if preconditioning == "aol":
        size = jnp.sum(jnp.abs(gram), axis=-1, keepdims=True)
    else:
        size = jnp.linalg.norm(gram, axis=(-2, -1), keepdims=True)
        size = jnp.broadcast_to(size, (*gram.shape[:-1], 1))
    return jax.lax.rsqrt(jnp.maximum(size, eps))
