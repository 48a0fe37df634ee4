"""How well directories of one model predict the same held-out text, beside the float one.

Legend: N rows, T tokens of a row, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fornax.config.errors import ConfigError, EngineError
from fornax.data import load_tokenizer
from fornax.models import open_pretrained
from fornax.quant.run import open_source
from fornax.quant.verify import HeldOut, Run, compare, compare_logits, run_rows

__all__ = ["HeldOutText", "Quality"]


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Of one directory."""

    held_out: HeldOut
    bytes: int
    """Of the text of the predicted tokens, in UTF-8."""

    @property
    def bits_per_byte(self) -> float:
        """Of the text."""
        return self.held_out.loss * self.held_out.tokens / math.log(2) / self.bytes


class HeldOutText:
    """Rows that `quantize` holds out, and what the float model predicts for them."""

    rows_NT: np.ndarray
    """int32."""

    def __init__(
        self, source: Path, *, data: str, samples: int = 128, length: int = 512, seed: int = 0
    ) -> None:
        """Run the float model, a layer at a time.

        Args:
          source: its directory.
          data: see `quantize`, as are the others: with equal ones the rows are those that it holds
            out.

        Raises:
          ConfigError, CheckpointError, DataError: see `quantize`.
        """
        opened = open_source(source, data, samples=samples, length=length, seed=seed)
        assert opened.rows is not None
        self.rows_NT = opened.rows.held_out_NT
        tokenizer = load_tokenizer(opened.folder)
        self._bytes = sum(len(tokenizer.decode(x[1:].tolist()).encode()) for x in self.rows_NT)
        self._source = source
        self._vocabulary = opened.stored.model.config.vocab_size
        self._reference = run_rows(opened.stored, self.rows_NT)

    def measure(self, folder: Path | None = None) -> Quality:
        """How well a directory of the same model predicts the rows; None: the float model's own.

        Raises:
          ConfigError: another vocabulary.
          CheckpointError: see `quantize`.
        """
        run = self._reference if folder is None else self._run(folder)
        return self._quality(compare(self._reference, run))

    def measure_logits(self, score: Callable[[np.ndarray], np.ndarray]) -> Quality:
        """How well something else predicts the rows.

        Args:
          score: int32 tokens [T] -> logits [T, V].

        Raises:
          EngineError: logits of another shape.
        """

        def rows() -> Iterator[np.ndarray]:
            for row_T in self.rows_NT:
                logits_TV = score(row_T[:-1])
                if logits_TV.shape != (wanted := (len(row_T) - 1, self._vocabulary)):
                    raise EngineError(f"logits {logits_TV.shape} came where {wanted} were asked")
                yield logits_TV

        return self._quality(compare_logits(self._reference, rows()))

    def _quality(self, held_out: HeldOut) -> Quality:
        return Quality(held_out=held_out, bytes=self._bytes)

    def _run(self, folder: Path) -> Run:
        stored = open_pretrained(folder, dtype=np.dtype(np.float32))
        found = stored.model.config.vocab_size
        if found != self._vocabulary:
            raise ConfigError(
                f"{folder} has a vocabulary of {found} and {self._source} one of "
                f"{self._vocabulary}; compare directories of one model"
            )
        return run_rows(stored, self.rows_NT)
