"""Distributed Shampoo: gradients between inverse fourth roots of their own second moments.

Anil et al. 2020, "Scalable Second Order Optimization for Deep Learning" (arXiv 2002.09018), after
Gupta et al. 2018. Shapes: a matrix of R rows and C columns is cut into I x J blocks of M rows and
N columns, filled up with zeros; K blocks in all of the parameter's B matrices (stacked layers and
experts).
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fornax.optim.distribute import divide, map_matrices, product, wide_dtype
from fornax.optim.transforms import increment, transformation
from fornax.optim.tree import at_paths, flatten, nest
from fornax.optim.views import View

__all__ = ["ShampooState", "scale_by_shampoo"]

Grafting = Literal["rmsprop", "adagrad", "sgd"]
_LEAST = 1e-30
"""Least eigenvalue that is inverted: that of a block without any gradient."""


class ShampooState(NamedTuple):
    """State of `scale_by_shampoo`; the dicts are keyed as the parameters are.

    `mu` (the momentum) and `nu` (the grafted optimizer's second moment; empty for `sgd`) have the
    parameters' shapes. `left_stats` [K, M, M] and `right_stats` [K, N, N] hold running means of
    g g^T and g^T g, `left_root` and `right_root` their inverse fourth roots. All are float32, or
    float64 for float64 parameters.
    """

    count: jax.Array
    mu: optax.Params
    nu: optax.Params
    left_stats: optax.Params
    right_stats: optax.Params
    left_root: optax.Params
    right_root: optax.Params


class _Blocks(NamedTuple):
    """How one parameter's matrices are cut: I x J blocks of M x N."""

    view: View
    counts: tuple[int, int]
    sizes: tuple[int, int]

    @property
    def total(self) -> int:
        """K, the blocks of all matrices."""
        return math.prod((*self.view.batch_shape, *self.counts))

    def cut(self, x: jax.Array) -> jax.Array:
        """A parameter's array as [K, M, N], its blocks divided over the devices."""
        (I, J), (M, N) = self.counts, self.sizes  # noqa: E741
        R, C = self.view.core_shape
        x_BRC = self.view.to_core(x).reshape(-1, R, C)
        filled = jnp.pad(x_BRC, ((0, 0), (0, I * M - R), (0, J * N - C)))
        return divide(filled.reshape(-1, I, M, J, N).swapaxes(2, 3).reshape(-1, M, N))

    def join(self, x_KMN: jax.Array) -> jax.Array:
        """The inverse of `cut`."""
        (I, J), (M, N) = self.counts, self.sizes  # noqa: E741
        R, C = self.view.core_shape
        x_BRC = x_KMN.reshape(-1, I, J, M, N).swapaxes(2, 3).reshape(-1, I * M, J * N)[:, :R, :C]
        return self.view.from_core(x_BRC.reshape(*self.view.batch_shape, R, C))


def _blocks(view: View, block_size: int) -> _Blocks:
    """Blocks as equal as can be, none with a side over `block_size`."""
    rows, cols = view.core_shape
    counts = -(-rows // block_size), -(-cols // block_size)
    return _Blocks(view, counts, (-(-rows // counts[0]), -(-cols // counts[1])))


def scale_by_shampoo(
    views: Mapping[str, View],
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    matrix_eps: float = 1e-6,
    block_size: int = 1024,
    root_interval: int = 10,
    start_step: int = 10,
    grafting: Grafting = "rmsprop",
) -> optax.GradientTransformation:
    """Precondition gradients by Shampoo; all parameters must be matrices in their view.

    For a block g of the gradient, update t (from 0):

        L <- b2 L + (1 - b2) g g^T,  R <- b2 R + (1 - b2) g^T g
        X = (L + matrix_eps max(eig(L)) 1)^(-1/4), Y likewise of R, every `root_interval` updates
        p = X g Y

    The blocks of one matrix together are scaled to the norm of what the grafted optimizer would do
    (G / (sqrt(v) + eps) with a bias-corrected running mean v of G^2, its sum, or G itself); until
    `start_step` that is the update. The result goes through a bias-corrected momentum of rate b1.
    The roots come from eigendecompositions in float32, divided over the devices of the mesh
    (`map_matrices`).
    """
    blocks = {path: _blocks(view, block_size) for path, view in views.items()}

    def squares(params: Mapping[str, jax.Array], side: int) -> optax.Params:
        def zeros(path: str) -> jax.Array:
            size = blocks[path].sizes[side]
            return jnp.zeros((blocks[path].total, size, size), wide_dtype(params[path]))

        return nest({path: zeros(path) for path in params})

    def init(params: optax.Params) -> ShampooState:
        by_path = flatten(params)
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, wide_dtype(p)), params)
        return ShampooState(
            count=jnp.zeros([], jnp.int32),
            mu=zeros,
            nu={} if grafting == "sgd" else jax.tree.map(jnp.copy, zeros),
            left_stats=squares(by_path, 0),
            right_stats=squares(by_path, 1),
            left_root=squares(by_path, 0),
            right_root=squares(by_path, 1),
        )

    def roots(state: ShampooState) -> ShampooState:
        left, right = flatten(state.left_stats), flatten(state.right_stats)
        stats = {
            (side, path): (x,) for side, by in enumerate((left, right)) for path, x in by.items()
        }
        found = map_matrices(lambda x_KMM: inverse_fourth_root(x_KMM, matrix_eps), stats)
        return state._replace(
            left_root=at_paths({path: found[0, path] for path in left})(state.left_root),
            right_root=at_paths({path: found[1, path] for path in right})(state.right_root),
        )

    def update(
        updates: optax.Updates, state: ShampooState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ShampooState]:
        del params
        grads = {path: g.astype(wide_dtype(g)) for path, g in flatten(updates).items()}
        state = _with_statistics(state, grads, blocks, b2)
        started = state.count >= start_step
        due = started & ((state.count - start_step) % root_interval == 0)
        state = jax.lax.cond(due, roots, lambda s: s, state)
        grafted, nu = _graft(grafting, grads, flatten(state.nu), state.count, b2, eps)
        pairs = flatten(state.left_root), flatten(state.right_root)
        old, changes, mu = flatten(state.mu), {}, {}
        for path, g in grads.items():
            p_KMN = product(product(pairs[0][path], blocks[path].cut(g)), pairs[1][path])
            scaled = _with_norm_of(views[path], blocks[path].join(p_KMN), grafted[path])
            mu[path] = b1 * old[path] + (1 - b1) * jnp.where(started, scaled, grafted[path])
            step = mu[path] / (1 - b1 ** (state.count.astype(g.dtype) + 1))
            changes[path] = step.astype(flatten(updates)[path].dtype)
        new = state._replace(
            count=increment(state.count),
            mu=at_paths(mu)(state.mu),
            nu=at_paths(nu)(state.nu),
        )
        return at_paths(changes)(updates), new

    return transformation(init, update)


def inverse_fourth_root(s_KMM: jax.Array, matrix_eps: float) -> jax.Array:
    """(s + matrix_eps max(eig(s)) 1)^(-1/4) of symmetric matrices without negative eigenvalues."""
    values_KM, vectors_KMM = jnp.linalg.eigh(s_KMM)
    values_KM = jnp.maximum(values_KM, 0)
    ridge_K1 = matrix_eps * values_KM[..., -1:]
    powers_KM = jnp.maximum(values_KM + ridge_K1, _LEAST) ** -0.25
    return product(vectors_KMM * powers_KM[..., None, :], vectors_KMM.mT)


def _with_statistics(
    state: ShampooState, grads: Mapping[str, jax.Array], blocks: Mapping[str, _Blocks], b2: float
) -> ShampooState:
    left, right = flatten(state.left_stats), flatten(state.right_stats)
    for path, grad in grads.items():
        g_KMN = blocks[path].cut(grad)
        left[path] = b2 * left[path] + (1 - b2) * product(g_KMN, g_KMN.mT)
        right[path] = b2 * right[path] + (1 - b2) * product(g_KMN.mT, g_KMN)
    return state._replace(
        left_stats=at_paths(left)(state.left_stats), right_stats=at_paths(right)(state.right_stats)
    )


def _graft(
    grafting: Grafting,
    grads: Mapping[str, jax.Array],
    nu: Mapping[str, jax.Array],
    count: jax.Array,
    b2: float,
    eps: float,
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """What the grafted optimizer does with each gradient, and its second moments."""
    if grafting == "sgd":
        return dict(grads), {}
    keep, add = (b2, 1 - b2) if grafting == "rmsprop" else (1.0, 1.0)
    new = {path: keep * nu[path] + add * g * g for path, g in grads.items()}
    directions = {}
    for path, g in grads.items():
        weight = 1 - b2 ** (count.astype(g.dtype) + 1) if grafting == "rmsprop" else 1.0
        directions[path] = g / (jnp.sqrt(new[path] / weight) + eps)
    return directions, new


def _with_norm_of(view: View, x: jax.Array, like: jax.Array) -> jax.Array:
    """`x`, each of its matrices scaled to the Frobenius norm of the same matrix of `like`."""
    features = (*view.rows, *view.cols)
    own, wanted = (jnp.sqrt(jnp.sum(a * a, axis=features, keepdims=True)) for a in (x, like))
    return x * (wanted / jnp.maximum(own, _LEAST))
