"""Linear cross-entropy a chunk of tokens at a time, for any device and any sharding.

The logits of a chunk are turned into their gradient, and that into its share of the gradients of
`x` and `w`, while they are at hand: the backward pass only scales, so no logits are computed twice
and [T, V] never exists. (The idea of Liger Kernel's fused linear cross entropy, Hsu et al. 2024.)

A chunk takes every n-th token: whatever devices share the tokens in contiguous blocks, each holds
its part of every chunk, and chunking moves nothing between them.

Legend: T tokens, D model width, V vocabulary, n chunks, C tokens of a chunk (T = C * n, padded).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from fornax.kernels._cross_entropy.call import CrossEntropyInputs, LossSums

__all__ = ["chunked"]

_Sums = tuple[jax.Array, jax.Array, jax.Array]
_Options = tuple[float, float | None, int]  # z_loss, softcap, chunk


def chunked(inputs: CrossEntropyInputs) -> LossSums:
    """Compute the sums with at most `inputs.chunk` rows of logits in memory."""
    options = (inputs.z_loss, inputs.softcap, inputs.chunk)
    dtype = jnp.promote_types(inputs.x_TD.dtype, jnp.float32)
    weights_T = inputs.weights_T.astype(dtype)
    loss, z_loss, correct = _sums(options, inputs.x_TD, inputs.w_DV, inputs.targets_T, weights_T)
    return LossSums(
        loss_sum=loss,
        weight_sum=jnp.sum(weights_T),
        z_loss_sum=jax.lax.stop_gradient(z_loss),
        correct_sum=jax.lax.stop_gradient(correct),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(
    options: _Options, x_TD: jax.Array, w_DV: jax.Array, targets_T: jax.Array, weights_T: jax.Array
) -> _Sums:
    z_loss, softcap, chunk = options
    xs, _ = _split(chunk, x_TD, targets_T, weights_T)

    def step(sums: _Sums, chunk_: tuple[jax.Array, ...]) -> tuple[_Sums, None]:
        x_CD, targets_C, weights_C = chunk_
        scored = _score(x_CD, w_DV, targets_C, weights_C, z_loss, softcap)
        return _add(sums, scored, weights_C), None

    sums, _ = jax.lax.scan(step, _zeros(weights_T.dtype), xs)
    return sums


def _sums_fwd(
    options: _Options, x_TD: jax.Array, w_DV: jax.Array, targets_T: jax.Array, weights_T: jax.Array
) -> tuple[_Sums, tuple[jax.Array, ...]]:
    z_loss, softcap, chunk = options
    xs, join = _split(chunk, x_TD, targets_T, weights_T)
    dtype = weights_T.dtype

    def step(
        carry: tuple[_Sums, jax.Array], chunk_: tuple[jax.Array, ...]
    ) -> tuple[tuple[_Sums, jax.Array], tuple[jax.Array, jax.Array]]:
        sums, dw_DV = carry
        x_CD, targets_C, weights_C = chunk_
        scored = _score(x_CD, w_DV, targets_C, weights_C, z_loss, softcap)
        dlogits_CV = _dlogits(scored, weights_C, z_loss, softcap).astype(x_CD.dtype)
        dx_CD = jnp.einsum("CV,DV->CD", dlogits_CV, w_DV, preferred_element_type=dtype)
        dw_DV += jnp.einsum("CD,CV->DV", x_CD, dlogits_CV, preferred_element_type=dtype)
        return (_add(sums, scored, weights_C), dw_DV), (dx_CD.astype(x_CD.dtype), scored.loss_C)

    start = (_zeros(dtype), jnp.zeros(w_DV.shape, dtype))
    (sums, dw_DV), (dx_nCD, loss_nC) = jax.lax.scan(step, start, xs)
    return sums, (join(dx_nCD), dw_DV.astype(w_DV.dtype), join(loss_nC))


def _sums_bwd(
    options: _Options, saved: tuple[jax.Array, ...], cotangents: _Sums
) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    del options
    dx_TD, dw_DV, loss_T = saved
    scale = cotangents[0]  # the two other sums are cut off from gradients by the caller

    def scaled(gradient: jax.Array) -> jax.Array:
        return (gradient.astype(scale.dtype) * scale).astype(gradient.dtype)

    return scaled(dx_TD), scaled(dw_DV), None, scaled(loss_T)


_sums.defvjp(_sums_fwd, _sums_bwd)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Scored:
    """Everything about one chunk's logits that sums and gradients need; loss before weights."""

    logits_CV: jax.Array
    hit_CV: jax.Array
    lse_C: jax.Array
    loss_C: jax.Array
    z_loss_C: jax.Array
    correct_C: jax.Array


def _score(
    x_CD: jax.Array,
    w_DV: jax.Array,
    targets_C: jax.Array,
    weights_C: jax.Array,
    z_loss: float,
    softcap: float | None,
) -> _Scored:
    logits_CV = jnp.dot(x_CD, w_DV, preferred_element_type=weights_C.dtype)
    if softcap is not None:
        logits_CV = softcap * jnp.tanh(logits_CV / softcap)
    highest_C = jnp.max(logits_CV, axis=-1)
    lse_C = highest_C + jnp.log(jnp.sum(jnp.exp(logits_CV - highest_C[:, None]), axis=-1))
    index_1V = jax.lax.broadcasted_iota(targets_C.dtype, (1, logits_CV.shape[1]), 1)
    hit_CV = index_1V == targets_C[:, None]
    target_C = jnp.sum(jnp.where(hit_CV, logits_CV, 0), axis=-1)
    known_C = (targets_C >= 0) & (targets_C < logits_CV.shape[1])
    counted_C = weights_C != 0
    z_loss_C = jnp.where(counted_C, z_loss * lse_C**2, 0)
    return _Scored(
        logits_CV=logits_CV,
        hit_CV=hit_CV,
        lse_C=lse_C,
        loss_C=jnp.where(counted_C, lse_C - target_C, 0) + z_loss_C,
        z_loss_C=z_loss_C,
        correct_C=known_C & (target_C == highest_C),
    )


def _dlogits(
    scored: _Scored, weights_C: jax.Array, z_loss: float, softcap: float | None
) -> jax.Array:
    """Return the gradient of sum(weight * loss) with respect to x w, before the softcap."""
    softmax_CV = jnp.exp(scored.logits_CV - scored.lse_C[:, None])
    pull_C = weights_C * (1 + 2 * z_loss * scored.lse_C)
    dlogits_CV = softmax_CV * pull_C[:, None] - jnp.where(scored.hit_CV, weights_C[:, None], 0)
    if softcap is not None:
        dlogits_CV *= 1 - (scored.logits_CV / softcap) ** 2
    return jnp.where(weights_C[:, None] != 0, dlogits_CV, 0)


def _zeros(dtype: jnp.dtype) -> _Sums:
    return (jnp.zeros((), dtype), jnp.zeros((), dtype), jnp.zeros((), dtype))


def _add(sums: _Sums, scored: _Scored, weights_C: jax.Array) -> _Sums:
    loss, z_loss, correct = sums
    return (
        loss + jnp.sum(weights_C * scored.loss_C),
        z_loss + jnp.sum(weights_C * scored.z_loss_C),
        correct + jnp.sum(weights_C * scored.correct_C),
    )


def _split(chunk: int, *arrays: jax.Array):
    """Cut arrays of T rows into n chunks of every n-th row; also return the inverse of it."""
    T = arrays[0].shape[0]
    n = max(1, -(-T // chunk))
    padding = -T % n

    def cut(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, [(0, padding), *[(0, 0)] * (array.ndim - 1)]) if padding else array
        return jnp.swapaxes(padded.reshape(-1, n, *array.shape[1:]), 0, 1)

    def join(chunks: jax.Array) -> jax.Array:
        return jnp.swapaxes(chunks, 0, 1).reshape(-1, *chunks.shape[2:])[:T]

    return tuple(cut(array) for array in arrays), join
