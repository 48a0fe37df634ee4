"""Weights in the blocks of GGUF files, laid out for the native kernel (`_native/block_product.h`).

A record is one block of the file for each of a panel's 32 outputs: the words of its integers group
by group, then the scales of those groups, then the float16 that multiply them. Layers lie one
after another and may be of different types.

Legend: L layers, K inputs, N outputs, P panels of 32 outputs, R records of a panel, G groups of a
record, U units of 64 bytes.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fornax.config.errors import KernelError
from fornax.gguf import TYPES, BlockIntegers
from fornax.kernels import _native

__all__ = [
    "BLOCKS",
    "block_units",
    "blocks_table",
    "blocks_unavailable",
    "dequantize_blocks",
    "lay_out_blocks",
    "linears",
    "starts",
]

_PANEL = 32
_UNIT = 64


@dataclasses.dataclass(frozen=True)
class _Block:
    """How the kernel has a type of blocks."""

    number: int
    """Of the type, in GGUF files."""
    bits: int
    """Of a code."""
    group: int
    """Inputs that share a scale."""
    zero: int
    """The code of 0, where there are no offsets."""
    scale: np.dtype | None = None
    """Of a group's integer scale, where it has one."""
    offsets: bool = False
    """Whether a group has an offset too."""

    @property
    def inputs(self) -> int:
        """Of a block."""
        return TYPES[self.number].size

    @property
    def groups(self) -> int:
        return self.inputs // self.group

    @property
    def record(self) -> int:
        """Bytes of a record."""
        integers = 0 if self.scale is None else self.groups
        return _PANEL * (self.inputs * self.bits // 8 + (integers + 2) * (1 + self.offsets))

    @property
    def upper(self) -> int:
        """Bits of a code above its lower four, which lie in words of their own."""
        return self.bits - 4 if self.bits < 8 else 0


BLOCKS = {
    "Q4_0": _Block(2, 4, 32, 8),
    "Q5_0": _Block(6, 5, 32, 16),
    "Q8_0": _Block(8, 8, 32, 0),
    "Q4_K": _Block(12, 4, 32, 0, np.dtype(np.uint8), offsets=True),
    "Q5_K": _Block(13, 5, 32, 0, np.dtype(np.uint8), offsets=True),
    "Q6_K": _Block(14, 6, 16, 32, np.dtype(np.int8)),
}
"""Types of blocks that are multiplied as they are stored, by GGUF's name."""


def blocks_table() -> list[tuple[str, ...]]:
    """For each type of tensors of GGUF files: its name, bits of a code, inputs that share a scale,
    scales, and bits per weight in the file and as it is multiplied; those that are dequantized say
    so."""
    rows: list[tuple[str, ...]] = []
    for kind in TYPES.values():
        stored = f"{8 * kind.bytes / kind.size:g}"
        if kind.name not in BLOCKS:
            reason = "a float" if kind.values is None else "dequantized"
            rows.append((kind.name, "", "", "", stored, reason))
            continue
        block = BLOCKS[kind.name]
        scales = "float16"
        if block.scale is not None:
            scales = f"{'6' if block.offsets else '8'} bits, times a float16 for {block.inputs}"
        if block.offsets:
            scales += "; offsets likewise"
        served = 8 * block.record / (_PANEL * block.inputs)
        rows.append((kind.name, str(block.bits), str(block.group), scales, stored, f"{served:g}"))
    return rows


def blocks_unavailable() -> str | None:
    """Say why no weight in blocks can be multiplied."""
    return _native.unavailable("linear")


def block_units(kind: str, inputs: int, outputs: int) -> int:
    """Units of 64 bytes of one layer of a weight.

    Raises:
        KernelError: a type that is not multiplied, or inputs that are not a whole number of blocks.
    """
    if kind not in BLOCKS:
        raise KernelError(f"blocks of {kind} are not multiplied; use one of {', '.join(BLOCKS)}")
    block = BLOCKS[kind]
    if inputs % block.inputs:
        raise KernelError(
            f"{inputs} inputs are not a whole number of {kind}'s blocks of {block.inputs}; use "
            "another type"
        )
    return -(-outputs // _PANEL) * (inputs // block.inputs) * block.record // _UNIT


def lay_out_blocks(kind: str, given: BlockIntegers) -> np.ndarray:
    """Lay out one layer.

    Args:
        kind: one of `BLOCKS`.
        given: what the file's blocks hold, of N rows of K / (numbers of a block) blocks.

    Returns:
        uint8 [U, 64], see `block_units`. Outputs that fill up a panel have scales of 0.

    Raises:
        KernelError: see `block_units`.
    """
    block, (N, R, size) = BLOCKS[kind], given.codes.shape
    block_units(kind, R * size, N)
    codes = _panels(given.codes).reshape(-1, _PANEL, R, block.groups, block.group // 4, 4)
    if block.bits == 8:
        words = codes.view(np.uint8) ^ np.uint8(128)
    else:
        words = codes[..., ::2, :] & 15 | codes[..., 1::2, :] << 4
        if block.upper:
            parts = block.group // 4 * block.upper // 8
            assert parts == 1, "the upper bits of a group fill one word"
            shifts = np.arange(0, 8, block.upper, dtype=np.uint8)[:, None]
            upper = np.bitwise_or.reduce(codes >> 4 << shifts, axis=-2, keepdims=True)
            words = np.concatenate([words, upper], axis=-2)
    # [P, 32, R, words] to [P, R, words, 32], of 4 bytes each.
    wide = np.ascontiguousarray(words).view(np.uint32).reshape(*words.shape[:3], -1)
    found = [_bytes(wide.transpose(0, 2, 3, 1))]
    for each in (given.scales, given.offsets):
        if each is not None:
            found.append(_bytes(_panels(each).transpose(0, 2, 3, 1)))
    for each in (given.d, given.m):
        if each is not None:
            found.append(_bytes(_panels(each).transpose(0, 2, 1)))
    return np.concatenate(found, axis=-1).reshape(-1, _UNIT)


def dequantize_blocks(kind: str, units: jax.Array, inputs: int, outputs: int) -> jax.Array:
    """Undo `lay_out_blocks`: the float32 [K, N] that uint8 [U, 64] of one layer stands for."""
    block = BLOCKS[kind]
    records = units.reshape(-1, inputs // block.inputs, block.record)
    P, R, _ = records.shape
    at = block.inputs * block.bits // 8 * _PANEL
    words = records[..., :at].reshape(P, R, block.groups, -1, _PANEL, 4)
    codes = _codes(words, block)
    integers = 0 if block.scale is None else block.groups * _PANEL

    def taken(dtype: np.dtype, size: int) -> jax.Array:
        """The next `size` bytes of records as [P, R, groups, 1, 32, 1] in float32."""
        nonlocal at
        raw = records[..., at : at + size]
        at += size
        each = raw.reshape(P, R, -1, _PANEL, dtype.itemsize)
        each = lax.bitcast_convert_type(each if dtype.itemsize > 1 else each[..., 0], dtype)
        return each.astype(jnp.float32)[:, :, :, None, :, None]

    float16, kinds = np.dtype(np.float16), 1 + block.offsets
    whole = [
        jnp.float32(1) if block.scale is None else taken(block.scale, integers)
        for _ in range(kinds)
    ]
    scale, *offset = [taken(float16, 2 * _PANEL) * each for each in whole]
    values = scale * (codes.astype(jnp.float32) - block.zero)
    if offset:
        values = values - offset[0]
    # [P, R, groups, 4 inputs each, 32, 4] to [K, N]
    w_KN = values.transpose(1, 2, 3, 5, 0, 4).reshape(inputs, P * _PANEL)
    return w_KN[:, :outputs]


def _codes(words: jax.Array, block: _Block) -> jax.Array:
    """Integers [P, R, G, group / 4, 32, 4] of words [P, R, G, words of a group, 32, 4]."""
    if block.bits == 8:
        return lax.bitcast_convert_type(words ^ 128, jnp.int8)
    low = words[:, :, :, : block.group // 8]
    halves = jnp.stack([low & 15, low >> 4], axis=4)
    P, R, G, count = halves.shape[:4]
    codes = halves.reshape(P, R, G, 2 * count, _PANEL, 4)
    if not block.upper:
        return codes
    shifts = jnp.arange(0, 8, block.upper, dtype=jnp.uint8)[:, None, None]
    upper = words[:, :, :, block.group // 8 :] >> shifts & (2**block.upper - 1)
    return codes | upper << 4


def linears(
    x_MK: jax.Array, weights: Sequence[tuple[jax.Array, tuple[str, ...], jax.Array, int]]
) -> list[jax.Array]:
    """Return y [M, N] in the dtype of x for each of several weights, in one call.

    A weight is its units, the types of its layers, the layer of them, and its outputs.
    """
    shapes = [(x_MK.shape[0], outputs) for *_, outputs in weights]
    if 0 in x_MK.shape or any(0 in shape for shape in shapes):
        return [jnp.zeros(shape, x_MK.dtype) for shape in shapes]
    results = [jax.ShapeDtypeStruct(shape, x_MK.dtype) for shape in shapes]
    call = jax.ffi.ffi_call("fornax_linear_blocks", results, vmap_method="sequential")
    arguments = []
    for units, kinds, layer, _ in weights:
        numbers = np.array([BLOCKS[kind].number for kind in kinds], np.int32)
        arguments += [units, jnp.asarray(numbers), layer]
    return list(call(x_MK, *arguments))


def starts(kinds: Sequence[str], inputs: int, outputs: int) -> list[int]:
    """In which unit each layer begins, and where the last one ends."""
    sizes = [block_units(kind, inputs, outputs) for kind in kinds]
    return [sum(sizes[:count]) for count in range(len(sizes) + 1)]


def _panels(rows: np.ndarray) -> np.ndarray:
    """Return [P, 32, ...] of [N, ...], filled up with zeros."""
    missing = -len(rows) % _PANEL
    if missing:
        rows = np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])
    return rows.reshape(-1, _PANEL, *rows.shape[1:])


def _bytes(each: np.ndarray) -> np.ndarray:
    """Return uint8 [P, R, bytes] of [P, R, ...]."""
    count = math.prod(each.shape[2:])
    return np.ascontiguousarray(each).reshape(*each.shape[:2], count).view(np.uint8)
