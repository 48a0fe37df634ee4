"""The gated delta rule over a ragged batch, whose sequences keep their states in slots.

Sequences with one token take a step of the recurrence together. Those with more go in chunks, one
chunk after the other, so that a batch costs what its tokens cost, however they are divided.

Legend: T tokens of the batch, U sequences of the batch, L layers, A slots, K key heads, R value
heads of a key head, H key width, V value width, C tokens of a chunk.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fornax.kernels._delta_rule import CHUNK, gated_delta_rule

__all__ = ["ragged_gated_delta_rule"]


class _Batch(NamedTuple):
    """What the sequences of a batch are."""

    query_start_U1: jax.Array
    slots_U: jax.Array
    fresh_U: jax.Array
    layer: jax.Array

    @property
    def counts(self) -> jax.Array:
        """int32 [U], tokens of each."""
        return self.query_start_U1[1:] - self.query_start_U1[:-1]

    def state(self, states_LAKRHV: jax.Array, row: jax.Array, begins: jax.Array) -> jax.Array:
        """[..., K, R, H, V]: what a sequence's slot holds; 0 where the sequence begins."""
        state = states_LAKRHV[self.layer, self.slots_U[row]]
        none = self.fresh_U[row] & begins
        return jnp.where(none[..., None, None, None, None], 0.0, state)


def ragged_gated_delta_rule(
    q_TKH: jax.Array,
    k_TKH: jax.Array,
    v_TKRV: jax.Array,
    log_decay_TKR: jax.Array,
    beta_TKR: jax.Array,
    states_LAKRHV: jax.Array,
    *,
    layer: jax.Array,
    query_start_U1: jax.Array,
    slots_U: jax.Array,
    fresh_U: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_rule` of sequences that stand one after the other; computed in float32.

    Args:
      q_TKH: queries, scaled already.
      k_TKH: keys.
      v_TKRV: values.
      log_decay_TKR: the logarithm of what a token leaves of the state.
      beta_TKR: how far a token moves what its key finds.
      states_LAKRHV: float32, the states of all layers and slots.
      layer: int32, the layer whose states are read and written.
      query_start_U1: int32 [U + 1], first token of each sequence; padding comes after the last.
      slots_U: int32, the slot of each sequence; no two that have tokens share one.
      fresh_U: bool, whether a sequence begins here: it finds an empty state, whatever its slot
        holds.

    Returns:
      float32 o [T, K, R, V], which of padding means nothing, and the states, changed in the slots
      of sequences with tokens alone.

    Raises:
      KernelError: shapes that do not go together.
    """
    batch = _Batch(query_start_U1, slots_U, fresh_U, layer)
    inputs = (q_TKH, k_TKH, v_TKRV, log_decay_TKR, beta_TKR)
    carry = jnp.zeros(v_TKRV.shape, jnp.float32), states_LAKRHV
    if len(q_TKH) > 1:
        carry = _longer(inputs, batch, *carry)
    # A loop of at most one turn: a condition would copy the states.
    some = jnp.any(batch.counts == 1).astype(jnp.int32)
    return jax.lax.fori_loop(0, some, lambda _, carry: _single(inputs, batch, *carry), carry)


def _single(
    inputs: tuple[jax.Array, ...], batch: _Batch, o_TKRV: jax.Array, states_LAKRHV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sequences with one token, all at once."""
    T, A = len(o_TKRV), states_LAKRHV.shape[1]
    single_U = batch.counts == 1
    first_U = jnp.minimum(batch.query_start_U1[:-1], T - 1)
    before = batch.state(states_LAKRHV, jnp.arange(len(single_U)), single_U)
    o_U1KRV, after = gated_delta_rule(
        *(x[first_U][:, None] for x in inputs), state_BKRHV=before, implementation="recurrent"
    )
    o_TKRV = o_TKRV.at[jnp.where(single_U, first_U, T)].set(o_U1KRV[:, 0], mode="drop")
    slots_U = jnp.where(single_U, batch.slots_U, A)
    return o_TKRV, states_LAKRHV.at[batch.layer, slots_U].set(after, mode="drop")


def _longer(
    inputs: tuple[jax.Array, ...], batch: _Batch, o_TKRV: jax.Array, states_LAKRHV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sequences with more, one chunk after the other."""
    T, U = len(o_TKRV), len(batch.slots_U)
    C = min(CHUNK, 1 << (T - 1).bit_length())
    token_T = jnp.arange(T, dtype=jnp.int32)
    starts_U1 = batch.query_start_U1
    row_T = jnp.searchsorted(starts_U1[1:], token_T, side="right", method="compare_all")
    row_T = jnp.minimum(row_T, U - 1).astype(jnp.int32)
    offset_T = token_T - starts_U1[row_T]
    begins_T = (batch.counts[row_T] > 1) & (offset_T % C == 0) & (token_T < starts_U1[-1])
    [begin_V] = jnp.nonzero(begins_T, size=T // 2, fill_value=0)
    padded = [jnp.pad(x, ((0, C), *((0, 0),) * (x.ndim - 1))) for x in inputs]

    def chunk(turn: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        o_TKRV, states_LAKRHV = carry
        begin = begin_V[turn]
        row = row_T[begin]
        own_C = jnp.arange(C) < starts_U1[row + 1] - begin
        # What follows is written anew when its turn comes.
        o_1CKRV, after = gated_delta_rule(
            *(_cut(x, begin, own_C)[None] for x in padded),
            state_BKRHV=batch.state(states_LAKRHV, row, offset_T[begin] == 0)[None],
            implementation="chunked",
        )
        o_TKRV = jax.lax.dynamic_update_slice_in_dim(o_TKRV, o_1CKRV[0], begin, 0)
        return o_TKRV, states_LAKRHV.at[batch.layer, batch.slots_U[row]].set(after[0])

    wide = functools.partial(jnp.pad, pad_width=((0, C), (0, 0), (0, 0), (0, 0)))
    carry = wide(o_TKRV), states_LAKRHV
    o_TKRV, states_LAKRHV = jax.lax.fori_loop(0, jnp.sum(begins_T), chunk, carry)
    return o_TKRV[:T], states_LAKRHV


def _cut(x_T: jax.Array, begin: jax.Array, own_C: jax.Array) -> jax.Array:
    """A sequence's own tokens of those from `begin` on; zeros in place of the others, which leave
    a state as it is."""
    x_C = jax.lax.dynamic_slice_in_dim(x_T, begin, len(own_C), 0)
    return jnp.where(own_C.reshape(-1, *(1,) * (x_C.ndim - 1)), x_C, 0)
