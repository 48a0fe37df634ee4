"""What attention costs one device: products as its kernel executes them, and its memory traffic.

Which kernel runs is what `fornax.kernels` would choose for the call.

Legend: T queries of a device, S keys, N query heads, H head width.
"""

import functools
from dataclasses import dataclass

from fornax import kernels
from fornax.kernels._attention.blocks import Band, Blocks, choose_blocks, product_flops
from fornax.kernels._attention.cudnn import MOST_MASK_BYTES
from fornax.plan.closed_form.shards import LocalStep

_XLA_BLOCK = 256
_NATIVE_BLOCK = 64
_CUDNN_CHUNK = 1024
_FORWARD_SCORE_BYTES = 20
"""Bytes moved a score by the kernel in plain XLA: float32 scores written and read twice, weights
written and read, the running output once for each block."""
_BACKWARD_SCORE_BYTES = 30
"""The same backward: scores and slopes in float32, both in the compute dtype, read by products."""


@dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """Attention of one layer over a micro-batch, on one device."""

    forward_flops: float
    backward_flops: float
    forward_bytes: float
    backward_bytes: float
    scratch_bytes: float
    """The largest temporary of the backward pass."""


def attention_work(local: LocalStep, window: int | None) -> AttentionWork:
    """The work of a layer whose queries see `window` keys (None: all before them)."""
    kernel = attention_choice(local, window).implementation
    if kernel == "splash":
        return _splash(local, window)
    return _plain(local, window, kernel)


def attention_choice(local: LocalStep, window: int | None) -> kernels.Choice:
    """Which implementation a layer gets whose queries see `window` keys, and why no faster one.

    Raises:
      KernelError: when none can run the call.
    """
    model, length = local.model, local.config.seq_len
    call = kernels.AttentionCall(
        platform=local.topology.chip.platform,
        batch=local.rows,
        queries=length,
        keys=length,
        heads=local.shares.attention_heads,
        kv_heads=local.shares.attention_kv_heads,
        head_dim=model.head_width,
        value_dim=model.head_width,
        dtype=local.config.dtypes.compute_dtype.name,
        causal=True,
        window=window,
        softcap=model.attention_logit_softcap,
        sinks=model.attention_sinks,
        positions=True,
        consecutive=True,
        segments=True,
        length_shards=local.context,
    )
    return _choice(call)


@functools.cache
def _choice(call: kernels.AttentionCall) -> kernels.Choice:
    return kernels.attention_operation.choice(call)


def _splash(local: LocalStep, window: int | None) -> AttentionWork:
    T, S, H = local.length, local.config.seq_len, local.model.head_width
    item = local.compute_bytes
    band = Band(least=0, most=None if window is None else window - 1)
    blocks = choose_blocks(T, S, H, item, window)
    calls = local.rows * local.shares.attention_heads
    # Devices that share a row's length wait for the one with the last queries.
    flops = product_flops(band, blocks, T, S, H, H, S - T)
    forward = band.visited((T, S), (blocks.queries, blocks.keys), S - T)
    backward = band.visited((T, S), (blocks.queries_backward, blocks.keys_backward), S - T)
    parts = S // blocks.keys_backward if blocks.fused else 1
    forward_rows = 2 * T + 2 * forward * blocks.keys
    backward_rows = 2 * backward * blocks.queries_backward + 4 * S + parts * T
    if not blocks.fused:
        again = band.visited((T, S), (blocks.queries_backward, blocks.keys_dq), S - T)
        backward_rows += 2 * again * blocks.keys_dq + 2 * T
    return AttentionWork(
        forward_flops=calls * flops["fwd"],
        backward_flops=calls * (flops["dkv"] + flops["dq"]),
        forward_bytes=calls * forward_rows * H * item,
        backward_bytes=calls * backward_rows * H * item,
        scratch_bytes=calls * _scratch_rows(blocks, T, S) * H * item,
    )


def _scratch_rows(blocks: Blocks, T: int, S: int) -> int:
    """Rows of a head's width that the backward kernel writes: dq by parts, dk and dv by head."""
    return (S // blocks.keys_backward if blocks.fused else 1) * T + 2 * S


def _plain(local: LocalStep, window: int | None, kernel: str) -> AttentionWork:
    T, S, H = local.length, local.config.seq_len, local.model.head_width
    calls = local.rows * local.shares.attention_heads
    item = local.compute_bytes
    rows = 2 * T + 2 * S
    band = Band(least=0, most=None if window is None else window - 1)
    if kernel == "native":
        block = min(_NATIVE_BLOCK, S)
        scores = calls * band.visited((T, S), (block, block)) * block * block
        moved = (0.0, 0.0)  # a block's scores stay in the core's cache
        scratch = 0.0
    elif kernel == "cudnn":
        block = min(_CUDNN_CHUNK, S)
        scores = calls * band.visited((T, S), (block, block)) * block * block
        moved = (2.0 * scores, 4.0 * scores)  # the mask, read, and its gradient, written
        scratch = 2.0 * min(MOST_MASK_BYTES, 2 * local.rows * T * S)
    else:
        padded = -(-S // _XLA_BLOCK) * _XLA_BLOCK if kernel == "blockwise" else S
        scores = calls * T * padded
        moved = (scores * _FORWARD_SCORE_BYTES, scores * _BACKWARD_SCORE_BYTES)
        scratch = 2 * 4 * calls * T * (_XLA_BLOCK if kernel == "blockwise" else S)
    products = 4 if kernel == "xla" else 5  # the others compute scores again
    return AttentionWork(
        forward_flops=2 * 2 * H * scores,
        backward_flops=2 * products * H * scores,
        forward_bytes=moved[0] + calls * rows * H * item,
        backward_bytes=moved[1] + 2 * calls * rows * H * item,
        scratch_bytes=scratch,
    )
