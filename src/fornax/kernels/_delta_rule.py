"""The gated delta rule: linear attention whose state forgets, and corrects what it holds.

A value head's state S [H, V] maps keys to values. Each token lets it decay, moves what its key
finds there towards its value, and reads it with its query:

    S <- exp(g) S;  S <- S + beta k (v - S^T k)^T;  o = S^T q

(Yang, Kautz and Hatamizadeh 2024, Gated Delta Networks, equation 10). Many tokens go in chunks. In
a chunk each correction depends on those before it: a triangular system, whose inverse does not
depend on the state (section 3.3, the extended WY form). So all chunks are prepared at once, and
only the states follow one another.

Without the correction, S <- exp(g) S + k v^T, it is the state space model of Mamba-2, whose chunks
are the blocks of a semiseparable matrix (Dao and Gu 2024, Transformers are SSMs, section 6): the
query is its C, the key its B, the value its input times the step, and g the step times A.

Legend: B batch, T tokens, K key heads, R value heads of a key head, H key width, V value width,
N chunks, C (I, J) tokens of a chunk.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fornax.config.errors import KernelError

__all__ = ["CHUNK", "gated_delta_rule"]

CHUNK = 64
"""Tokens of a chunk."""
_EXACT = jax.lax.Precision.HIGHEST
_NOTHING = -100.0


def gated_delta_rule(
    q_BTKH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKRV: jax.Array,
    log_decay_BTKR: jax.Array,
    beta_BTKR: jax.Array | None,
    *,
    starts_BT: jax.Array | None = None,
    state_BKRHV: jax.Array | None = None,
    implementation: Literal["chunked", "recurrent"] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Read and write each head's state, token by token; computed in float32.

    Args:
      q_BTKH: queries, scaled already.
      k_BTKH: keys, of length 1 (or less) for the state to stay bounded where it is corrected.
      v_BTKRV: values; a key head's query and key serve R value heads.
      log_decay_BTKR: g, 0 or less: the logarithm of what a token leaves of the state.
      beta_BTKR: how far a token moves what its key finds, 0 to 1. With g = 0 and beta = 0 a token
        leaves the state as it is. None: values are added without correcting what the keys find;
        then g = 0 and v = 0 leave the state as it is.
      starts_BT: bool, whether a token begins a document: it finds an empty state. None: none does.
      state_BKRHV: float32, what the tokens before left; None for zeros.
      implementation: chunked, recurrent (one token after the other), or None: recurrent for a
        single token.

    Returns:
      float32 o [B, T, K, R, V], and the state after the last token.

    Raises:
      KernelError: shapes that do not go together, or an unknown implementation.
    """
    _check(q_BTKH, k_BTKH, v_BTKRV, log_decay_BTKR, beta_BTKR, starts_BT, state_BKRHV)
    B, T, K, R, V = v_BTKRV.shape
    if implementation is None:
        implementation = "recurrent" if T == 1 else "chunked"
    if implementation not in ("chunked", "recurrent"):
        raise KernelError(
            f"gated_delta_rule: implementation={implementation!r} is not known; use 'chunked', "
            "'recurrent' or None"
        )
    if state_BKRHV is None:
        state_BKRHV = jnp.zeros((B, K, R, k_BTKH.shape[3], V), jnp.float32)
    if starts_BT is None:
        starts_BT = jnp.zeros((B, T), bool)
    run = _chunked if implementation == "chunked" else _recurrent
    return run(
        q_BTKH.astype(jnp.float32),
        k_BTKH.astype(jnp.float32),
        v_BTKRV.astype(jnp.float32),
        log_decay_BTKR.astype(jnp.float32),
        None if beta_BTKR is None else beta_BTKR.astype(jnp.float32),
        starts_BT,
        state_BKRHV.astype(jnp.float32),
    )


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array | None,
    starts: jax.Array | None,
    state: jax.Array | None,
) -> None:
    if v.ndim != 5 or q.ndim != 4:
        raise KernelError(
            f"gated_delta_rule: q{q.shape} must be [B, T, K, H], and v{v.shape} [B, T, K, R, V]"
        )
    B, T, K, R, V = v.shape
    wanted = {
        "q": (q, (B, T, K, q.shape[3])),
        "k": (k, (B, T, K, q.shape[3])),
        "log_decay": (log_decay, (B, T, K, R)),
        "beta": (beta, (B, T, K, R)),
        "starts": (starts, (B, T)),
        "state": (state, (B, K, R, q.shape[3], V)),
    }
    for name, (array, shape) in wanted.items():
        if array is not None and array.shape != shape:
            raise KernelError(
                f"gated_delta_rule: {name}{array.shape} must be {shape} beside v{v.shape}"
            )


def _recurrent(
    q_BTKH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKRV: jax.Array,
    log_decay_BTKR: jax.Array,
    beta_BTKR: jax.Array | None,
    starts_BT: jax.Array,
    state_BKRHV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    def step(state_BKRHV: jax.Array, token: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        q_BKH, k_BKH, v_BKRV, kept_BKR, beta_BKR = token
        state_BKRHV = state_BKRHV * kept_BKR[..., None, None]
        moved_BKRV = v_BKRV
        if beta_BKR is not None:
            found_BKRV = _einsum("BKH,BKRHV->BKRV", k_BKH, state_BKRHV)
            moved_BKRV = beta_BKR[..., None] * (v_BKRV - found_BKRV)
        state_BKRHV = state_BKRHV + k_BKH[:, :, None, :, None] * moved_BKRV[..., None, :]
        return state_BKRHV, _einsum("BKH,BKRHV->BKRV", q_BKH, state_BKRHV)

    kept_BTKR = jnp.where(starts_BT[:, :, None, None], 0.0, jnp.exp(log_decay_BTKR))
    tokens = (q_BTKH, k_BTKH, v_BTKRV, kept_BTKR, beta_BTKR)
    state_BKRHV, o_TBKRV = jax.lax.scan(
        step, state_BKRHV, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    )
    return jnp.moveaxis(o_TBKRV, 0, 1), state_BKRHV


def _chunked(
    q_BTKH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKRV: jax.Array,
    log_decay_BTKR: jax.Array,
    beta_BTKR: jax.Array | None,
    starts_BT: jax.Array,
    state_BKRHV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    B, T, K, R, V = v_BTKRV.shape
    C = min(CHUNK, 1 << (T - 1).bit_length())
    q_NBKCH, k_NBKCH = _cut(q_BTKH, C, -2), _cut(k_BTKH, C, -2)
    own_NBKRCV = _cut(v_BTKRV, C, -2)
    # Documents of a chunk by number; 0 is the one that the state is of.
    run_NBC = jnp.cumsum(_cut(starts_BT, C, -1).astype(jnp.int32), axis=-1)
    seen_NBIJ = (run_NBC[..., :, None] == run_NBC[..., None, :]) & np.tri(C, dtype=bool)

    since_start = functools.partial(_einsum, "NBIJ,NBKRJ->NBKRI", seen_NBIJ.astype(jnp.float32))
    coarse_NBKRC, fine_NBKRC = map(since_start, _split(_cut(log_decay_BTKR, C, -1)))
    total_NBKRC = coarse_NBKRC + fine_NBKRC
    between_NBKRIJ = _differences(coarse_NBKRC) + _differences(fine_NBKRC)
    decay_NBKRIJ = jnp.exp(jnp.where(seen_NBIJ[:, :, None, None], between_NBKRIJ, -jnp.inf))
    since_NBKRC = jnp.where(run_NBC[:, :, None, None] == 0, jnp.exp(total_NBKRC), 0.0)
    reads_NBKRCH = None
    if beta_BTKR is not None:
        beta_NBKRC = _cut(beta_BTKR, C, -1)
        keys_NBKIJ = _einsum("NBKIH,NBKJH->NBKIJ", k_NBKCH, k_NBKCH)
        coupling_NBKRIJ = beta_NBKRC[..., None] * decay_NBKRIJ * keys_NBKIJ[:, :, :, None]
        solve_NBKRIJ = _unit_inverse(jnp.where(np.tri(C, k=-1, dtype=bool), coupling_NBKRIJ, 0.0))
        moves_NBKRCV = beta_NBKRC[..., None] * own_NBKRCV
        own_NBKRCV = _einsum("NBKRIJ,NBKRJV->NBKRIV", solve_NBKRIJ, moves_NBKRCV)
        weighted_NBKRCH = (beta_NBKRC * since_NBKRC)[..., None] * k_NBKCH[:, :, :, None]
        reads_NBKRCH = _einsum("NBKRIJ,NBKRJH->NBKRIH", solve_NBKRIJ, weighted_NBKRCH)
    scores_NBKIJ = _einsum("NBKIH,NBKJH->NBKIJ", q_NBKCH, k_NBKCH)
    scores_NBKRIJ = decay_NBKRIJ * scores_NBKIJ[:, :, :, None]

    def step(state_BKRHV: jax.Array, chunk: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        q_BKCH, k_BKCH, moved_BKRCV, reads_BKRCH, scores_BKRIJ, since_BKRC, until_BKRC = chunk
        if reads_BKRCH is not None:
            moved_BKRCV = moved_BKRCV - _einsum("BKRCH,BKRHV->BKRCV", reads_BKRCH, state_BKRHV)
        o_BKRCV = since_BKRC[..., None] * _einsum("BKCH,BKRHV->BKRCV", q_BKCH, state_BKRHV)
        o_BKRCV = o_BKRCV + _einsum("BKRIJ,BKRJV->BKRIV", scores_BKRIJ, moved_BKRCV)
        written_BKRHV = _einsum("BKCH,BKRCV->BKRHV", k_BKCH, until_BKRC[..., None] * moved_BKRCV)
        return since_BKRC[..., -1:, None] * state_BKRHV + written_BKRHV, o_BKRCV

    chunks = (
        q_NBKCH,
        k_NBKCH,
        own_NBKRCV,
        reads_NBKRCH,
        scores_NBKRIJ,
        since_NBKRC,
        decay_NBKRIJ[..., -1, :],
    )
    state_BKRHV, o_NBKRCV = jax.lax.scan(step, state_BKRHV, chunks)
    o_BNCKRV = jnp.moveaxis(o_NBKRCV, (0, -2), (1, 2))
    return o_BNCKRV.reshape(B, -1, K, R, V)[:, :T], state_BKRHV


def _cut(x_BT: jax.Array, chunk: int, to: int) -> jax.Array:
    """[B, T, ...] as [N, B, ...] with a chunk's tokens on axis `to`, filled up with zeros."""
    missing = -x_BT.shape[1] % chunk
    x_BT = jnp.pad(x_BT, ((0, 0), (0, missing), *[(0, 0)] * (x_BT.ndim - 2)))
    x_BNC = x_BT.reshape(x_BT.shape[0], -1, chunk, *x_BT.shape[2:])
    return jnp.moveaxis(x_BNC, (1, 2), (0, to))


def _split(log_decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two parts, of which the coarse one's sums over a chunk are exact.

    A decay between neighbours is the difference of two sums since the chunk's start, which may be
    large where others decayed fast. The coarse part counts in 1/1024, so that sums up to 2^13 fit
    in 24 bits; below `_NOTHING` a float32 decay is 0 anyway.
    """
    log_decay = jnp.maximum(log_decay, _NOTHING)
    coarse = jax.lax.stop_gradient(jnp.round(log_decay * 1024) / 1024)
    return coarse, log_decay - coarse


def _differences(total_NBKRC: jax.Array) -> jax.Array:
    return total_NBKRC[..., :, None] - total_NBKRC[..., None, :]


@jax.custom_jvp
def _unit_inverse(a: jax.Array) -> jax.Array:
    """(I + a)^-1 for strictly lower triangular a [..., C, C], C a power of two.

    Blocks of twice the size have the inverse [[P, 0], [-Q c P, Q]] of their halves' P and Q. Unlike
    a sum of powers of a, which cancels where keys are alike, this is as exact as substitution.
    """
    index = np.arange(a.shape[-1])
    inverse, size = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape), 1
    while size < a.shape[-1]:
        block = index // size
        below = (block[:, None] == block + 1) & (block[:, None] % 2 == 1)
        corner = jnp.where(below, a, 0.0)
        inverse = inverse - (corner if size == 1 else _between(inverse, corner))
        size *= 2
    return inverse


@_unit_inverse.defjvp
def _unit_inverse_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    inverse = _unit_inverse(primals[0])
    return inverse, -_between(inverse, tangents[0])


def _between(outer: jax.Array, inner: jax.Array) -> jax.Array:
    return _matmul(_matmul(outer, inner), outer)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=_EXACT)


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=_EXACT)
