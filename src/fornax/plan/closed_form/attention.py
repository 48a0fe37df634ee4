"""What attention costs one device: products as its kernel executes them, and its memory traffic.

Which kernel runs is what `fornax.kernels` would choose for the call.

Legend: T queries of a device, S keys, N query heads, H head width, V width of values.
"""

import functools
from dataclasses import dataclass

from fornax import kernels
from fornax.kernels._attention.blocks import Band, choose_blocks, product_flops
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
        value_dim=model.value_width,
        dtype=local.config.dtypes.compute_dtype.name,
        causal=True,
        window=window,
        softcap=model.attention_logit_softcap,
        sinks=model.attention_sinks,
        positions=True,
        consecutive=True,
        balanced=local.balanced,
        segments=True,
        length_shards=local.context,
    )
    return _choice(call)


def exchanges_heads(kernel: str, local: LocalStep) -> bool:
    """Whether devices that share a row's length exchange it for heads, and gather nothing."""
    return local.context > 1 and kernel in ("native", "cudnn")


@functools.cache
def _choice(call: kernels.AttentionCall) -> kernels.Choice:
    return kernels.attention_operation.choice(call)


def _splash(local: LocalStep, window: int | None) -> AttentionWork:
    T, S, H, V = _sizes(local)
    item = local.compute_bytes
    band = Band(least=0, most=None if window is None else window - 1)
    blocks = choose_blocks(T // 2 if local.balanced else T, S, max(H, V), item, window)
    calls = local.rows * local.shares.attention_heads
    # Devices that share a row's length wait for the one with the last queries, unless balanced.
    first = (S - T) // 2 if local.balanced else S - T
    flops = product_flops(band, blocks, T, S, H, V, first)
    forward = band.visited((T, S), (blocks.queries, blocks.keys), first)
    backward = band.visited((T, S), (blocks.queries_backward, blocks.keys_backward), first)
    parts = S // blocks.keys_backward if blocks.fused else 1
    # Of queries and outputs, or keys and values: a row of both widths.
    forward_rows = T + forward * blocks.keys
    backward_rows = backward * blocks.queries_backward + 2 * S
    if not blocks.fused:
        again = band.visited((T, S), (blocks.queries_backward, blocks.keys_dq), first)
        backward_rows += again * blocks.keys_dq + T
    return AttentionWork(
        forward_flops=calls * flops["fwd"],
        backward_flops=calls * (flops["dkv"] + flops["dq"]),
        forward_bytes=calls * forward_rows * (H + V) * item,
        backward_bytes=calls * (backward_rows * (H + V) + parts * T * H) * item,
        # What the backward kernel writes: dq by parts, dk and dv by head.
        scratch_bytes=calls * (parts * T * H + S * (H + V)) * item,
    )


def _sizes(local: LocalStep) -> tuple[int, int, int, int]:
    """T, S, H and V."""
    model = local.model
    return local.length, local.config.seq_len, model.head_width, model.value_width


def _plain(local: LocalStep, window: int | None, kernel: str) -> AttentionWork:
    T, S, H, V = _sizes(local)
    calls = local.rows * local.shares.attention_heads
    if exchanges_heads(kernel, local):
        T, calls = S, calls // local.context
    item = local.compute_bytes
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
    again = 0 if kernel == "xla" else H  # the others compute scores again
    rows = calls * (T + S) * (H + V) * item
    return AttentionWork(
        forward_flops=2 * (H + V) * scores,
        backward_flops=2 * (again + 2 * H + 2 * V) * scores,
        forward_bytes=moved[0] + rows,
        backward_bytes=moved[1] + 2 * rows,
        scratch_bytes=scratch,
    )
