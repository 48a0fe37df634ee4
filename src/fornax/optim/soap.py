"""SOAP: Adam run in the eigenbasis of Shampoo's preconditioner, slowly refreshed.

Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam" (arXiv 2409.11321),
algorithms 3 and 4. Shapes: g_MN one matrix of M rows and N columns; leading dimensions (stacked
layers, experts) are separate matrices.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from fornax.optim.distribute import map_matrices, product, wide_dtype
from fornax.optim.transforms import increment, transformation
from fornax.optim.tree import at_paths, flatten, nest
from fornax.optim.views import View

__all__ = ["SoapState", "scale_by_soap"]

Tree = TypeVar("Tree")


class SoapState(NamedTuple):
    """State of `scale_by_soap`; the dicts are keyed as the parameters are.

    `mu` and `nu` have the parameters' shapes (`nu` lives in the eigenbasis). `left` [..., M, M]
    and `right` [..., N, N] hold running sums of g g^T and g^T g, `left_basis` and `right_basis`
    their eigenvectors in columns; a side longer than the limit has none of them. All are float32,
    or float64 for float64 parameters.
    """

    count: jax.Array
    mu: optax.Params
    nu: optax.Params
    left: optax.Params
    right: optax.Params
    left_basis: optax.Params
    right_basis: optax.Params


def scale_by_soap(
    views: Mapping[str, View],
    *,
    b1: float = 0.95,
    b2: float = 0.95,
    shampoo_beta: float | None = None,
    eps: float = 1e-8,
    precondition_frequency: int = 10,
    max_precondition_dim: int = 8192,
) -> optax.GradientTransformation:
    """Precondition gradients by SOAP; all parameters must be matrices in their view.

    The first update is zero: its gradient only starts the preconditioner, so no gradient is
    projected onto a basis made from itself (as the authors' own code does). Each later update
    projects with the basis left by earlier gradients, then adds its own gradient to the
    preconditioner, and every `precondition_frequency` updates refines the basis with one step of
    power iteration and a QR factorisation (algorithm 4). Moments are bias-corrected as Adam's.
    Both decompositions are divided over the devices of the mesh (`map_matrices`).

    Args:
      views: how to see each parameter, by path.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment in the eigenbasis.
      shampoo_beta: decay rate of the preconditioner; None takes `b2`.
      eps: added to the root of the second moment.
      precondition_frequency: updates between two refinements of the basis.
      max_precondition_dim: a longer side keeps the identity as its basis.
    """
    beta = b2 if shampoo_beta is None else shampoo_beta

    def sides(path: str) -> tuple[int | None, int | None]:
        rows, cols = (
            size if size <= max_precondition_dim else None for size in views[path].core_shape
        )
        return rows, cols

    def squares(params: Mapping[str, jax.Array], side: int) -> optax.Params:
        sizes = {path: sides(path)[side] for path in params}
        return nest(
            {
                path: jnp.zeros((*views[path].batch_shape, size, size), wide_dtype(params[path]))
                for path, size in sizes.items()
                if size is not None
            }
        )

    def init(params: optax.Params) -> SoapState:
        by_path = flatten(params)
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, wide_dtype(p)), params)
        return SoapState(
            count=jnp.zeros([], jnp.int32),
            mu=zeros,
            nu=jax.tree.map(jnp.copy, zeros),
            left=squares(by_path, 0),
            right=squares(by_path, 1),
            left_basis=squares(by_path, 0),
            right_basis=squares(by_path, 1),
        )

    def start(grads: optax.Updates, state: SoapState) -> tuple[optax.Updates, SoapState]:
        left, right = _outer_products(grads, state, views)
        new = state._replace(
            left=jax.tree.map(lambda x: (1 - beta) * x, left),
            right=jax.tree.map(lambda x: (1 - beta) * x, right),
        )
        return jax.tree.map(jnp.zeros_like, grads), _decompose(new)

    def step(grads: optax.Updates, state: SoapState) -> tuple[optax.Updates, SoapState]:
        moments = _Moments(b1, b2, eps, state.count)
        updates, mu, nu = {}, {}, {}
        bases = (flatten(state.left_basis), flatten(state.right_basis))
        old_mu, old_nu = flatten(state.mu), flatten(state.nu)
        for path, grad in flatten(grads).items():
            pair = (bases[0].get(path), bases[1].get(path))
            updates[path], mu[path], nu[path] = moments.update(
                views[path], pair, grad, old_mu[path], old_nu[path]
            )
        left, right = _outer_products(grads, state, views)
        new = state._replace(
            mu=at_paths(mu)(state.mu),
            nu=at_paths(nu)(state.nu),
            left=_mix(state.left, left, beta),
            right=_mix(state.right, right, beta),
        )
        refine = state.count % precondition_frequency == 0
        new = jax.lax.cond(refine, _refine, lambda s: s, new)
        return at_paths(updates)(grads), new

    def update(
        updates: optax.Updates, state: SoapState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, SoapState]:
        del params
        new_updates, new_state = jax.lax.cond(state.count == 0, start, step, updates, state)
        return new_updates, new_state._replace(count=increment(state.count))

    return transformation(init, update)


class _Moments(NamedTuple):
    """Adam's constants, and the number of Adam updates made before this one plus one."""

    b1: float
    b2: float
    eps: float
    count: jax.Array

    def update(
        self,
        view: View,
        bases: tuple[jax.Array | None, jax.Array | None],
        grad: jax.Array,
        mu: jax.Array,
        nu: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One parameter: its update, first moment and second moment, in its own shape."""
        g_MN = _project(view.to_core(grad.astype(mu.dtype)), bases)
        mu = self.b1 * mu + (1 - self.b1) * grad.astype(mu.dtype)
        m_MN = _project(view.to_core(mu), bases)
        v_MN = self.b2 * view.to_core(nu) + (1 - self.b2) * g_MN * g_MN
        count = self.count.astype(mu.dtype)
        m_hat = m_MN / (1 - self.b1**count)
        v_hat = v_MN / (1 - self.b2**count)
        u_MN = _project_back(m_hat / (jnp.sqrt(v_hat) + self.eps), bases)
        return view.from_core(u_MN).astype(grad.dtype), mu, view.from_core(v_MN)


def _project(x_MN: jax.Array, bases: tuple[jax.Array | None, jax.Array | None]) -> jax.Array:
    left, right = bases
    if left is not None:
        x_MN = product(left.mT, x_MN)
    return x_MN if right is None else product(x_MN, right)


def _project_back(x_MN: jax.Array, bases: tuple[jax.Array | None, jax.Array | None]) -> jax.Array:
    left, right = bases
    if left is not None:
        x_MN = product(left, x_MN)
    return x_MN if right is None else product(x_MN, right.mT)


def _outer_products(
    grads: optax.Updates, state: SoapState, views: Mapping[str, View]
) -> tuple[optax.Params, optax.Params]:
    """g g^T for the sides that `state.left` has, g^T g for those that `state.right` has."""
    by_path = flatten(grads)

    def core(path: str) -> jax.Array:
        return views[path].to_core(by_path[path].astype(wide_dtype(by_path[path])))

    left = {path: product(core(path), core(path).mT) for path in flatten(state.left)}
    right = {path: product(core(path).mT, core(path)) for path in flatten(state.right)}
    return nest(left), nest(right)


def _mix(old: Tree, new: Tree, beta: float) -> Tree:
    return jax.tree.map(lambda a, b: beta * a + (1 - beta) * b, old, new)


def _decompose(state: SoapState) -> SoapState:
    """Eigenvectors of the preconditioners in columns, largest eigenvalue first."""

    def eigenvectors(p_KMM: jax.Array) -> jax.Array:
        return jnp.linalg.eigh(p_KMM)[1][..., ::-1]

    return _with_bases(state, map_matrices(eigenvectors, _by_side((state.left, state.right))))


def _refine(state: SoapState) -> SoapState:
    """One step of power iteration for each basis; nothing is reordered, so `nu` keeps meaning."""

    def one(p_KMM: jax.Array, basis_KMM: jax.Array) -> jax.Array:
        return jnp.linalg.qr(product(p_KMM, basis_KMM))[0]

    sides = (state.left, state.right), (state.left_basis, state.right_basis)
    return _with_bases(state, map_matrices(one, _by_side(*sides)))


def _by_side(*pairs: tuple[object, object]) -> dict[tuple[int, str], tuple[jax.Array, ...]]:
    """Of (left, right) pairs the arrays at each side and path."""
    flat = [[flatten(tree) for tree in pair] for pair in pairs]
    return {
        (side, path): tuple(pair[side][path] for pair in flat)
        for side in (0, 1)
        for path in flat[0][side]
    }


def _with_bases(state: SoapState, bases: Mapping[tuple[int, str], jax.Array]) -> SoapState:
    left, right = (
        nest({path: basis for (where, path), basis in bases.items() if where == side})
        for side in (0, 1)
    )
    return state._replace(left_basis=left, right_basis=right)
