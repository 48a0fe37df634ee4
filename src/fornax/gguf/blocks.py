"""The types of GGUF's tensors, and their numbers made from blocks of codes and scales.

A block is as it lies in the file, described by a structured dtype; the blocks of a row lie one
behind the other. The layouts are those of ggml (ggml-common.h); the products are rounded as its
reference implementation rounds them, in float32. R: rows, K: blocks of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

__all__ = ["OTHER_TYPES", "TYPES", "BlockIntegers", "BlockType", "dequantize", "integers"]

_FLOAT = np.float32
_TWO_BITS = np.array([0, 2, 4, 6], np.uint8)[:, None]
_LEVELS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
"""What the 16 codes of IQ4_NL and IQ4_XS stand for."""
_EIGHT_BITS = np.arange(8, dtype=np.uint8)[:, None]


class BlockIntegers(NamedTuple):
    """What blocks hold, as integers and the float16 numbers that multiply them."""

    codes: np.ndarray
    """[R, K, numbers of a block] uint8, or Q8_0's int8."""
    scales: np.ndarray | None
    """[R, K, groups] uint8, or Q6_K's int8; None where `d` is the only scale."""
    offsets: np.ndarray | None
    """[R, K, groups] uint8: what is taken away, times `m`."""
    d: np.ndarray
    """[R, K] float16."""
    m: np.ndarray | None
    """[R, K] float16, where there are offsets."""


@dataclass(frozen=True)
class BlockType:
    """A type of tensors."""

    name: str
    size: int
    """Numbers of a block."""
    bytes: int
    """Of a block."""
    layout: Any = None
    """The dtype of a block."""
    values: Callable[[np.ndarray], np.ndarray] | None = None
    """From blocks [R, K] to float32 [R, K, ..], a block's numbers in order; None for floats."""
    codes: Callable[[np.ndarray], np.ndarray] | None = None
    """From blocks to the integers [R, K, ..] that scales multiply, of types that `integers` takes
    apart."""


def dequantize(raw: np.ndarray, kind: BlockType) -> np.ndarray:
    """The numbers of rows.

    Args:
      raw: uint8 [R, bytes of a row], each row contiguous.
      kind: the type.

    Returns:
      [R, numbers of a row]: float32, or the type's own dtype where it is float16 or bfloat16.

    Raises:
      ValueError: a scale that is infinite or no number.
    """
    blocks = np.ascontiguousarray(raw).view(kind.layout)
    if kind.values is None:
        return blocks
    _check_scales(blocks)
    return kind.values(blocks).reshape(len(raw), -1)


def integers(raw: np.ndarray, kind: BlockType) -> BlockIntegers:
    """What rows hold, taken apart and not multiplied.

    Args:
      raw: uint8 [R, bytes of a row], each row contiguous.
      kind: a type with `codes`.

    Raises:
      ValueError: a scale that is infinite or no number.
    """
    blocks = np.ascontiguousarray(raw).view(kind.layout)
    _check_scales(blocks)
    assert kind.codes is not None, f"{kind.name} is not taken apart"
    codes = kind.codes(blocks).reshape(*blocks.shape, kind.size)
    names = kind.layout.names
    scales = offsets = None
    if "m" in names:
        scales, offsets = _six_bits(blocks["scales"])
    elif "scales" in names:
        scales = blocks["scales"]
    return BlockIntegers(codes, scales, offsets, blocks["d"], blocks["m"] if "m" in names else None)


def _check_scales(blocks: np.ndarray) -> None:
    for scale in {"d", "m"} & set(blocks.dtype.names or ()):
        if not np.isfinite(blocks[scale]).all():
            raise ValueError("scales that are infinite or no numbers")


def _scale(blocks: np.ndarray, name: str = "d") -> np.ndarray:
    """A field of 16-bit scales, float32 [R, K, 1]."""
    return blocks[name].astype(_FLOAT)[..., None]


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """The low halves of bytes [.., n], then the high ones, [.., 2 n]."""
    return np.concatenate([codes & 15, codes >> 4], axis=-1)


def _split(codes: np.ndarray, groups: int, shifts: np.ndarray, mask: int) -> np.ndarray:
    """Codes that lie side by side in bytes: [R, K, groups, shifts, bytes of a group]."""
    rows, blocks, _ = codes.shape
    return (codes.reshape(rows, blocks, groups, 1, -1) >> shifts) & np.uint8(mask)


def _fifth_bits(blocks: np.ndarray) -> np.ndarray:
    return (
        _nibbles(blocks["codes"]) | np.unpackbits(blocks["high"], axis=-1, bitorder="little") << 4
    )


def _four_bits(blocks: np.ndarray) -> np.ndarray:
    return _nibbles(blocks["codes"])


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _scale(blocks) * (_four_bits(blocks).astype(_FLOAT) - 8)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _scale(blocks) * _nibbles(blocks["codes"]).astype(_FLOAT) + _scale(blocks, "m")


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    return _scale(blocks) * (_fifth_bits(blocks).astype(_FLOAT) - 16)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    return _scale(blocks) * _fifth_bits(blocks).astype(_FLOAT) + _scale(blocks, "m")


def _eight_bits(blocks: np.ndarray) -> np.ndarray:
    return blocks["codes"]


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _scale(blocks) * _eight_bits(blocks).astype(_FLOAT)


def _grouped(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes in the groups that share a scale, float32 [R, K, groups, numbers of a group]."""
    return codes.astype(_FLOAT).reshape(*scales.shape, -1)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    scales = _scale(blocks) * (blocks["scales"] & 15).astype(_FLOAT)
    offsets = _scale(blocks, "m") * (blocks["scales"] >> 4).astype(_FLOAT)
    codes = _grouped(_split(blocks["codes"], 2, _TWO_BITS, 3), scales)
    return scales[..., None] * codes - offsets[..., None]


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    low = _nibbles(blocks["scales"][..., :8])
    high = _split(blocks["scales"][..., 8:], 1, _TWO_BITS, 3).reshape(low.shape)
    scales = _scale(blocks) * ((low | high << 4).astype(_FLOAT) - 32)
    low = _grouped(_split(blocks["codes"], 2, _TWO_BITS, 3), scales)
    # A bit that is not set takes four away.
    high = _grouped(_split(blocks["high"], 1, _EIGHT_BITS, 1), scales)
    return scales[..., None] * (low + 4 * high - 4)


def _six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight offsets of 6 bits each from 12 bytes, uint8 [R, K, 8]: of the first
    four the bytes 0 to 3 and 4 to 7 have all six, whose upper two bits belong to the last four."""
    first, second, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([first & 63, rest & 15 | (first >> 6) << 4], axis=-1)
    offsets = np.concatenate([second & 63, rest >> 4 | (second >> 6) << 4], axis=-1)
    return scales, offsets


def _k_scaled(blocks: np.ndarray, codes: np.ndarray) -> np.ndarray:
    six_scales, six_offsets = _six_bits(blocks["scales"])
    scales = _scale(blocks) * six_scales.astype(_FLOAT)
    offsets = _scale(blocks, "m") * six_offsets.astype(_FLOAT)
    return scales[..., None] * _grouped(codes, scales) - offsets[..., None]


def _q4_k_codes(blocks: np.ndarray) -> np.ndarray:
    return _split(blocks["codes"], 4, _TWO_BITS[::2], 15)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    return _k_scaled(blocks, _q4_k_codes(blocks))


def _q5_k_codes(blocks: np.ndarray) -> np.ndarray:
    low = _split(blocks["codes"], 4, _TWO_BITS[::2], 15)
    high = _split(blocks["high"], 1, _EIGHT_BITS, 1).reshape(low.shape)
    return low | high << 4


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    return _k_scaled(blocks, _q5_k_codes(blocks))


def _q6_k_codes(blocks: np.ndarray) -> np.ndarray:
    low = _split(blocks["codes"], 2, _TWO_BITS[::2], 15)
    high = _split(blocks["high"], 2, _TWO_BITS, 3).reshape(low.shape)
    return low | high << 4


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    scales = _scale(blocks) * blocks["scales"].astype(_FLOAT)
    return scales[..., None] * (_grouped(_q6_k_codes(blocks), scales) - 32)


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    return _scale(blocks) * _LEVELS[_nibbles(blocks["codes"])]


def _iq4_xs(blocks: np.ndarray) -> np.ndarray:
    rows, count = blocks.shape
    low = _split(blocks["scales"], 4, _TWO_BITS[::2], 15).reshape(rows, count, 8)
    high = _split(blocks["high"], 2, _TWO_BITS, 3).reshape(rows, count, 8)
    scales = _scale(blocks) * ((low | high << 4).astype(_FLOAT) - 32)
    codes = _split(blocks["codes"], 8, _TWO_BITS[::2], 15).reshape(rows, count, 8, 32)
    return scales[..., None] * _LEVELS[codes]


_D, _M = ("d", "<f2"), ("m", "<f2")


def _floats(name: str, dtype: Any) -> BlockType:
    dtype = np.dtype(dtype)
    return BlockType(name, 1, dtype.itemsize, dtype)


def _blocks(
    name: str,
    size: int,
    values: Callable[[np.ndarray], np.ndarray],
    *fields: Any,
    codes: Callable[[np.ndarray], np.ndarray] | None = None,
) -> BlockType:
    layout = np.dtype([*fields])
    return BlockType(name, size, layout.itemsize, layout, values, codes)


TYPES = {
    0: _floats("F32", "<f4"),
    1: _floats("F16", "<f2"),
    30: _floats("BF16", ml_dtypes.bfloat16),
    2: _blocks("Q4_0", 32, _q4_0, _D, ("codes", "u1", 16), codes=_four_bits),
    3: _blocks("Q4_1", 32, _q4_1, _D, _M, ("codes", "u1", 16)),
    6: _blocks("Q5_0", 32, _q5_0, _D, ("high", "u1", 4), ("codes", "u1", 16), codes=_fifth_bits),
    7: _blocks("Q5_1", 32, _q5_1, _D, _M, ("high", "u1", 4), ("codes", "u1", 16)),
    8: _blocks("Q8_0", 32, _q8_0, _D, ("codes", "i1", 32), codes=_eight_bits),
    10: _blocks("Q2_K", 256, _q2_k, ("scales", "u1", 16), ("codes", "u1", 64), _D, _M),
    11: _blocks(
        "Q3_K", 256, _q3_k, ("high", "u1", 32), ("codes", "u1", 64), ("scales", "u1", 12), _D
    ),
    12: _blocks(
        "Q4_K", 256, _q4_k, _D, _M, ("scales", "u1", 12), ("codes", "u1", 128), codes=_q4_k_codes
    ),
    13: _blocks(
        "Q5_K",
        256,
        _q5_k,
        *(_D, _M, ("scales", "u1", 12), ("high", "u1", 32), ("codes", "u1", 128)),
        codes=_q5_k_codes,
    ),
    14: _blocks(
        "Q6_K",
        256,
        _q6_k,
        *(("codes", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), _D),
        codes=_q6_k_codes,
    ),
    20: _blocks("IQ4_NL", 32, _iq4_nl, _D, ("codes", "u1", 16)),
    23: _blocks(
        "IQ4_XS", 256, _iq4_xs, _D, ("high", "u1", 2), ("scales", "u1", 4), ("codes", "u1", 128)
    ),
}
"""What is read, by the numbers of the format."""

OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""Names of those that are not."""
