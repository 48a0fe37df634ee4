"""The gated delta rule over a ragged batch, whose sequences keep their states in slots.

Short sequences, of one token or of as many as there are slots to keep states in, take steps of the
recurrence together. Those with more go in chunks, one chunk after the other, so that a batch costs
what its tokens cost, however they are divided.

Legend: T tokens of the batch, U sequences of the batch, L layers, A slots, J slots that a sequence
writes, K key heads, R value heads of a key head, H key width, V value width, C tokens of a chunk.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fornax.kernels._delta_rule import CHUNK, gated_delta_rule

__all__ = ["ragged_gated_delta_rule"]

Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]
"""Queries, keys, values, logarithms of decays and betas."""


def ragged_gated_delta_rule(
    q_TKH: jax.Array,
    k_TKH: jax.Array,
    v_TKRV: jax.Array,
    log_decay_TKR: jax.Array,
    beta_TKR: jax.Array | None,
    states_LAKRHV: jax.Array,
    *,
    layer: jax.Array,
    query_start_U1: jax.Array,
    slots_U: jax.Array,
    kept_UJ: jax.Array,
    fresh_U: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_rule` of sequences that stand one after the other; computed in float32.

    Args:
      q_TKH: queries, scaled already.
      k_TKH: keys.
      v_TKRV: values.
      log_decay_TKR: the logarithm of what a token leaves of the state.
      beta_TKR: how far a token moves what its key finds; None: see `gated_delta_rule`.
      states_LAKRHV: float32, the states of all layers and slots.
      layer: int32, the layer whose states are read and written.
      query_start_U1: int32 [U + 1], first token of each sequence; padding comes after the last.
      slots_U: int32, the slot that each sequence goes on from.
      kept_UJ: int32, the slots that take states: of a sequence with at most J tokens that after
        its j-th token, of one with more that after its last, in the first. What is no slot takes
        nothing; no slot is named twice.
      fresh_U: bool, whether a sequence begins here: it finds an empty state, whatever its slot
        holds.

    Returns:
      float32 o [T, K, R, V], which of padding means nothing, and the states, changed in the kept
      slots of sequences with tokens alone.

    Raises:
      KernelError: shapes that do not go together.
    """
    inputs = (q_TKH, k_TKH, v_TKRV, log_decay_TKR, beta_TKR)
    before_UKRHV = _held(states_LAKRHV, layer, slots_U, fresh_U)
    o_TKRV = jnp.zeros(v_TKRV.shape, jnp.float32)
    counts_U = query_start_U1[1:] - query_start_U1[:-1]
    rows = _Rows(query_start_U1, counts_U, kept_UJ, layer)
    o_TKRV, states_LAKRHV = _short(inputs, rows, before_UKRHV, o_TKRV, states_LAKRHV)
    if len(q_TKH) > kept_UJ.shape[1]:
        o_TKRV, states_LAKRHV = _longer(inputs, rows, before_UKRHV, o_TKRV, states_LAKRHV)
    return o_TKRV, states_LAKRHV


class _Rows(NamedTuple):
    """Where the batch's sequences lie, and where their states go."""

    starts_U1: jax.Array
    counts_U: jax.Array
    kept_UJ: jax.Array
    layer: jax.Array


def _held(
    states_LAKRHV: jax.Array, layer: jax.Array, slots_U: jax.Array, fresh_U: jax.Array
) -> jax.Array:
    """[U, K, R, H, V]: what each sequence's slot holds; 0 where the sequence begins.

    As a condition it is read in one place, before it is written: then XLA copies no states.
    """
    shape = (len(slots_U), *states_LAKRHV.shape[2:])
    held_UKRHV = jax.lax.cond(
        jnp.all(fresh_U),
        lambda: jnp.zeros(shape, jnp.float32),
        lambda: states_LAKRHV[layer, slots_U],
    )
    return jnp.where(fresh_U[:, None, None, None, None], 0.0, held_UKRHV)


def _short(
    inputs: Inputs,
    rows: _Rows,
    before_UKRHV: jax.Array,
    o_TKRV: jax.Array,
    states_LAKRHV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Sequences with at most J tokens: the j-th of all at once."""
    T, A, J = len(o_TKRV), states_LAKRHV.shape[1], rows.kept_UJ.shape[1]
    counts_U = jnp.where(rows.counts_U <= J, rows.counts_U, 0)

    def turn(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        o_TKRV, state_UKRHV, states_LAKRHV = carry
        there_U, at_U = j < counts_U, jnp.minimum(rows.starts_U1[:-1] + j, T - 1)
        o_U1KRV, state_UKRHV = gated_delta_rule(
            *jax.tree.map(lambda x: x[at_U][:, None], inputs),
            state_BKRHV=state_UKRHV,
            implementation="recurrent",
        )
        o_TKRV = o_TKRV.at[jnp.where(there_U, at_U, T)].set(o_U1KRV[:, 0], mode="drop")
        slots_U = jnp.where(there_U, rows.kept_UJ[:, j], A)
        states_LAKRHV = states_LAKRHV.at[rows.layer, slots_U].set(state_UKRHV, mode="drop")
        return o_TKRV, state_UKRHV, states_LAKRHV

    # A loop, of no turn if no sequence is short: a condition would copy what it changes.
    carry = o_TKRV, before_UKRHV, states_LAKRHV
    o_TKRV, _, states_LAKRHV = jax.lax.fori_loop(0, jnp.max(counts_U), turn, carry)
    return o_TKRV, states_LAKRHV


def _longer(
    inputs: Inputs,
    rows: _Rows,
    before_UKRHV: jax.Array,
    o_TKRV: jax.Array,
    states_LAKRHV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Sequences with more, one chunk after the other; states are written and never read."""
    T, A = len(o_TKRV), states_LAKRHV.shape[1]
    U, J = rows.kept_UJ.shape
    C = min(CHUNK, 1 << (T - 1).bit_length())
    starts_U1, counts_U = rows.starts_U1, rows.counts_U
    token_T = jnp.arange(T, dtype=jnp.int32)
    row_T = jnp.searchsorted(starts_U1[1:], token_T, side="right", method="compare_all")
    row_T = jnp.minimum(row_T, U - 1).astype(jnp.int32)
    offset_T = token_T - starts_U1[row_T]
    begins_T = (counts_U[row_T] > J) & (offset_T % C == 0) & (token_T < starts_U1[-1])
    [begin_V] = jnp.nonzero(begins_T, size=T // 2, fill_value=0)
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, C), *((0, 0),) * (x.ndim - 1))), inputs)

    def chunk(turn: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        o_TKRV, states_LAKRHV, state_KRHV = carry
        begin = begin_V[turn]
        row = row_T[begin]
        own_C = jnp.arange(C) < starts_U1[row + 1] - begin
        state_KRHV = jnp.where(offset_T[begin] == 0, before_UKRHV[row], state_KRHV)
        o_1CKRV, [state_KRHV] = gated_delta_rule(
            *jax.tree.map(lambda x: _cut(x, begin, own_C)[None], padded),
            state_BKRHV=state_KRHV[None],
            implementation="chunked",
        )
        there_CKRV = jax.lax.dynamic_slice_in_dim(o_TKRV, begin, C, 0)
        o_CKRV = jnp.where(own_C[:, None, None, None], o_1CKRV[0], there_CKRV)
        o_TKRV = jax.lax.dynamic_update_slice_in_dim(o_TKRV, o_CKRV, begin, 0)
        slot = jnp.where(begin + C < starts_U1[row + 1], A, rows.kept_UJ[row, 0])
        states_LAKRHV = states_LAKRHV.at[rows.layer, slot].set(state_KRHV, mode="drop")
        return o_TKRV, states_LAKRHV, state_KRHV

    wide = functools.partial(jnp.pad, pad_width=((0, C), (0, 0), (0, 0), (0, 0)))
    carry = wide(o_TKRV), states_LAKRHV, jnp.zeros_like(before_UKRHV[0])
    o_TKRV, states_LAKRHV, _ = jax.lax.fori_loop(0, jnp.sum(begins_T), chunk, carry)
    return o_TKRV[:T], states_LAKRHV


def _cut(x_T: jax.Array, begin: jax.Array, own_C: jax.Array) -> jax.Array:
    """A sequence's own tokens of those from `begin` on; zeros in place of the others, which leave
    a state as it is."""
    x_C = jax.lax.dynamic_slice_in_dim(x_T, begin, len(own_C), 0)
    return jnp.where(own_C.reshape(-1, *(1,) * (x_C.ndim - 1)), x_C, 0)
