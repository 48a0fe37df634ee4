"""Any loss of logits, summed over tokens a chunk at a time, so that whole logits never exist.

The weights of the tokens are known before the loss is, so the gradient of a chunk's logits becomes
its share of the gradients of x and w while they are at hand, as in `linear_cross_entropy`.

Legend: T tokens, D model width, V vocabulary, n chunks, C tokens of a chunk (T = C * n, padded).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fornax.config.errors import KernelError
from fornax.kernels._cross_entropy.call import batch_shards
from fornax.kernels._cross_entropy.chunked import split_rows
from fornax.kernels._products import over_rows

__all__ = ["LogitsLoss", "linear_loss"]

LogitsLoss = Callable[[jax.Array, Any, Any], tuple[jax.Array, dict[str, jax.Array]]]
"""(logits [C, V], rows' arrays [C, ...], shared arrays) to (loss [C], metrics [C])."""


@dataclasses.dataclass(frozen=True)
class _Options:
    loss: LogitsLoss
    softcap: float | None
    chunk: int
    dtype: Any


def linear_loss(
    loss: LogitsLoss,
    x_TD: jax.Array,
    w_DV: jax.Array,
    rows: Any,
    shared: Any,
    weights_T: jax.Array,
    *,
    softcap: float | None = None,
    chunk: int = 1024,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Project to the vocabulary and sum weight times `loss` of the logits.

    Under a mesh XLA's partitioner divides the work: a chunk takes every n-th token, so each device
    holds its part of every chunk.

    Args:
        loss: called with a chunk's logits (softcap applied, float32), the chunk's part of `rows`
            and `shared`. Hashable, the same object at every call; compiled into the program.
        x_TD: final hidden states, [T, D] or [B, T, D]; one floating dtype for x and w.
        w_DV: output projection. Where it has no gradient none is computed.
        rows: pytree of arrays with the leading dimensions of x. No gradient.
        shared: pytree of arrays, for instance another projection. No gradient.
        weights_T: one a token, leading dimensions of x; a token of weight 0 adds nothing.
        softcap: c in logit = c tanh(logit / c).
        chunk: tokens per device whose logits exist at once.

    Returns:
        The weighted sum of losses, float32 (float64 for float64 inputs), and of each metric; only
        the first carries gradients, to x and w.

    Raises:
        KernelError: arguments that do not fit together.
    """
    if x_TD.ndim not in (2, 3) or w_DV.ndim != 2 or x_TD.shape[-1] != w_DV.shape[0]:
        raise KernelError(
            f"linear_loss: x{x_TD.shape} and w{w_DV.shape} must be [T, D] (or [B, T, D]) and "
            "[D, V]; transpose tied embeddings"
        )
    lead = x_TD.shape[:-1]
    wrong = [a.shape for a in (weights_T, *jax.tree.leaves(rows)) if a.shape[: len(lead)] != lead]
    if wrong:
        raise KernelError(f"linear_loss: an array of rows is {wrong[0]}; it must begin with {lead}")
    if x_TD.dtype != w_DV.dtype:
        raise KernelError(
            f"linear_loss: x is {x_TD.dtype} and w {w_DV.dtype}; cast both to one float dtype"
        )
    if chunk < 1:
        raise KernelError(f"linear_loss: chunk={chunk} must be 1 or more")
    dtype = jnp.promote_types(x_TD.dtype, jnp.float32)
    options = _Options(loss, softcap, chunk * batch_shards(), dtype)

    def flat(array: jax.Array) -> jax.Array:
        return array.reshape(-1, *array.shape[len(lead) :])

    rows, shared = jax.lax.stop_gradient((jax.tree.map(flat, rows), shared))
    weights_T = jax.lax.stop_gradient(flat(weights_T).astype(dtype))
    total, metrics = _sum(options, flat(x_TD), w_DV, rows, shared, weights_T)
    return total, jax.lax.stop_gradient(metrics)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(
    options: _Options, x_TD: jax.Array, w_DV: jax.Array, rows: Any, shared: Any, weights_T: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    def one(carry: None, chunk: Any) -> tuple[None, Any]:
        x_CD, rows_C, weights_C = chunk
        raw_CV = jnp.dot(x_CD, w_DV, preferred_element_type=options.dtype)
        return carry, _of_logits(options, raw_CV, rows_C, shared, weights_C)

    chunks, _ = _cut(options, x_TD, rows, weights_T)
    _, sums = jax.lax.scan(one, None, chunks)
    return jax.tree.map(lambda sums_n: jnp.sum(sums_n, axis=0), sums)


def _sum_fwd(options: _Options, x: Any, w: Any, rows: Any, shared: Any, weights: Any):
    value = functools.partial(jax.tree.map, lambda primal: primal.value)
    x_TD, w_DV, rows, shared, weights_T = map(value, (x, w, rows, shared, weights))
    chunks, join = _cut(options, x_TD, rows, weights_T)

    def one(dw_DV: Any, chunk: Any) -> tuple[Any, Any]:
        x_CD, rows_C, weights_C = chunk
        raw_CV = jnp.dot(x_CD, w_DV, preferred_element_type=options.dtype)
        total, pull, metrics = jax.vjp(
            lambda raw_CV: _of_logits(options, raw_CV, rows_C, shared, weights_C),
            raw_CV,
            has_aux=True,
        )
        (slope_CV,) = pull(jnp.ones((), options.dtype))
        slope_CV = jnp.where(weights_C[:, None] != 0, slope_CV, 0).astype(x_CD.dtype)
        dx_CD = jnp.einsum("CV,DV->CD", slope_CV, w_DV, preferred_element_type=options.dtype)
        if dw_DV is not None:
            dw_DV = dw_DV + over_rows(x_CD, slope_CV, dtype=options.dtype)
        return dw_DV, ((total, metrics), dx_CD.astype(x_CD.dtype))

    start = jnp.zeros(w_DV.shape, options.dtype) if w.perturbed else None
    dw_DV, (sums, dx_nCD) = jax.lax.scan(one, start, chunks)
    sums = jax.tree.map(lambda sums_n: jnp.sum(sums_n, axis=0), sums)
    return sums, (join(dx_nCD), dw_DV, w_DV if dw_DV is None else None)


def _sum_bwd(options: _Options, saved: tuple[Any, ...], cotangents: Any):
    dx_TD, dw_DV, frozen_DV = saved
    scale = cotangents[0]
    if not isinstance(scale, jax.Array):  # a symbolic zero
        scale = jnp.zeros((), options.dtype)
    dx_TD = (dx_TD.astype(scale.dtype) * scale).astype(dx_TD.dtype)
    if dw_DV is None:
        return dx_TD, jnp.zeros_like(frozen_DV), None, None, None
    return dx_TD, (dw_DV * scale).astype(dx_TD.dtype), None, None, None


_sum.defvjp(_sum_fwd, _sum_bwd, symbolic_zeros=True)


def _of_logits(
    options: _Options, raw_CV: jax.Array, rows: Any, shared: Any, weights_C: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    cap = options.softcap
    logits_CV = raw_CV if cap is None else cap * jnp.tanh(raw_CV / cap)
    loss_C, metrics = options.loss(logits_CV, rows, shared)

    def weighted(values_C: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(weights_C != 0, weights_C * values_C.astype(options.dtype), 0))

    return weighted(loss_C), {name: weighted(values) for name, values in metrics.items()}


def _cut(options: _Options, x_TD: jax.Array, rows: Any, weights_T: jax.Array):
    leaves, structure = jax.tree.flatten((x_TD, rows, weights_T))
    chunks, join = split_rows(options.chunk, *leaves)
    return jax.tree.unflatten(structure, chunks), join
