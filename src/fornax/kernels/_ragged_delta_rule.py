"""The gated delta rule over a ragged batch, whose sequences keep their states in slots.

On one CPU a native kernel takes each sequence's tokens one after the other, in place. Elsewhere
short sequences, of one token or of as many as there are slots to keep states in, take steps of the
recurrence together. Those with more go in chunks, one chunk after the other, so that a batch costs
what its tokens cost, however they are divided.

Legend: T tokens of the batch, U sequences of the batch, L layers, A slots, J slots that a sequence
writes, K key heads, R value heads of a key head, H key width, V value width, C tokens of a chunk.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fornax.config.errors import KernelError
from fornax.kernels._delta_rule import CHUNK, gated_delta_rule
from fornax.kernels._grouped.call import free_devices
from fornax.kernels._layer.native import declines, is_open
from fornax.kernels._slots import SlotRows
from fornax.kernels.registry import Implementation, Operation, Work, current_platform, register

__all__ = ["RaggedDeltaCall", "ragged_delta_operation", "ragged_gated_delta_rule"]

Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]
"""Queries, keys, values, logarithms of decays and betas."""


@dataclass(frozen=True)
class RaggedDeltaCall:
    """One call: what implementations look at when they decline."""

    platform: str
    tokens: int
    rows: int
    """Sequences."""
    kept: int
    """States that a sequence writes, at most."""
    key_heads: int
    heads_per_key: int
    key_dim: int
    value_dim: int
    corrects: bool
    """Whether there is a beta."""
    devices: int
    """Over which XLA divides what is computed here."""


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
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`gated_delta_rule` of sequences that stand one after the other; computed in float32.

    The native kernel gives a sequence's tokens and states the same bits whatever else is in the
    batch, and however the sequence is divided into calls.

    Args:
      q_TKH: queries, scaled already.
      k_TKH: keys.
      v_TKRV: values.
      log_decay_TKR: the logarithm of what a token leaves of the state.
      beta_TKR: how far a token moves what its key finds; None: see `gated_delta_rule`.
      states_LAKRHV: float32, the states of all layers and slots.
      layer: int32, the layer whose states are read and written.
      query_start_U1: int32 [U + 1], first token of each sequence; padding comes after the last.
      slots_U: int32, the slot that each sequence continues from.
      kept_UJ: int32, the slots that take states: of a sequence with at most J tokens that after
        its j-th token, of one with more that after its last, in the first. What is not a slot takes
        nothing; no slot is named twice.
      fresh_U: bool, whether a sequence begins here: it finds an empty state, whatever its slot
        holds.
      implementation: name of one implementation to run, no other.

    Returns:
      float32 o [T, K, R, V], which of padding means nothing, and the states, changed in the kept
      slots of sequences with tokens alone.

    Raises:
      KernelError: shapes that do not go together, or `implementation` cannot run the call.
    """
    inputs = (q_TKH, k_TKH, v_TKRV, log_decay_TKR, beta_TKR)
    rows = SlotRows(query_start_U1, slots_U, kept_UJ, fresh_U, layer)
    _check(inputs, states_LAKRHV, rows)
    T, K, R, V = v_TKRV.shape
    if is_open(v_TKRV, states_LAKRHV, kept_UJ):
        return _xla(inputs, states_LAKRHV, rows)
    call = RaggedDeltaCall(
        platform=current_platform(),
        tokens=T,
        rows=kept_UJ.shape[0],
        kept=kept_UJ.shape[1],
        key_heads=K,
        heads_per_key=R,
        key_dim=k_TKH.shape[-1],
        value_dim=V,
        corrects=beta_TKR is not None,
        devices=free_devices(),
    )
    return ragged_delta_operation.choose(call, implementation).run(inputs, states_LAKRHV, rows)


def _check(inputs: Inputs, states: jax.Array, rows: SlotRows) -> None:
    q, k, v, log_decay, beta = inputs
    if v.ndim != 4 or states.ndim != 6:
        raise KernelError(
            f"ragged_gated_delta_rule: v{v.shape} must be [T, K, R, V], and states{states.shape} "
            "[L, A, K, R, H, V]"
        )
    T, K, R, V = v.shape
    H = states.shape[4]
    wanted = {
        "q": (q, (T, K, H)),
        "k": (k, (T, K, H)),
        "log_decay": (log_decay, (T, K, R)),
        "beta": (beta, (T, K, R)),
        "states": (states, (*states.shape[:2], K, R, H, V)),
    }
    rows.check("ragged_gated_delta_rule", f"v{v.shape}, states{states.shape}", wanted)
    if states.dtype != jnp.float32:
        raise KernelError(
            f"ragged_gated_delta_rule: the states are {states.dtype}; keep them in float32"
        )


def _native(
    inputs: Inputs, states_LAKRHV: jax.Array, rows: SlotRows
) -> tuple[jax.Array, jax.Array]:
    q, k, v, log_decay, beta = (
        jnp.zeros((0,)) if x is None else x.astype(jnp.float32) for x in inputs
    )
    results = tuple(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (states_LAKRHV, v))
    call = jax.ffi.ffi_call("fornax_ragged_delta_rule", results, input_output_aliases={0: 0})
    states_LAKRHV, o_TKRV = call(
        states_LAKRHV,
        *(q, k, v, log_decay, beta),
        *(rows.layer, rows.starts_U1, rows.slots_U, rows.kept_UJ, rows.fresh_U),
    )
    return o_TKRV, states_LAKRHV


def _xla(inputs: Inputs, states_LAKRHV: jax.Array, rows: SlotRows) -> tuple[jax.Array, jax.Array]:
    before_UKRHV = rows.held(states_LAKRHV)
    o_TKRV = jnp.zeros(inputs[2].shape, jnp.float32)
    o_TKRV, states_LAKRHV = _short(inputs, rows, before_UKRHV, o_TKRV, states_LAKRHV)
    if len(o_TKRV) > rows.kept_UJ.shape[1]:
        o_TKRV, states_LAKRHV = _longer(inputs, rows, before_UKRHV, o_TKRV, states_LAKRHV)
    return o_TKRV, states_LAKRHV


def _short(
    inputs: Inputs,
    rows: SlotRows,
    before_UKRHV: jax.Array,
    o_TKRV: jax.Array,
    states_LAKRHV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Sequences with at most J tokens: the j-th of all at once."""
    T, A, J = len(o_TKRV), states_LAKRHV.shape[1], rows.kept_UJ.shape[1]
    counts_U = jnp.where(rows.counts <= J, rows.counts, 0)

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
    rows: SlotRows,
    before_UKRHV: jax.Array,
    o_TKRV: jax.Array,
    states_LAKRHV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Sequences with more, one chunk after the other; states are written and never read."""
    T, A = len(o_TKRV), states_LAKRHV.shape[1]
    U, J = rows.kept_UJ.shape
    C = min(CHUNK, 1 << (T - 1).bit_length())
    starts_U1, counts_U = rows.starts_U1, rows.counts
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


def _declines(call: RaggedDeltaCall) -> str | None:
    return declines(call.devices, unit="linear_attention")


def _benchmark(
    call: RaggedDeltaCall, run: Callable[..., tuple[jax.Array, jax.Array]]
) -> Callable[[], object]:
    T, U, J, K, R = call.tokens, call.rows, call.kept, call.key_heads, call.heads_per_key
    keys = jax.random.split(jax.random.key(0), 4)
    q_TKH, k_TKH = jax.random.normal(keys[0], (2, T, K, call.key_dim)) * call.key_dim**-0.5
    v_TKRV = jax.random.normal(keys[1], (T, K, R, call.value_dim))
    decay_TKR, beta_TKR = jax.random.uniform(keys[2], (2, T, K, R))
    inputs = q_TKH, k_TKH, v_TKRV, -decay_TKR, beta_TKR if call.corrects else None
    states = jax.random.normal(keys[3], (2, U * J, K, R, call.key_dim, call.value_dim))
    rows = SlotRows.even(T, U, J)
    work = jax.jit(run, donate_argnums=1)
    held = [states]

    def step() -> tuple[jax.Array, jax.Array]:
        o_TKRV, held[0] = work(inputs, held[0], rows)
        return o_TKRV, held[0]

    return step


def _work(call: RaggedDeltaCall) -> Work:
    """Each sequence's state read and written once; a product for each of finding, where the rule
    corrects, writing and reading."""
    state = call.key_heads * call.heads_per_key * call.key_dim * call.value_dim
    token = call.key_heads * (2 * call.key_dim + call.heads_per_key * (2 * call.value_dim + 2))
    moved = 2.0 * min(call.rows, call.tokens) * state + call.tokens * token
    flops = (6.0 if call.corrects else 4.0) * call.tokens * state
    return Work(flops=flops, bytes=4.0 * moved, dtype="float32")


ragged_delta_operation: Operation[RaggedDeltaCall] = register(
    Operation(
        "ragged_gated_delta_rule",
        (
            Implementation("native", _native, _declines, platform="cpu", steady=True),
            Implementation("xla", _xla, lambda call: None),
        ),
        _benchmark,
        work=_work,
        call=RaggedDeltaCall,
    )
)
