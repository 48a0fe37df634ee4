"""Linear cross-entropy a chunk of tokens at a time, for any device and any sharding.

The logits of a chunk are turned into their gradient, and that into its share of the gradients of
`x` and `w`, while they are at hand: the backward pass only scales, so no logits are computed twice
and [T, V] never exists. (The idea of Liger Kernel's fused linear cross entropy, Hsu et al. 2024.)

On a mesh every device does so for its own tokens and its own part of the vocabulary. Where the
tokens do not divide, XLA's partitioner divides the work: a chunk takes every n-th token, so
whatever devices share the tokens in contiguous blocks, each holds its part of every chunk.

Legend: T tokens, D model width, V vocabulary, n chunks, C tokens of a chunk (T = C * n, padded).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from fornax.kernels._cross_entropy.call import CrossEntropyInputs, LossSums
from fornax.kernels._cross_entropy.sharded import Division, divide
from fornax.kernels._products import over_rows

__all__ = ["chunked", "split_rows"]

_Sums = tuple[jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class _Options:
    z_loss: float
    softcap: float | None
    chunk: int
    """Tokens of one device whose logits exist at once."""
    division: Division


def chunked(inputs: CrossEntropyInputs) -> LossSums:
    """Compute the sums with at most `inputs.chunk` rows of logits in memory."""
    dtype = jnp.promote_types(inputs.x_TD.dtype, jnp.float32)
    weights = inputs.weights_T.astype(dtype)
    division = divide(inputs.x_TD, inputs.w_DV)
    chunk = max(1, inputs.chunk // division.token_shards)
    options = _Options(inputs.z_loss, inputs.softcap, chunk, division)
    loss, z_loss, correct = _sums(options, inputs.x_TD, inputs.w_DV, inputs.targets_T, weights)
    return LossSums(
        loss_sum=loss,
        weight_sum=jnp.sum(weights),
        z_loss_sum=jax.lax.stop_gradient(z_loss),
        correct_sum=jax.lax.stop_gradient(correct),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(
    options: _Options, x: jax.Array, w_DV: jax.Array, targets: jax.Array, weights: jax.Array
) -> _Sums:
    division = options.division

    def local(*arrays: jax.Array) -> _Sums:
        x_TD, w_DV, targets_T, weights_T = _flat(*arrays)
        sums = _forward(options, x_TD, division.whole_width(w_DV), targets_T, weights_T)
        return division.over_tokens(sums)

    return division.run(local, (x, w_DV, targets, weights), "sss")


def _sums_fwd(
    options: _Options, x: jax.Array, w_DV: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[_Sums, tuple[jax.Array, ...]]:
    division = options.division

    def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        x_TD, w_DV, targets_T, weights_T = _flat(*arrays)
        whole_DV = division.whole_width(w_DV)
        sums, dx_TD, dw_DV, loss_T = _gradients(options, x_TD, whole_DV, targets_T, weights_T)
        dw_DV = division.own_width(dw_DV).astype(w_DV.dtype)
        dx, loss = dx_TD.reshape(arrays[0].shape), loss_T.reshape(arrays[2].shape)
        return *division.over_tokens(sums), dx, dw_DV, loss

    loss_sum, z_loss_sum, correct_sum, *saved = division.run(
        local, (x, w_DV, targets, weights), "sssxwt"
    )
    return (loss_sum, z_loss_sum, correct_sum), tuple(saved)


def _flat(
    x: jax.Array, w_DV: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    return x.reshape(-1, x.shape[-1]), w_DV, targets.reshape(-1), weights.reshape(-1)


def _forward(
    options: _Options, x_TD: jax.Array, w_DV: jax.Array, targets_T: jax.Array, weights_T: jax.Array
) -> _Sums:
    xs, _ = split_rows(options.chunk, x_TD, targets_T, weights_T)

    def step(sums: _Sums, chunk_: tuple[jax.Array, ...]) -> tuple[_Sums, None]:
        x_CD, targets_C, weights_C = chunk_
        scored = _score(options, x_CD, w_DV, targets_C, weights_C)
        return _add(sums, scored, weights_C), None

    sums, _ = jax.lax.scan(step, _zeros(weights_T.dtype), xs)
    return sums


def _gradients(
    options: _Options, x_TD: jax.Array, w_DV: jax.Array, targets_T: jax.Array, weights_T: jax.Array
) -> tuple[_Sums, jax.Array, jax.Array, jax.Array]:
    """Return the sums, the gradients of the first one with respect to x and w, and the losses."""
    xs, join = split_rows(options.chunk, x_TD, targets_T, weights_T)
    dtype = weights_T.dtype

    def step(
        carry: tuple[_Sums, jax.Array], chunk_: tuple[jax.Array, ...]
    ) -> tuple[tuple[_Sums, jax.Array], tuple[jax.Array, jax.Array]]:
        sums, dw_DV = carry
        x_CD, targets_C, weights_C = chunk_
        scored = _score(options, x_CD, w_DV, targets_C, weights_C)
        dlogits_CV = _dlogits(options, scored, weights_C).astype(x_CD.dtype)
        dx_CD = jnp.einsum("CV,DV->CD", dlogits_CV, w_DV, preferred_element_type=dtype)
        dx_CD = options.division.over_vocabulary(jax.lax.psum, dx_CD)
        dw_DV += over_rows(x_CD, dlogits_CV, dtype=dtype)
        return (_add(sums, scored, weights_C), dw_DV), (dx_CD.astype(x_CD.dtype), scored.loss_C)

    start = (_zeros(dtype), jnp.zeros(w_DV.shape, dtype))
    (sums, dw_DV), (dx_nCD, loss_nC) = jax.lax.scan(step, start, xs)
    return sums, join(dx_nCD), dw_DV, join(loss_nC)


def _sums_bwd(
    options: _Options, saved: tuple[jax.Array, ...], cotangents: _Sums
) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    del options
    dx, dw_DV, loss = saved
    scale = cotangents[0]  # the two other sums are cut off from gradients by the caller

    def scaled(gradient: jax.Array) -> jax.Array:
        return (gradient.astype(scale.dtype) * scale).astype(gradient.dtype)

    return scaled(dx), scaled(dw_DV), None, scaled(loss)


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
    options: _Options, x_CD: jax.Array, w_DV: jax.Array, targets_C: jax.Array, weights_C: jax.Array
) -> _Scored:
    division = options.division
    logits_CV = jnp.dot(x_CD, w_DV, preferred_element_type=weights_C.dtype)
    if options.softcap is not None:
        logits_CV = options.softcap * jnp.tanh(logits_CV / options.softcap)
    V = logits_CV.shape[1]
    highest_C = division.over_vocabulary(jax.lax.pmax, jnp.max(logits_CV, axis=-1))
    total_C = jnp.sum(jnp.exp(logits_CV - highest_C[:, None]), axis=-1)
    lse_C = highest_C + jnp.log(division.over_vocabulary(jax.lax.psum, total_C))
    index_1V = jax.lax.broadcasted_iota(targets_C.dtype, (1, V), 1) + division.first_word(V)
    hit_CV = index_1V == targets_C[:, None]
    target_C = jnp.sum(jnp.where(hit_CV, logits_CV, 0), axis=-1)
    target_C = division.over_vocabulary(jax.lax.psum, target_C)
    known_C = (targets_C >= 0) & (targets_C < V * division.vocabulary_shards)
    counted_C = weights_C != 0
    z_loss_C = jnp.where(counted_C, options.z_loss * lse_C**2, 0)
    return _Scored(
        logits_CV=logits_CV,
        hit_CV=hit_CV,
        lse_C=lse_C,
        loss_C=jnp.where(counted_C, lse_C - target_C, 0) + z_loss_C,
        z_loss_C=z_loss_C,
        correct_C=known_C & (target_C == highest_C),
    )


def _dlogits(options: _Options, scored: _Scored, weights_C: jax.Array) -> jax.Array:
    """Return the gradient of sum(weight * loss) with respect to x w, before the softcap."""
    softmax_CV = jnp.exp(scored.logits_CV - scored.lse_C[:, None])
    pull_C = weights_C * (1 + 2 * options.z_loss * scored.lse_C)
    dlogits_CV = softmax_CV * pull_C[:, None] - jnp.where(scored.hit_CV, weights_C[:, None], 0)
    if options.softcap is not None:
        dlogits_CV *= 1 - (scored.logits_CV / options.softcap) ** 2
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


def split_rows(chunk: int, *arrays: jax.Array):
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
