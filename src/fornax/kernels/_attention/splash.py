"""Attention on TPU: JAX's splash attention kernel (flash attention that skips masked blocks).

The kernel masks by index, so it takes calls whose positions differ as indexes do. Its cost is not
known to the compiler: the scope around it says how many operations its products take on a device.

Legend: B batch, T query tokens, S key tokens, N query heads, K key/value heads, H head width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fornax.kernels._attention.blocks import LANES, Band, Blocks, choose_blocks, product_flops
from fornax.kernels._attention.call import AttentionCall, AttentionInputs
from fornax.kernels._attention.sharded import divide
from fornax.kernels.registry import interpreting
from fornax.mesh import axes_in_use, balanced_order, gather_balanced, mesh_in_use, shards

__all__ = ["band_mask", "declines", "splash"]

_MOST_FILLED = 64
"""One token in this many may be filled in for larger blocks."""

_INTERPRET = False
"""Whether Pallas interprets the kernel instead of compiling it: for tests on CPU."""


def declines(call: AttentionCall) -> str | None:
    """Say why the TPU kernel cannot run `call`."""
    if call.dtype not in ("float32", "bfloat16"):
        return f"it takes float32 and bfloat16, not {call.dtype}"
    if 0 in (call.batch, call.queries, call.heads, call.head_dim, call.value_dim):
        return "an array is empty"
    if not call.causal and call.window is None:  # every block counts, and can be filled up
        rest = call.queries % call.length_shards or call.keys % call.length_shards
        return f"{call.length_shards} devices do not divide the tokens" if rest else None
    if call.queries != call.keys:
        return f"it needs as many queries as keys, not {call.queries} and {call.keys}"
    if not call.consecutive and (call.causal or call.window is not None):
        return "it masks by index, and the call does not say that positions are consecutive"
    length, rest = divmod(call.queries, call.length_shards)
    if rest or length == 0 or length % LANES:
        return f"it needs a multiple of {LANES} tokens per device, not {call.queries}" + (
            f" over {call.length_shards}" if call.length_shards > 1 else ""
        )
    return None


def splash(inputs: AttentionInputs) -> jax.Array:
    """Compute attention, on each device for its own rows, heads and queries.

    Where the mesh divides the length each device gathers the keys and values of all. Where every
    query sees every key, queries and keys are filled up to whole vectors on each device.
    """
    # Imported here: it pulls in Mosaic, which nobody else needs.
    from jax.experimental.pallas.ops.tpu import splash_attention as upstream

    mesh, length = mesh_in_use(), axes_in_use("length")
    rows, heads = divide(inputs.q_BTNH, inputs.k_BSKH)
    blocks = _blocks(inputs, shards(length))
    order = balanced_order(shards(length)) if inputs.balanced else None
    fills = not inputs.causal and inputs.window is None
    shape = inputs.q_BTNH.shape[1], inputs.k_BSKH.shape[1]
    if fills:
        shape = _whole(shape[0] // shards(length)), _whole(shape[1])
    mask = band_mask(upstream, shape, _band(inputs), order)
    local_heads = inputs.q_BTNH.shape[2] // shards(heads)
    kernel = upstream.make_splash_mha(
        upstream.MultiHeadMask([mask] * local_heads),
        block_sizes=upstream.BlockSizes(
            block_q=blocks.queries,
            block_kv=blocks.keys,
            block_kv_compute=blocks.keys_compute,
            block_q_dkv=blocks.queries_backward,
            block_kv_dkv=blocks.keys_backward,
            block_kv_dkv_compute=blocks.keys_backward_compute,
            block_q_dq=None if blocks.fused else blocks.queries_backward,
            block_kv_dq=None if blocks.fused else blocks.keys_dq,
            use_fused_bwd_kernel=blocks.fused,
        ),
        head_shards=1,
        q_seq_shards=1 if fills else shards(length),
        attn_logits_soft_cap=inputs.softcap,
        # Named, so that a remat policy that saves "attention" need not run the kernel again.
        residual_checkpoint_name="attention",
        interpret=_INTERPRET or interpreting(),
    )
    ids = ()
    if inputs.segment_ids_q_BT is not None and inputs.segment_ids_k_BS is not None:
        keys = inputs.segment_ids_k_BS
        if order is not None:  # the keys are gathered in order
            parts = keys.reshape(len(keys), len(order), -1)
            keys = parts[:, np.argsort(order)].reshape(keys.shape)
        ids = (inputs.segment_ids_q_BT, keys)
    sinks = () if inputs.sinks_N is None else (inputs.sinks_N,)
    scope = _scope(inputs, blocks)
    attend = functools.partial(_attend, upstream, inputs.scale, scope, fills)
    arrays = (inputs.q_BTNH, inputs.k_BSKH, inputs.v_BSKH)
    if mesh is None:
        return attend((), kernel, arrays, ids, sinks)
    # What is filled up is the same on each device.
    where = NamedSharding(mesh, PartitionSpec(None, None if fills else length or None))
    by_head = PartitionSpec(rows, length or None, heads, None)
    by_row = PartitionSpec(rows, length or None), PartitionSpec(rows, None)
    return jax.shard_map(
        functools.partial(attend, length, balanced=inputs.balanced),
        mesh=mesh,
        in_specs=(
            kernel.manual_sharding_spec(where),
            (by_head,) * 3,
            by_row[: len(ids)],
            (PartitionSpec(heads),) * len(sinks),
        ),
        out_specs=by_head,
        check_vma=False,
    )(kernel, arrays, ids, sinks)


def _attend(
    upstream: Any,
    scale: float,
    scope: str,
    fills: bool,
    length: tuple[str, ...],
    kernel: Any,
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    ids: tuple[jax.Array, ...],
    sinks: tuple[jax.Array, ...],
    *,
    balanced: bool = False,
) -> jax.Array:
    """Run the kernel on one device's part; `length` are the mesh axes to gather keys over, and
    `fills` says that tokens are filled up to what the kernel takes."""
    q_BTNH, k_BSKH, v_BSKH = arrays
    if balanced:
        k_BSKH, v_BSKH = (gather_balanced(x, length) for x in (k_BSKH, v_BSKH))
    elif length:
        k_BSKH = jax.lax.all_gather(k_BSKH, length, axis=1, tiled=True)
        v_BSKH = jax.lax.all_gather(v_BSKH, length, axis=1, tiled=True)
    q_BNTH, k_BKSH, v_BKSH = (jnp.swapaxes(x, 1, 2) for x in (q_BTNH * scale, k_BSKH, v_BSKH))
    seen = ids
    if fills:
        B, T, S = q_BTNH.shape[0], q_BTNH.shape[1], k_BSKH.shape[1]
        if _whole(S) != S and not seen:  # what fills up keys is a document that nobody sees
            seen = (jnp.ones((B, T), jnp.int32), jnp.ones((B, S), jnp.int32))
        q_BNTH = _fill(q_BNTH, 2)
        k_BKSH, v_BKSH = _fill(k_BKSH, 2), _fill(v_BKSH, 2)
        seen = tuple(_fill(one, 1) for one in seen)
    segments = upstream.SegmentIds(*seen) if seen else None
    with jax.named_scope(scope):
        o_BNTH = jax.vmap(
            lambda q, k, v, segments: kernel(q, k, v, segments, *sinks),
            in_axes=(0, 0, 0, None if segments is None else 0),
        )(q_BNTH, k_BKSH, v_BKSH, segments)
    o_BTNH = jnp.swapaxes(o_BNTH, 1, 2)[:, : q_BTNH.shape[1]]
    # The kernel lets padding see padding.
    return jnp.where(ids[0][:, :, None, None] == 0, 0, o_BTNH) if ids else o_BTNH


def _whole(tokens: int) -> int:
    """Tokens, filled up to whole vectors, or blocks where that is little: a length that blocks do
    not divide leaves small ones only."""
    for block in (2048, 1024, 512, 256):
        if -tokens % block * _MOST_FILLED <= tokens:
            return tokens + -tokens % block
    return tokens + -tokens % LANES


def _fill(x: jax.Array, axis: int) -> jax.Array:
    """Zeros behind the tokens of an axis up to whole vectors."""
    more = _whole(x.shape[axis]) - x.shape[axis]
    widths = [(0, more if dim == axis else 0) for dim in range(x.ndim)]
    return jnp.pad(x, widths) if more else x


def _band(inputs: AttentionInputs) -> Band:
    most = None if inputs.window is None else inputs.window - 1
    if inputs.causal:
        return Band(least=0, most=most)
    return Band(least=None if most is None else -most, most=most)


def band_mask(
    upstream: Any, shape: tuple[int, int], band: Band, order: np.ndarray | None = None
) -> Any:
    """The kernel's mask by index for one head.

    Args:
        upstream: the package of the kernel.
        shape: queries and keys.
        band: distances that are visible.
        order: that of the queries' parts; None: as they come.
    """
    if band.most is not None and band.least is not None:
        mask = _by_blocks(upstream.LocalMask)(shape, (band.most, -band.least), offset=0)
    elif band.least is None:
        return upstream.FullMask(shape)
    else:
        mask = _by_blocks(upstream.CausalMask)(shape)
    mask.band = band
    if order is not None:
        parts = np.arange(shape[0], dtype=np.int32).reshape(len(order), -1)
        mask.q_sequence = parts[order].reshape(-1)
    return mask


class _Uniform(np.ndarray):
    """An array of one value, which is asked for in no time."""

    def any(self, *args: Any, **kwargs: Any) -> Any:
        """Whether the value is true."""
        return self[:1, :1].view(np.ndarray).any(*args, **kwargs)

    def all(self, *args: Any, **kwargs: Any) -> Any:
        """Whether the value is true."""
        return self.any(*args, **kwargs)


@functools.cache
def _by_blocks(base: Any) -> Any:
    """A mask that does not look at each element of a block that is wholly visible or hidden.

    The kernel's maker asks for every block: the mask of a million tokens has 10^12 elements.
    """

    class ByBlocks(base):
        band: Band

        def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
            queries, keys = self.q_sequence[index[0]], range(self.shape[1])[index[1]]
            distances = int(queries.min()) - keys[-1], int(queries.max()) - keys[0]
            whole, some = self.band.covers(*distances), self.band.meets(*distances)
            if whole == some:
                shape = len(queries), len(keys)
                return np.broadcast_to(np.bool_(whole), shape).view(_Uniform)
            return super().__getitem__(index)

    return ByBlocks


def _blocks(inputs: AttentionInputs, parts: int) -> Blocks:
    _, T, _, H = inputs.q_BTNH.shape
    V = inputs.v_BSKH.shape[3]
    itemsize = inputs.q_BTNH.dtype.itemsize
    if not inputs.causal and inputs.window is None:
        keys = _whole(inputs.k_BSKH.shape[1])
        return choose_blocks(_whole(T // parts), keys, max(H, V), itemsize, None)
    own = T // parts // (2 if inputs.balanced else 1)
    return choose_blocks(own, T, max(H, V), itemsize, inputs.window)


def _scope(inputs: AttentionInputs, blocks: Blocks) -> str:
    """Return a name that tells a reader of the compiled program what the kernels cost a device.

    Where the length is divided it is the cost of the device with the last queries, the highest; in
    balanced order all have that of the middle ones.
    """
    B, T, N, H = inputs.q_BTNH.shape
    rows, heads = divide(inputs.q_BTNH, inputs.k_BSKH)
    own = T // shards(axes_in_use("length"))
    V = inputs.v_BSKH.shape[3]
    keys, first = T, (T - own) // 2 if inputs.balanced else T - own
    if not inputs.causal and inputs.window is None:
        own, keys, first = _whole(own), _whole(inputs.k_BSKH.shape[1]), 0
    flops = product_flops(_band(inputs), blocks, own, keys, H, V, first)
    calls = B // shards(rows) * (N // shards(heads))
    return "splash:" + ",".join(f"{name}={calls * count}" for name, count in flops.items())
