"""Ring attention: devices that divide the length pass their keys and values round.

Each device keeps its own queries and attends to the keys of one device after the other; results
are joined by their log-sum-exp (Liu et al. 2023, Ring Attention with Blockwise Transformers). While
it computes with some keys the next ones are on their way. The backward pass goes round again with
the gradients of keys and values, which arrive at home last. No device ever holds all keys.

Products are those of the native CPU kernel, elsewhere of `blockwise`, XLA's operations.

Legend: B batch, T tokens of a device, N query heads, K key/value heads, G query heads per key head,
H head width, n devices of the ring, C tokens of a block.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from fornax.kernels import _native
from fornax.kernels._attention import blockwise
from fornax.kernels._attention.blocks import Band
from fornax.kernels._attention.call import AttentionCall, AttentionInputs, ScoreOptions, fill
from fornax.kernels._attention.native import attend_native, pull_native
from fornax.kernels._attention.sharded import on_devices
from fornax.kernels.registry import current_platform
from fornax.mesh import axes_in_use, balanced_order, shards

__all__ = ["Hop", "Ring", "band_of", "declines", "ring", "runs_native"]

_LOWEST = -1e30
_MOST_BLOCKS = 4
"""Blocks of a part without a window: of the two parts that a device compares with themselves a
half is masked, of their blocks an eighth."""


def declines(call: AttentionCall) -> str | None:
    """Say why devices cannot pass the keys of `call` round."""
    if call.length_shards == 1:
        return "the mesh does not divide the length"
    if call.queries != call.keys:
        return f"it needs as many queries as keys, not {call.queries} and {call.keys}"
    if call.queries % call.length_shards:
        return (
            f"{call.queries} tokens of a row do not divide over the {call.length_shards} devices "
            "of the ring"
        )
    if 0 in (call.batch, call.queries, call.heads, call.head_dim, call.value_dim):
        return "an array is empty"
    return None


def runs_native(platform: str, dtype: str) -> bool:
    """Whether a device multiplies with the native CPU kernel."""
    fits = platform == "cpu" and dtype in ("float32", "bfloat16")
    return fits and _native.unavailable("attention") is None


def band_of(*, causal: bool, window: int | None, consecutive: bool) -> Band:
    """Distances between indexes that may be seen; all where indexes say nothing of positions."""
    most = None if window is None or not consecutive else window - 1
    if causal and consecutive:
        return Band(least=0, most=most)
    return Band(least=None if most is None else -most, most=most)


class Hop(NamedTuple):
    """One stay of keys and values on their way round."""

    shift: int
    """How many devices beyond their home they are."""
    pairs: np.ndarray
    """int32 [n, P, 3]: for each device up to P pairs of a block of its queries and one of the keys
    there in which something can be seen, and whether the pair is one: 0 fills up."""


@dataclass(frozen=True)
class Ring:
    """What is static about the ring of one call."""

    devices: int
    balanced: bool
    band: Band
    tokens: int
    """Of one device."""
    native: bool
    """Whether the kernel skips what is masked within a block."""

    @functools.cached_property
    def size(self) -> int:
        """Tokens of a block: all of a part of the row, or less so that what is masked can be left
        out; no less than a window, and than a block of `blockwise`."""
        part = self.tokens // (2 if self.balanced else 1)
        most = 1
        if self.band.most is not None:
            most = part // max(self.band.most + 1, blockwise.BLOCK)
        elif self.band.least is not None:
            most = min(_MOST_BLOCKS, part // blockwise.BLOCK)
        if self.native:
            most = 1
        return part // max(n for n in range(1, max(most, 1) + 1) if part % n == 0)

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """Index in the row of the first token of each block: int [n, blocks of a device]."""
        order = balanced_order(self.devices) if self.balanced else np.arange(self.devices)
        parts = order.reshape(self.devices, -1) * (self.tokens // (2 if self.balanced else 1))
        inside = np.arange(0, self.tokens // parts.shape[1], self.size)
        return (parts[:, :, None] + inside).reshape(self.devices, -1)

    @functools.cached_property
    def hops(self) -> tuple[Hop, ...]:
        """Where keys and values stop: at home, and where a device sees some of them."""
        return tuple(self._hops())

    def _hops(self) -> Iterator[Hop]:
        least, most, reach = self.band.least, self.band.most, self.size - 1
        for shift in range(self.devices):
            keys = np.roll(self.starts, shift, axis=0)  # device i has those of i - shift
            distance = self.starts[:, :, None] - keys[:, None, :]
            seen = np.ones(distance.shape, bool)
            if least is not None:
                seen &= distance + reach >= least
            if most is not None:
                seen &= distance - reach <= most
            count = int(seen.sum(axis=(1, 2)).max())
            pairs = np.zeros((self.devices, count, 3), np.int32)
            for device in range(self.devices):
                found = np.argwhere(seen[device])
                pairs[device, : len(found), :2] = found
                pairs[device, : len(found), 2] = 1
            if count:
                yield Hop(shift, pairs)


@dataclass(frozen=True)
class _Static:
    """What is static about one device's work."""

    ring: Ring
    options: ScoreOptions
    axes: tuple[str, ...]
    """Of the mesh, that divide the length."""


def ring(inputs: AttentionInputs) -> jax.Array:
    """Compute attention, on each device for its own rows, heads and queries."""
    axes = axes_in_use("length")
    devices = shards(axes)
    static = _Static(
        ring=Ring(
            devices=devices,
            balanced=inputs.balanced,
            band=band_of(
                causal=inputs.causal,
                window=inputs.window,
                consecutive=inputs.consecutive or inputs.positions_q_BT is None,
            ),
            tokens=inputs.q_BTNH.shape[1] // devices,
            native=runs_native(current_platform(), inputs.q_BTNH.dtype.name),
        ),
        options=inputs.score_options,
        axes=axes,
    )
    tokens = tuple(ids.astype(jnp.int32) for ids in fill(inputs))
    dtype = jnp.promote_types(inputs.q_BTNH.dtype, jnp.float32)
    sinks_N = jnp.zeros((0,), dtype) if inputs.sinks_N is None else inputs.sinks_N.astype(dtype)
    attend = functools.partial(_attend, static)
    return on_devices(attend, inputs.q_BTNH, inputs.k_BSKH, inputs.v_BSKH, tokens, sinks_N)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    static: _Static,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    tokens: tuple[jax.Array, ...],
    sinks_N: jax.Array,
) -> jax.Array:
    return _forward(static, q_BTNH, k_BTKH, v_BTKH, tokens, sinks_N)[0]


def _forward(
    static: _Static,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    tokens: tuple[jax.Array, ...],
    sinks_N: jax.Array,
) -> tuple[jax.Array, tuple[Any, ...]]:
    positions_q, positions_k, segments_q, segments_k = tokens
    B, T, N, _ = q_BTNH.shape
    queries = (q_BTNH, positions_q, segments_q)
    keys = (k_BTKH, v_BTKH, jnp.stack([positions_k, segments_k], axis=-1))
    dtype = sinks_N.dtype
    first_N = sinks_N if sinks_N.size else jnp.full((N,), _LOWEST, dtype)
    joined = (
        jnp.zeros((B, T, N, v_BTKH.shape[3]), dtype),
        jnp.broadcast_to(first_N[:, None], (B, N, T)),
    )
    for hop, send in _way(static):
        ahead = send(keys)

        def block(a: jax.Array, b: jax.Array, joined: Any, keys: Any = keys) -> Any:
            o_BTNH, lse_BNT = joined
            q = [_block(static, x, a) for x in queries]
            k, v, ids = (_block(static, x, b) for x in keys)
            found = _attend_block(static, q, k, v, ids, dtype)
            old = _block(static, o_BTNH, a), _block(static, lse_BNT, a, axis=2)
            o, lse = _join(*old, *found)
            return _put(static, o_BTNH, o, a), _put(static, lse_BNT, lse, a, axis=2)

        joined = _pairs(static, hop, block, joined)
        keys = ahead
    # Named, so that a remat policy that saves "attention" need not go round again.
    o_BTNH = checkpoint_name(joined[0].astype(q_BTNH.dtype), "attention")
    lse_BNT = checkpoint_name(joined[1], "attention")
    return o_BTNH, (q_BTNH, k_BTKH, v_BTKH, tokens, sinks_N, o_BTNH, lse_BNT)


def _backward(static: _Static, saved: tuple[Any, ...], do_BTNH: jax.Array) -> tuple[Any, ...]:
    q_BTNH, k_BTKH, v_BTKH, tokens, sinks_N, o_BTNH, lse_BNT = saved
    positions_q, positions_k, segments_q, segments_k = tokens
    dtype = sinks_N.dtype
    # Else XLA keeps what a forward pass done again received, all of the row, for this one; its CPU
    # compiler drops barriers and does so all the same.
    (k_BTKH, v_BTKH), do_BTNH = jax.lax.optimization_barrier(((k_BTKH, v_BTKH), do_BTNH))
    delta_BTN = jnp.sum(do_BTNH.astype(dtype) * o_BTNH.astype(dtype), axis=-1)
    queries = (q_BTNH, positions_q, segments_q, o_BTNH, do_BTNH, delta_BTN)
    keys = (k_BTKH, v_BTKH, jnp.stack([positions_k, segments_k], axis=-1))
    dq_BTNH = jnp.zeros(q_BTNH.shape, dtype)
    travelling: tuple[jax.Array, ...] = ()
    for hop, send in _way(static):
        ahead = send(keys)

        def block(a: jax.Array, b: jax.Array, sums: Any, keys: Any = keys) -> Any:
            q = [_block(static, x, a) for x in queries]
            lse = _block(static, lse_BNT, a, axis=2)
            k, v, ids = (_block(static, x, b) for x in keys)
            found = _pull_block(static, q, lse, k, v, ids)
            return tuple(
                _put(static, total, _block(static, total, at) + dx.astype(dtype), at)
                for total, dx, at in zip(sums, found, (a, b, b), strict=True)
            )

        start = (dq_BTNH, jnp.zeros(k_BTKH.shape, dtype), jnp.zeros(v_BTKH.shape, dtype))
        dq_BTNH, *added = _pairs(static, hop, block, start)
        # What came with the keys is added last, so that it may arrive while this device computes.
        travelling = tuple(map(jnp.add, travelling, added)) if travelling else tuple(added)
        travelling = send(travelling, home=True)
        keys = ahead
    dk_BTKH, dv_BTKH = travelling
    dsinks_N = jnp.zeros_like(sinks_N)
    if sinks_N.size:
        share_BNT = jnp.exp(sinks_N[:, None] - lse_BNT)
        dsinks_N = -jnp.einsum("BTN,BNT->N", delta_BTN, share_BNT)
    return (
        dq_BTNH.astype(q_BTNH.dtype),
        dk_BTKH.astype(k_BTKH.dtype),
        dv_BTKH.astype(v_BTKH.dtype),
        (None,) * len(tokens),
        dsinks_N,
    )


_attend.defvjp(_forward, _backward)


def _way(static: _Static) -> Iterator[tuple[Hop, Callable[..., Any]]]:
    """Each hop, and a function that sends arrays on to the next; after the last one only those that
    go `home` are sent."""
    hops, n = static.ring.hops, static.ring.devices
    for index, hop in enumerate(hops):
        last = index + 1 == len(hops)
        steps = (-hop.shift if last else hops[index + 1].shift - hop.shift) % n

        def send(arrays: Any, home: bool = False, last: bool = last, steps: int = steps) -> Any:
            if steps == 0 or (last and not home):
                return arrays
            to = [(device, (device + steps) % n) for device in range(n)]
            return jax.tree.map(lambda x: jax.lax.ppermute(x, static.axes, to), arrays)

        yield hop, send


def _pairs(
    static: _Static,
    hop: Hop,
    block: Callable[[jax.Array, jax.Array, Any], Any],
    carry: Any,
) -> Any:
    """Fold `block` over a device's pairs of blocks."""
    pairs_P3 = jnp.asarray(hop.pairs)[jax.lax.axis_index(static.axes)]
    everywhere = bool(hop.pairs[:, :, 2].all())

    def step(index: jax.Array, carry: Any) -> Any:
        a, b, there = pairs_P3[index]
        if everywhere:
            return block(a, b, carry)
        return jax.lax.cond(there == 1, lambda: block(a, b, carry), lambda: carry)

    return jax.lax.fori_loop(0, hop.pairs.shape[1], step, carry)


def _block(static: _Static, x: jax.Array, number: jax.Array, axis: int = 1) -> jax.Array:
    size = static.ring.size
    return jax.lax.dynamic_slice_in_dim(x, number * size, size, axis)


def _put(
    static: _Static, x: jax.Array, block: jax.Array, number: jax.Array, axis: int = 1
) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, block, number * static.ring.size, axis)


def _join(
    o_BCNH: jax.Array, lse_BNC: jax.Array, new_BCNH: jax.Array, new_lse_BNC: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention to two sets of keys from that to each (Dao 2023, section 3.1)."""
    whole_BNC = jnp.logaddexp(lse_BNC, new_lse_BNC)

    def share(part_BNC: jax.Array) -> jax.Array:
        return jnp.swapaxes(jnp.exp(part_BNC - whole_BNC), 1, 2)[..., None]

    return o_BCNH * share(lse_BNC) + new_BCNH * share(new_lse_BNC), whole_BNC


def _attend_block(
    static: _Static,
    queries: list[jax.Array],
    k_BCKH: jax.Array,
    v_BCKH: jax.Array,
    ids_BC2: jax.Array,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attention of a block of queries to one of keys: o [B, C, N, H] and lse [B, N, C]."""
    q_BCNH, positions_q, segments_q = queries
    tokens = (positions_q, ids_BC2[..., 0], segments_q, ids_BC2[..., 1])
    B, C, N, _ = q_BCNH.shape
    K = k_BCKH.shape[2]
    if static.ring.native:
        # With a sink that weighs nothing the log-sum-exp of a query without keys is its logit.
        sinks_N = jnp.full((N,), _LOWEST, jnp.float32)
        o_BCNH, lse_BNC = attend_native(static.options, q_BCNH, k_BCKH, v_BCKH, tokens, sinks_N)
        return o_BCNH.astype(dtype), lse_BNC
    sinks_KG = jnp.full((K, N // K), -jnp.inf, dtype)
    q_BCKGH = q_BCNH.reshape(B, C, K, N // K, -1)
    o_BCKGH, lse_BKGC = blockwise.attend_blocks(
        static.options, q_BCKGH, k_BCKH, v_BCKH, tokens, sinks_KG
    )
    return o_BCKGH.reshape(B, C, N, -1), lse_BKGC.reshape(B, N, C)


def _pull_block(
    static: _Static,
    queries: list[jax.Array],
    lse_BNC: jax.Array,
    k_BCKH: jax.Array,
    v_BCKH: jax.Array,
    ids_BC2: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients dq, dk and dv of a block of queries and one of keys."""
    q_BCNH, positions_q, segments_q, o_BCNH, do_BCNH, delta_BCN = queries
    tokens = (positions_q, ids_BC2[..., 0], segments_q, ids_BC2[..., 1])
    B, C, N, _ = q_BCNH.shape
    K = k_BCKH.shape[2]
    if static.ring.native:
        arrays = (q_BCNH, k_BCKH, v_BCKH)
        return pull_native(static.options, *arrays, tokens, lse_BNC, o_BCNH, do_BCNH)
    dq_BCKGH, dk_BCKH, dv_BCKH = blockwise.pull_blocks(
        static.options,
        q_BCNH.reshape(B, C, K, N // K, -1),
        k_BCKH,
        v_BCKH,
        tokens,
        lse_BNC.reshape(B, K, N // K, C),
        jnp.swapaxes(delta_BCN, 1, 2).reshape(B, K, N // K, C),
        do_BCNH.reshape(B, C, K, N // K, -1),
    )
    return dq_BCKGH.reshape(q_BCNH.shape), dk_BCKH, dv_BCKH
