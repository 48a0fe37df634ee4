"""The shapes that steps are compiled for."""

from itertools import count

__all__ = ["bucket_for", "buckets", "fours", "powers"]


def buckets(limit: int) -> tuple[int, ...]:
    """Sizes up to `limit`: 1, 2, 4, 8, 12, 16, 24, 32, 48, … and `limit` itself.

    From 8 on at most a third of a bucket is padding.
    """
    sizes = [1, 2, 4]
    for power in count(3):
        if 1 << power > limit:
            break
        sizes += [1 << power, 3 << (power - 1)]
    return tuple(sorted({size for size in sizes if size < limit} | {limit}))


def fours(limit: int) -> tuple[int, ...]:
    """Powers of four below `limit` from 4 on, and `limit` itself."""
    return (*(1 << power for power in range(2, limit.bit_length(), 2) if 1 << power < limit), limit)


def powers(limit: int) -> tuple[int, ...]:
    """Powers of two below `limit`, and `limit` itself."""
    return (*(1 << power for power in range(limit.bit_length()) if 1 << power < limit), limit)


def bucket_for(size: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes` that holds `size`."""
    return next(bucket for bucket in sizes if bucket >= size)
