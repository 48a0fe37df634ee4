"""The walk over tokens that every loss over the vocabulary takes, a chunk of logits at a time.

`summed` adds up a loss over tokens whose weights are known before it is. The logits of a chunk are
turned into their gradient, and that into its share of the gradients of `x` and `w`, while they are
in memory: the backward pass only scales, so no logits are computed twice and [T, V] never exists.
(The idea of Liger Kernel's fused linear cross entropy, Hsu et al. 2024.)

On a mesh every device does so for its own tokens and its own part of the vocabulary. Where the
tokens do not divide, XLA's partitioner divides the work: a chunk takes every n-th token, so
whatever devices share the tokens in contiguous blocks, each holds its part of every chunk.

Legend: T tokens, D model width, V vocabulary, n chunks, C tokens of a chunk (T = C * n, padded).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import KernelError
from fornax.kernels import _matmul
from fornax.kernels._products import over_rows
from fornax.kernels._vocabulary.division import Arrays, Division
from fornax.kernels.registry import Work

__all__ = [
    "ProductCall",
    "Walk",
    "benchmark_products",
    "check_products",
    "check_targets",
    "gradient_of_x",
    "logits_of",
    "raw_logits",
    "split_rows",
    "summed",
    "work_of_products",
]

Sums = tuple[Arrays, ...]
"""Pytrees of scalars; the first is the loss, which alone is differentiated."""


class ChunkLoss(Protocol):
    """A loss of one chunk's logits; hashable, for it is compiled in.

    `rows` are the chunk's part of the arrays of tokens, `shared` the arrays that all chunks see,
    `weights_C` the tokens' weights; `raw_CV` are logits before any softcap.
    """

    def sums(
        self, raw_CV: jax.Array, rows: Arrays, shared: Arrays, weights_C: jax.Array, /
    ) -> Sums:
        """The weighted sums of the chunk."""
        ...

    def gradient(
        self, raw_CV: jax.Array, rows: Arrays, shared: Arrays, weights_C: jax.Array, /
    ) -> tuple[Sums, jax.Array, jax.Array | None]:
        """The sums, the gradient of the loss at `raw_CV`, and the loss of each token [C] (None:
        the weights have no gradient)."""
        ...


@dataclass(frozen=True)
class Walk:
    """What a walk is compiled for."""

    loss: ChunkLoss
    chunk: int
    """Tokens of one device whose logits exist at once."""
    division: Division
    dtype: jnp.dtype
    """Of logits and sums."""


@dataclass(frozen=True)
class ProductCall:
    """Shapes, dtypes and options of one call: what implementations look at when they decline."""

    platform: str
    tokens: int
    width: int
    vocabulary: int
    dtype: str
    softcap: float | None
    chunk: int
    shards: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def summed(
    walk: Walk, x: jax.Array, w_DV: jax.Array, rows: Arrays, shared: Arrays, weights: jax.Array
) -> Sums:
    """The sums of `walk.loss` over tokens, with gradients to x, w and the weights.

    Args:
      walk: loss, chunks, division.
      x: hidden states, [*tokens, D].
      w_DV: output projection. Where it has no gradient none is computed.
      rows: pytree of arrays [*tokens, ...]; no gradient.
      shared: pytree of arrays; no gradient.
      weights: [*tokens] in `walk.dtype`.
    """
    division = walk.division

    def local(x: jax.Array, w_DV: jax.Array, rows: Arrays, shared: Arrays, weights: jax.Array):
        whole_DV = division.whole_width(w_DV)
        chunks, _ = split_rows(walk.chunk, _flat(x, rows, weights))

        def step(sums: Sums, chunk: Arrays) -> tuple[Sums, None]:
            x_CD, rows_C, weights_C = chunk
            raw_CV = _product(walk, x_CD, whole_DV)
            return _add(sums, walk.loss.sums(raw_CV, rows_C, shared, weights_C)), None

        sums, _ = jax.lax.scan(step, _zero_sums(walk, whole_DV, chunks, shared), chunks)
        return (division.over_tokens(sums),)

    (sums,) = division.run(local, (x, w_DV, rows, shared, weights), "s", "xwtst")
    return sums


def _summed_fwd(walk: Walk, x: Arrays, w: Arrays, rows: Arrays, shared: Arrays, weights: Arrays):
    value = functools.partial(jax.tree.map, lambda primal: primal.value)
    arrays = tuple(map(value, (x, w, rows, shared, weights)))
    trains = w.perturbed
    local = functools.partial(_gradients, walk, trains)
    sums, *saved = walk.division.run(local, arrays, "sxwt", "xwtst")
    return sums, (*saved, None if trains else arrays[1])


def _gradients(
    walk: Walk,
    trains: bool,
    x: jax.Array,
    w_DV: jax.Array,
    rows: Arrays,
    shared: Arrays,
    weights: jax.Array,
) -> tuple[Sums, jax.Array, jax.Array | None, jax.Array | None]:
    """The sums, the gradients of the first one at x and (where it `trains`) w, and the losses."""
    division = walk.division
    whole_DV = division.whole_width(w_DV)
    chunks, join = split_rows(walk.chunk, _flat(x, rows, weights))

    def step(carry: tuple[Sums, Arrays], chunk: Arrays) -> tuple[tuple[Sums, Arrays], Arrays]:
        sums, dw_DV = carry
        x_CD, rows_C, weights_C = chunk
        raw_CV = _product(walk, x_CD, whole_DV)
        found, dlogits_CV, loss_C = walk.loss.gradient(raw_CV, rows_C, shared, weights_C)
        dlogits_CV = dlogits_CV.astype(x_CD.dtype)
        dx_CD = gradient_of_x(division, dlogits_CV, whole_DV, walk.dtype)
        if trains:
            dw_DV += over_rows(x_CD, dlogits_CV, dtype=walk.dtype)
        return (_add(sums, found), dw_DV), (dx_CD, loss_C)

    zeros_DV = jnp.zeros(whole_DV.shape, walk.dtype) if trains else None
    start = (_zero_sums(walk, whole_DV, chunks, shared), zeros_DV)
    (sums, dw_DV), (dx_nCD, loss_nC) = jax.lax.scan(step, start, chunks)
    if trains:
        dw_DV = division.own_width(dw_DV).astype(w_DV.dtype)
    loss = None if loss_nC is None else join(loss_nC).reshape(weights.shape)
    return division.over_tokens(sums), join(dx_nCD).reshape(x.shape), dw_DV, loss


def _summed_bwd(walk: Walk, saved: tuple[Arrays, ...], cotangents: Sums):
    dx, dw_DV, loss, frozen_DV = saved
    scale = cotangents[0]  # the other sums are cut off from gradients by the caller
    if not isinstance(scale, jax.Array):  # a symbolic zero
        scale = jnp.zeros((), walk.dtype)

    def scaled(gradient: jax.Array) -> jax.Array:
        return (gradient.astype(scale.dtype) * scale).astype(gradient.dtype)

    dw_DV = jnp.zeros_like(frozen_DV) if dw_DV is None else scaled(dw_DV)
    return scaled(dx), dw_DV, None, None, None if loss is None else scaled(loss)


summed.defvjp(_summed_fwd, _summed_bwd, symbolic_zeros=True)


def _flat(x: jax.Array, rows: Arrays, weights: jax.Array) -> tuple[jax.Array, Arrays, jax.Array]:
    """The arrays with one dimension of tokens."""
    lead = weights.ndim

    def flat(array: jax.Array) -> jax.Array:
        return array.reshape(-1, *array.shape[lead:])

    return flat(x), jax.tree.map(flat, rows), flat(weights)


def _add(one: Sums, other: Sums) -> Sums:
    return jax.tree.map(jnp.add, one, other)


def _zero_sums(walk: Walk, w_DV: jax.Array, chunks: Arrays, shared: Arrays) -> Sums:
    def sums(x_CD: jax.Array, rows_C: Arrays, weights_C: jax.Array) -> Sums:
        return walk.loss.sums(_product(walk, x_CD, w_DV), rows_C, shared, weights_C)

    one = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype), chunks)
    shapes = jax.eval_shape(sums, *one)
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)


def _product(walk: Walk, x_CD: jax.Array, w_DV: jax.Array) -> jax.Array:
    return raw_logits(x_CD, w_DV, walk.dtype)


def raw_logits(x_CD: jax.Array, w_DV: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The product x w [C, V], summed and returned in `dtype`."""
    (C, D), V = x_CD.shape, w_DV.shape[1]
    if dtype == jnp.float32 and _matmul.runs(x_CD.dtype, C, V, D):
        return _matmul.matmul(x_CD, w_DV, _matmul.PLAIN, dtype)
    return jnp.dot(x_CD, w_DV, preferred_element_type=dtype)


def logits_of(raw_CV: jax.Array, softcap: float | None) -> jax.Array:
    """The product x w with the softcap: c tanh(x w / c)."""
    return raw_CV if softcap is None else softcap * jnp.tanh(raw_CV / softcap)


def gradient_of_x(
    division: Division, dlogits_CV: jax.Array, w_DV: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """The gradient at x [C, D] of one at x w, in its dtype, summed in `dtype`."""
    (C, V), D = dlogits_CV.shape, w_DV.shape[0]
    if dtype == jnp.float32 and _matmul.runs(dlogits_CV.dtype, C, V, D):
        dx_CD = _matmul.matmul(dlogits_CV, w_DV, _matmul.RIGHT_TRANSPOSED, dtype)
    else:
        dx_CD = jnp.einsum("CV,DV->CD", dlogits_CV, w_DV, preferred_element_type=dtype)
    return division.over_vocabulary(jax.lax.psum, dx_CD).astype(dlogits_CV.dtype)


def split_rows(chunk: int, arrays: Arrays) -> tuple[Arrays, Callable[[jax.Array], jax.Array]]:
    """Cut a pytree of arrays of T rows into n chunks of every n-th row; and the inverse of it."""
    T = jax.tree.leaves(arrays)[0].shape[0]
    n = max(1, -(-T // chunk))
    padding = -T % n

    def cut(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, [(0, padding), *[(0, 0)] * (array.ndim - 1)]) if padding else array
        return jnp.swapaxes(padded.reshape(-1, n, *array.shape[1:]), 0, 1)

    def join(chunks: jax.Array) -> jax.Array:
        return jnp.swapaxes(chunks, 0, 1).reshape(-1, *chunks.shape[2:])[:T]

    return jax.tree.map(cut, arrays), join


def check_products(
    name: str, x: jax.Array, w_DV: jax.Array, chunk: int, softcap: float | None
) -> None:
    """Check that hidden states [T, D] or [B, T, D] and output weights fit together.

    Raises:
        KernelError: shapes, dtypes or options that do not, of the operation `name`.
    """
    if x.ndim not in (2, 3) or w_DV.ndim != 2 or x.shape[-1] != w_DV.shape[0]:
        raise KernelError(
            f"{name}: x{x.shape} and w{w_DV.shape} must be [T, D] (or [B, T, D]) and "
            "[D, V]; transpose tied embeddings"
        )
    if x.dtype != w_DV.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise KernelError(
            f"{name}: x is {x.dtype} and w {w_DV.dtype}; cast both to one float dtype"
        )
    if chunk < 1:
        raise KernelError(f"{name}: chunk={chunk} must be 1 or more")
    if softcap is not None and not softcap > 0:
        raise KernelError(f"{name}: softcap={softcap} must be above 0; use None for none")


def check_targets(name: str, x: jax.Array, targets: jax.Array) -> None:
    """Check that there is an integer for each token.

    Raises:
        KernelError: of the operation `name`.
    """
    if targets.shape != x.shape[:-1]:
        raise KernelError(
            f"{name}: targets{targets.shape} need one value per token: {x.shape[:-1]}"
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise KernelError(f"{name}: targets must be integers, not {targets.dtype}")


def benchmark_products(
    call: ProductCall, loss: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
) -> Callable[[], Arrays]:
    """Return a function that computes a loss and its gradients on random arrays.

    Args:
        call: how large they are.
        loss: (x_TD, w_DV, targets_T) to a scalar; differentiated by the first two.
    """
    rng = np.random.default_rng(0)
    x_TD = jnp.asarray(rng.normal(size=(call.tokens, call.width)), call.dtype)
    w_DV = jnp.asarray(rng.normal(size=(call.width, call.vocabulary)), call.dtype)
    targets_T = jnp.asarray(rng.integers(0, call.vocabulary, call.tokens), jnp.int32)
    step = jax.jit(jax.value_and_grad(lambda x, w: loss(x, w, targets_T), (0, 1)))
    return lambda: step(x_TD, w_DV)


def work_of_products(call: ProductCall) -> Work:
    """The logits and the gradients of both their factors; the logits are not moved."""
    T, D, V = call.tokens, call.width, call.vocabulary
    item = np.dtype(call.dtype).itemsize
    return Work(flops=6.0 * T * D * V, bytes=float(item * 3 * (T * D + D * V)), dtype=call.dtype)
