"""Block sizes of the TPU flash kernel, and the work that its masks leave over.

Legend: T query tokens, S key tokens, H head width of queries and keys, V width of values.
"""

from dataclasses import dataclass

__all__ = ["Band", "Blocks", "choose_blocks", "product_flops"]

LANES = 128
"""Every block is a multiple of it: the width of a TPU's vector registers."""
_QUERIES = 1024
_KEYS = 1024
_KEYS_BACKWARD = 2048
_COMPUTE = 512
_MOST_PARTS = 4
"""The fused backward pass writes the queries' gradient once for each block of keys."""


@dataclass(frozen=True)
class Band:
    """Which distances q - k between the indexes of a query and a key may be seen."""

    least: int | None
    """0 for causal attention; None for no limit."""
    most: int | None
    """`window` - 1; None for no limit."""

    def covers(self, least: int, most: int) -> bool:
        """Whether all distances from `least` to `most` may be seen."""
        above = self.least is None or least >= self.least
        return above and (self.most is None or most <= self.most)

    def meets(self, least: int, most: int) -> bool:
        """Whether some may."""
        above = self.least is None or most >= self.least
        return above and (self.most is None or least <= self.most)

    def visited(self, shape: tuple[int, int], blocks: tuple[int, int], first: int = 0) -> int:
        """Return how many blocks of a score matrix hold a score that counts.

        Args:
            shape: queries and keys, whole blocks of both.
            blocks: queries and keys of a block.
            first: index of the first query.
        """
        count = 0
        for start in range(first, first + shape[0], blocks[0]):
            last = start + blocks[0] - 1
            stop = shape[1] if self.least is None else min(shape[1], last - self.least + 1)
            begin = 0 if self.most is None else max(0, start - self.most)
            if stop > begin:
                count += (stop - 1) // blocks[1] - begin // blocks[1] + 1
        return count


@dataclass(frozen=True)
class Blocks:
    """Tokens of a block in each of the kernels."""

    queries: int
    keys: int
    keys_compute: int
    queries_backward: int
    keys_backward: int
    keys_backward_compute: int
    keys_dq: int
    """Of the second backward kernel, where there are two."""
    fused: bool
    """Whether one backward kernel makes all three gradients, or a second one the queries'."""


def choose_blocks(T: int, S: int, H: int, itemsize: int, window: int | None) -> Blocks:
    """Choose blocks that divide T and S and fit a TPU core's default share of fast memory.

    Large blocks read keys less often. Blocks beyond the window would only hold masked scores, and
    those beyond a quarter of the length leave a causal mask little to skip.

    Args:
        T: queries of one device, a multiple of 128.
        S: keys, a multiple of 128.
        H: the wider of the heads' widths.
        itemsize: bytes of a number.
        window: keys that a query sees, or None.
    """
    # Twice the bytes of a row, half the rows: 128 numbers of bfloat16 are the measure.
    heavy = max(1, (-(-H // LANES) * LANES * itemsize) // (2 * LANES))
    reach = max(_COMPUTE, min(S // 4, S if window is None else -(-window // LANES) * LANES))
    keys = _divisor(S, min(_KEYS // heavy, reach))
    keys_backward = _divisor(S, min(_KEYS_BACKWARD // heavy, reach))
    return Blocks(
        queries=_divisor(T, min(_QUERIES // heavy, reach)),
        keys=keys,
        keys_compute=_divisor(keys, _COMPUTE),
        queries_backward=_divisor(T, min(_QUERIES // heavy, reach)),
        keys_backward=keys_backward,
        keys_backward_compute=_divisor(keys_backward, _COMPUTE),
        keys_dq=_divisor(S, _COMPUTE),
        fused=S // keys_backward <= _MOST_PARTS,
    )


def _divisor(size: int, most: int) -> int:
    """Return the largest multiple of 128 up to `most` that divides `size`."""
    return max(n for n in range(LANES, max(most, LANES) + 1, LANES) if size % n == 0)


def product_flops(
    band: Band, blocks: Blocks, T: int, S: int, H: int, V: int, first: int = 0
) -> dict[str, int]:
    """Return the operations of each kernel's matrix products for one head of one row.

    Args:
        band: the mask by index.
        blocks: the kernels' blocks.
        T: queries of one device.
        S: keys.
        H: width of queries and keys.
        V: width of values.
        first: index of the first query.

    Returns:
        `fwd` (q k, p v), `dkv` (q k, do v, dk, dv; fused: dq) and `dq` (q k, do v, dq; fused: 0).
    """

    def scores(queries: int, keys: int) -> int:
        """Return the operations of one product per visited score, for heads of width 1."""
        return 2 * band.visited((T, S), (queries, keys), first) * queries * keys

    forward = scores(blocks.queries, blocks.keys)
    backward = scores(blocks.queries_backward, blocks.keys_backward)
    second = scores(blocks.queries_backward, blocks.keys_dq)
    return {
        "fwd": forward * (H + V),
        "dkv": backward * ((3 if blocks.fused else 2) * H + 2 * V),
        "dq": 0 if blocks.fused else second * (2 * H + V),
    }
