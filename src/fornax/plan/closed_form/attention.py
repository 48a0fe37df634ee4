"""What attention costs one device: products as its kernel executes them, and its memory traffic.

Which kernel runs is what `fornax.kernels` would choose for the call.

Legend: T queries of a device, S keys, N query heads, H head width, V width of values.
"""

import functools
from dataclasses import dataclass

from fornax import kernels
from fornax.kernels._attention.blocks import Band, choose_blocks, product_flops
from fornax.kernels._attention.cudnn import MOST_MASK_BYTES
from fornax.kernels._attention.operation import EXCHANGES
from fornax.kernels._attention.ring import Ring, band_of, runs_native
from fornax.models import DecoderConfig
from fornax.models.config import LayerKind
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


def attention_work(local: LocalStep, kind: LayerKind) -> AttentionWork:
    """The work of a layer that has keys and values."""
    kernel = attention_choice(local, kind).implementation
    if kernel == "splash":
        return _splash(local, kind)
    if kernel == "ring":
        return _ring(local, kind)
    return _plain(local, kind, kernel)


def attention_choice(local: LocalStep, kind: LayerKind) -> kernels.Choice:
    """Which implementation such a layer gets, and why no faster one.

    Raises:
      KernelError: when none can run the call.
    """
    model, length = local.model, local.config.seq_len
    heads, kv_heads = local.shares.attended(kind)
    width, value_width = head_widths(model, kind)
    call = kernels.AttentionCall(
        platform=local.topology.chip.platform,
        batch=local.rows,
        queries=length,
        keys=length,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=width,
        value_dim=value_width,
        dtype=local.config.dtypes.compute_dtype.name,
        causal=True,
        window=kind.window,
        softcap=model.attention_logit_softcap,
        sinks=model.attention_sinks,
        positions=True,
        consecutive=True,
        balanced=local.balanced,
        segments=True,
        length_shards=local.context,
        exchange=model.context_exchange if local.context > 1 else "auto",
    )
    return _choice(call)


def head_widths(model: DecoderConfig, kind: LayerKind) -> tuple[int, int]:
    """Widths of a head's query and of its value in a layer that has keys and values."""
    if model.latent is not None:
        return model.head_width, model.value_width
    width = model.kv_shape(kind)[1]
    return width, width


def exchanges_heads(kernel: str, local: LocalStep) -> bool:
    """Whether devices that share a row's length exchange it for heads, and gather nothing."""
    return local.context > 1 and EXCHANGES[kernel] == "heads"


@functools.cache
def _made(devices: int, balanced: bool, window: int | None, tokens: int, native: bool) -> Ring:
    band = band_of(causal=True, window=window, consecutive=True)
    return Ring(devices=devices, balanced=balanced, band=band, tokens=tokens, native=native)


def ring_of(local: LocalStep, window: int | None) -> Ring:
    """How keys and values are passed round, where a ring is what a layer gets."""
    native = runs_native(local.topology.chip.platform, local.config.dtypes.compute_dtype.name)
    return _made(local.context, local.balanced, window, local.length, native)


@functools.cache
def _choice(call: kernels.AttentionCall) -> kernels.Choice:
    return kernels.attention_operation.choice(call)


def _splash(local: LocalStep, kind: LayerKind) -> AttentionWork:
    T, S, H, V = _sizes(local, kind)
    item, window = local.compute_bytes, kind.window
    band = Band(least=0, most=None if window is None else window - 1)
    blocks = choose_blocks(T // 2 if local.balanced else T, S, max(H, V), item, window)
    calls = local.rows * local.shares.attended(kind)[0]
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


def _ring(local: LocalStep, kind: LayerKind) -> AttentionWork:
    """Blocks of a device as the ring visits them; each hop takes as long as its busiest device."""
    T, S, H, V = _sizes(local, kind)
    made, item = ring_of(local, kind.window), local.compute_bytes
    pairs = sum(hop.pairs.shape[1] for hop in made.hops)
    heads, kv_heads = local.shares.attended(kind)
    calls = local.rows * heads
    if made.native:  # which leaves out smaller blocks, of the device with the last queries too
        block, first = min(_NATIVE_BLOCK, T), (S - T) // (2 if local.balanced else 1)
        scores = calls * made.band.visited((T, S), (block, block), first) * block**2
        moved, scratch = (0.0, 0.0), 0
    else:
        scores = calls * pairs * made.size**2
        moved = (scores * _FORWARD_SCORE_BYTES, scores * _BACKWARD_SCORE_BYTES)
        scratch = 2 * 4 * calls * made.size * _XLA_BLOCK
    # A pair reads a block of queries and of keys, and adds to sums in float32.
    rows = calls * pairs * made.size * (H + V)
    # Keys and values here and on their way; their gradients so too, and what is added to them.
    passed = local.rows * kv_heads * T * (H + V) * (2 * item + 3 * 4)
    return AttentionWork(
        forward_flops=2 * (H + V) * scores,
        backward_flops=2 * (3 * H + 2 * V) * scores,
        forward_bytes=moved[0] + rows * (2 * item + 4),
        backward_bytes=moved[1] + rows * (2 * item + 2 * 4),
        scratch_bytes=scratch + 4 * calls * T * H + passed,
    )


def _sizes(local: LocalStep, kind: LayerKind) -> tuple[int, int, int, int]:
    """T, S, H and V."""
    return local.length, local.config.seq_len, *head_widths(local.model, kind)


def _plain(local: LocalStep, kind: LayerKind, kernel: str) -> AttentionWork:
    T, S, H, V = _sizes(local, kind)
    calls, window = local.rows * local.shares.attended(kind)[0], kind.window
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
