"""The gated delta rule over a ragged batch, whose sequences keep their states in slots.

Sequences with one token take a step of the recurrence together. Those with more go in chunks, one
chunk after the other, so that a batch costs what its tokens cost, however they are divided.

Legend: T tokens of the batch, U sequences of the batch, L layers, A slots, K key heads, R value
heads of a key head, H key width, V value width, C tokens of a chunk.
"""

import functools

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
      slots_U: int32, the slot of each sequence; no two that have tokens share one.
      fresh_U: bool, whether a sequence begins here: it finds an empty state, whatever its slot
        holds.

    Returns:
      float32 o [T, K, R, V], which of padding means nothing, and the states, changed in the slots
      of sequences with tokens alone.

    Raises:
      KernelError: shapes that do not go together.
    """
    counts_U = query_start_U1[1:] - query_start_U1[:-1]
    inputs = (q_TKH, k_TKH, v_TKRV, log_decay_TKR, beta_TKR)
    before_UKRHV = _held(states_LAKRHV, layer, slots_U, fresh_U)
    carry = jnp.zeros(v_TKRV.shape, jnp.float32), before_UKRHV
    # A loop of at most one turn: a condition would copy what it changes.
    some = jnp.any(counts_U == 1).astype(jnp.int32)
    single = functools.partial(_single, inputs, query_start_U1)
    o_TKRV, after_UKRHV = jax.lax.fori_loop(0, some, lambda _, carry: single(*carry), carry)
    if len(q_TKH) > 1:
        o_TKRV, after_UKRHV = _longer(inputs, query_start_U1, before_UKRHV, o_TKRV, after_UKRHV)
    slots_U = jnp.where(counts_U > 0, slots_U, states_LAKRHV.shape[1])
    return o_TKRV, states_LAKRHV.at[layer, slots_U].set(after_UKRHV, mode="drop")


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


def _single(
    inputs: Inputs,
    starts_U1: jax.Array,
    o_TKRV: jax.Array,
    states_UKRHV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Sequences with one token, all at once."""
    T = len(o_TKRV)
    single_U = starts_U1[1:] - starts_U1[:-1] == 1
    first_U = jnp.minimum(starts_U1[:-1], T - 1)
    o_U1KRV, after_UKRHV = gated_delta_rule(
        *jax.tree.map(lambda x: x[first_U][:, None], inputs),
        state_BKRHV=states_UKRHV,
        implementation="recurrent",
    )
    o_TKRV = o_TKRV.at[jnp.where(single_U, first_U, T)].set(o_U1KRV[:, 0], mode="drop")
    return o_TKRV, after_UKRHV


def _longer(
    inputs: Inputs,
    starts_U1: jax.Array,
    before_UKRHV: jax.Array,
    o_TKRV: jax.Array,
    after_UKRHV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Sequences with more, one chunk after the other; `after` is written and never read."""
    T, U = len(o_TKRV), len(before_UKRHV)
    C = min(CHUNK, 1 << (T - 1).bit_length())
    token_T = jnp.arange(T, dtype=jnp.int32)
    row_T = jnp.searchsorted(starts_U1[1:], token_T, side="right", method="compare_all")
    row_T = jnp.minimum(row_T, U - 1).astype(jnp.int32)
    offset_T, counts_U = token_T - starts_U1[row_T], starts_U1[1:] - starts_U1[:-1]
    begins_T = (counts_U[row_T] > 1) & (offset_T % C == 0) & (token_T < starts_U1[-1])
    [begin_V] = jnp.nonzero(begins_T, size=T // 2, fill_value=0)
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, C), *((0, 0),) * (x.ndim - 1))), inputs)

    def chunk(turn: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        o_TKRV, after_UKRHV, state_KRHV = carry
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
        return o_TKRV, after_UKRHV.at[row].set(state_KRHV), state_KRHV

    wide = functools.partial(jnp.pad, pad_width=((0, C), (0, 0), (0, 0), (0, 0)))
    carry = wide(o_TKRV), after_UKRHV, jnp.zeros_like(before_UKRHV[0])
    o_TKRV, after_UKRHV, _ = jax.lax.fori_loop(0, jnp.sum(begins_T), chunk, carry)
    return o_TKRV[:T], after_UKRHV


def _cut(x_T: jax.Array, begin: jax.Array, own_C: jax.Array) -> jax.Array:
    """A sequence's own tokens of those from `begin` on; zeros in place of the others, which leave
    a state as it is."""
    x_C = jax.lax.dynamic_slice_in_dim(x_T, begin, len(own_C), 0)
    return jnp.where(own_C.reshape(-1, *(1,) * (x_C.ndim - 1)), x_C, 0)
