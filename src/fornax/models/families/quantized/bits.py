"""Numbers of few bits: codes packed in words, and the values of four-bit floating-point numbers."""

import numpy as np

__all__ = ["E2M1", "half_bytes", "nibbles", "unpack", "unpack_columns"]

E2M1 = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32
)
"""Values of the codes of FP4: a sign, two bits of exponent, one of mantissa (OCP Microscaling
Formats 1.0, 5.3.3)."""
_PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], axis=1)
"""The two values of each byte, the low bits' first."""


def nibbles(packed: np.ndarray) -> np.ndarray:
    """FP4 values of bytes of two codes, low bits first: uint8 [..., n] to float32 [..., 2 n]."""
    return _PAIRS[packed].reshape(*packed.shape[:-1], -1)


def half_bytes(packed: np.ndarray) -> np.ndarray:
    """Codes of bytes of two, low bits first: uint8 [..., n] to uint8 [..., 2 n] from 0 to 15."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def unpack(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Codes of a dense stream of bits along each row.

    Code i begins at bit `i * bits`, counted from the lowest bit of the first word; it may go over
    the end of its word.

    Args:
      words: int32 [R, W]; `W * 32` bits hold `count` codes.
      bits: of a code, 1 to 8.
      count: how many codes of a row to take.

    Returns:
      uint8 [R, count].
    """
    runs = -(-count // 32)  # of 32 codes in `bits` words
    stream = np.pad(words.view(np.uint32), [(0, 0), (0, runs * bits - words.shape[1])])
    codes = np.empty((len(words), runs, 32), np.uint8)
    _unpack(stream.reshape(len(words), runs, bits), codes)
    return codes.reshape(len(words), -1)[:, :count]


def unpack_columns(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Codes of a dense stream of bits down each column: int32 [W, C] to uint8 [count, C]."""
    runs, columns = -(-count // 32), words.shape[1]
    stream = np.pad(words.view(np.uint32), [(0, runs * bits - len(words)), (0, 0)])
    codes = np.empty((runs, 32, columns), np.uint8)
    _unpack(stream.reshape(runs, bits, columns).swapaxes(1, 2), codes.swapaxes(1, 2))
    return codes.reshape(-1, columns)[:count]


def _unpack(stream: np.ndarray, codes: np.ndarray) -> None:
    """Runs of 32 codes, uint8 [..., 32] written in place, from their words, uint32 [..., bits]."""
    bits = stream.shape[-1]
    for index in range(32):
        word, shift = divmod(index * bits, 32)
        code = stream[..., word] >> np.uint32(shift)
        if shift + bits > 32:
            code = code | stream[..., word + 1] << np.uint32(32 - shift)
        codes[..., index] = code & np.uint32(2**bits - 1)
