"""Numbers to the blocks of codes and scales that `blocks` reads.

Q8_0 and Q4_0 are llama.cpp's reference, bit for bit. Q4_K and Q6_K take, as llama.cpp does, the
best of some scales by weighted squares: each is refined by least squares for the codes it gives,
and scales of groups are then rounded to 6 or 8 bits of the block's. R: rows, N: blocks, G: groups.
"""

from collections.abc import Callable, Mapping

import numpy as np

from fornax.gguf.blocks import BlockType

__all__ = ["ROUNDED", "quantize"]

_FLOAT = np.float32


def quantize(rows: np.ndarray, kind: BlockType) -> np.ndarray:
    """The stored bytes of rows.

    Args:
      rows: [R, numbers of a row], which blocks divide; floats.
      kind: F32, F16, BF16 or one of `ROUNDED`.

    Returns:
      uint8 [R, bytes of a row].

    Raises:
      ValueError: numbers that are infinite or none, or too large for the type.
    """
    if not np.isfinite(rows.astype(_FLOAT)).all():
        raise ValueError("numbers that are not finite")
    with np.errstate(over="ignore"):  # found below
        if kind.values is None:
            blocks = np.ascontiguousarray(rows.astype(kind.layout))
            held = [blocks]
        else:
            wide = np.ascontiguousarray(rows, _FLOAT).reshape(-1, kind.size)
            blocks = ROUNDED[kind.name](wide, kind.layout)
            held = [blocks[scale] for scale in {"d", "m"} & set(kind.layout.names)]
    if not all(np.isfinite(each).all() for each in held):
        raise ValueError(f"numbers that are too large for {kind.name}")
    return blocks.view(np.uint8).reshape(len(rows), -1)


def _inverse(x: np.ndarray) -> np.ndarray:
    """1 / x, and 0 for 0."""
    return np.divide(1, x, out=np.zeros_like(x), where=x != 0)


def _largest(x: np.ndarray) -> np.ndarray:
    """The number of the greatest magnitude along the last axis, with its sign, [.., 1]."""
    return np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)


def _q8_0(x: np.ndarray, layout: np.dtype) -> np.ndarray:
    d = np.abs(x).max(-1, keepdims=True) / 127
    scaled = x * _inverse(d)
    whole = np.trunc(scaled)
    whole += np.copysign(np.abs(scaled - whole) >= 0.5, scaled)  # halves away from zero
    blocks = np.empty(len(x), layout)
    blocks["d"], blocks["codes"] = d[:, 0], whole
    return blocks


def _q4_0(x: np.ndarray, layout: np.dtype) -> np.ndarray:
    d = _largest(x) / -8
    codes = np.minimum(np.trunc(x * _inverse(d) + _FLOAT(8.5)), 15).astype(np.uint8)
    blocks = np.empty(len(x), layout)
    blocks["d"], blocks["codes"] = d[:, 0], codes[:, :16] | codes[:, 16:] << 4
    return blocks


def _q6_k(x: np.ndarray, layout: np.dtype) -> np.ndarray:
    x = x.reshape(-1, 16, 16)
    scales = _symmetric_scales(x, 32)
    inverse = -128 * _inverse(_largest(scales))
    blocks = np.empty(len(x), layout)
    blocks["d"] = _inverse(inverse)[:, 0]
    blocks["scales"] = np.clip(np.rint(inverse * scales), -128, 127)
    steps = blocks["d"].astype(_FLOAT)[:, None] * blocks["scales"].astype(_FLOAT)
    codes = np.clip(np.rint(x * _inverse(steps)[..., None]), -32, 31) + 32
    codes = codes.astype(np.uint8).reshape(len(x), -1)
    low = (codes & 15).reshape(len(x), 2, 2, 64)
    high = (codes >> 4).reshape(len(x), 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    blocks["codes"] = (low[:, :, 0] | low[:, :, 1] << 4).reshape(len(x), -1)
    blocks["high"] = np.bitwise_or.reduce(high, axis=2).reshape(len(x), -1)
    return blocks


def _symmetric_scales(x: np.ndarray, levels: int) -> np.ndarray:
    """Scales [N, G] of groups [N, G, n] with codes from -levels to levels - 1, by squares weighted
    with the numbers' own."""
    largest = _largest(x)
    weights = x * x
    best = np.zeros(x.shape[:2], _FLOAT)
    scales = np.zeros_like(best)
    for step in range(-9, 10):
        inverse = -(levels + _FLOAT(0.1) * step) * _inverse(largest)
        codes = np.clip(np.rint(inverse * x), -levels, levels - 1)
        of_x = (weights * x * codes).sum(-1)
        squares = (weights * codes * codes).sum(-1)
        gain = (
            of_x * of_x * _inverse(squares)
        )  # what of the weighted squares is left is their sum - this
        better = gain > best
        best = np.where(better, gain, best)
        scales = np.where(better, of_x * _inverse(squares), scales)
    return scales


def _q4_k(x: np.ndarray, layout: np.dtype) -> np.ndarray:
    x = x.reshape(-1, 8, 32)
    scales, offsets = _affine_scales(x, 15)
    blocks = np.empty(len(x), layout)
    whole = []
    for name, given in (("d", scales), ("m", offsets)):
        largest = given.max(-1, keepdims=True)
        blocks[name] = largest[:, 0] / 63
        whole.append(np.minimum(np.rint(given * 63 * _inverse(largest)), 63).astype(np.uint8))
    steps, starts = (
        (blocks[name].astype(_FLOAT)[:, None] * each.astype(_FLOAT))[..., None]
        for name, each in zip("dm", whole, strict=True)
    )
    codes = np.clip(np.rint((x + starts) * _inverse(steps)), 0, 15).astype(np.uint8)
    pairs = codes.reshape(len(x), 4, 2, 32)
    blocks["codes"] = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(x), -1)
    blocks["scales"] = _six_bits(*whole)
    return blocks


def _six_bits(scales: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """12 bytes of eight scales and eight offsets of 6 bits; see `blocks`."""
    first = [each[:, :4] | each[:, 4:] >> 4 << 6 for each in (scales, offsets)]
    return np.concatenate([*first, scales[:, 4:] & 15 | offsets[:, 4:] << 4], axis=-1)


def _affine_scales(x: np.ndarray, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets [N, G], neither negative, of groups [N, G, n] that are codes from 0 to
    `last` times the scale, less the offset. Numbers weigh by their magnitude and the group's."""
    weights = np.sqrt((x * x).mean(-1, keepdims=True)) + np.abs(x)
    low, high = np.minimum(x.min(-1, keepdims=True), 0), x.max(-1, keepdims=True)
    total, of_x = weights.sum(-1), (weights * x).sum(-1)
    spread = _inverse(high - low)
    best = np.full(x.shape[:2], np.inf, _FLOAT)
    scales, offsets = np.zeros_like(best), -low[..., 0]
    for step in range(22):
        slack = _FLOAT(0.1) * (step - 11) if step else _FLOAT(0)
        codes = np.clip(np.rint((last + slack) * spread * (x - low)), 0, last)
        weighted = weights * codes
        of_codes, squares = weighted.sum(-1), (weighted * codes).sum(-1)
        both = (weighted * x).sum(-1)
        inverse = _inverse(total * squares - of_codes * of_codes)
        scale = (total * both - of_x * of_codes) * inverse
        start = (squares * of_x - of_codes * both) * inverse
        above = start > 0  # offsets only take away
        scale = np.where(above, both * _inverse(squares), scale)
        start = np.where(above, 0, start)
        missed = scale[..., None] * codes + start[..., None] - x
        error = (weights * missed * missed).sum(-1)
        better = (error < best) & (scale >= 0)
        best = np.where(better, error, best)
        scales, offsets = np.where(better, scale, scales), np.where(better, -start, offsets)
    return scales, offsets


ROUNDED: Mapping[str, Callable[[np.ndarray, np.dtype], np.ndarray]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
"""Types of blocks that are written, and how: from float32 [blocks, numbers] to blocks."""
