"""Random documents of any number, the same for the same seed: what a preflight reads."""

import numpy as np

__all__ = ["Documents"]

_COUNT = 1 << 14


class Documents:
    """Documents of an eighth to a half of a row, so that several share one; no two are equal."""

    def __init__(self, seed: int, vocab: int, seq_len: int):
        """Remember how to draw.

        Args:
          seed: of everything.
          vocab: token ids are drawn from 1 to `vocab` - 1.
          seq_len: tokens of a row.
        """
        self._seed, self._vocab, self._seq_len = seed, vocab, seq_len

    def __len__(self) -> int:
        return _COUNT

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([self._seed, index])
        length = int(rng.integers(max(2, self._seq_len // 8), max(3, self._seq_len // 2)))
        return {"tokens": rng.integers(1, self._vocab, length, dtype=np.uint32)}
