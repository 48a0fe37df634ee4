"""Top tokens of a teacher on disk: written once by a pass over the examples, read in any order.

A folder holds `ids.npy` int32 [M, K], `logprobs.npy` float32 [M, K], `offsets.npy` int64 [N + 1]
and `manifest.json`, which is written last and says of which teacher and examples they are.

Legend: N examples, M trained positions of all examples, T tokens of a row, K tokens kept.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fornax.config.errors import ConfigError, DataError
from fornax.tune.teacher import Teacher

__all__ = ["TopKey", "TopStore", "write_top"]

_MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class TopKey:
    """What stored tokens are of."""

    data: str
    """`data_fingerprint` of the examples."""
    vocabulary: int
    """Tokens of the tokenizer: what the probabilities are shared between."""
    k: int
    temperature: float
    teacher: str | None = None
    """`weights_fingerprint`; None where the teacher is not there to be compared."""


def write_top(
    path: Path,
    key: TopKey,
    teacher: Teacher,
    batches: Iterator[Mapping[str, np.ndarray]],
    positions: Sequence[int],
) -> None:
    """Ask the teacher about every example, once.

    Args:
      path: the folder; made here.
      key: written into the manifest.
      teacher: whom to ask.
      batches: rows, each example once: tokens, positions, segment_ids, loss_weights [B, T] and
        example int32 [B], -1 for a row that only fills.
      positions: trained positions of each example.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / _MANIFEST).unlink(missing_ok=True)
    offsets = np.concatenate([[0], np.cumsum(positions, dtype=np.int64)])
    shape = (int(offsets[-1]), key.k)

    def new(name: str, dtype: Any) -> Any:
        return np.lib.format.open_memmap(path / name, mode="w+", dtype=dtype, shape=shape)

    ids, logprobs = new("ids.npy", np.int32), new("logprobs.npy", np.float32)
    for rows in batches:
        ids_BTK, logps_BTK = teacher.top(
            rows, key.k, temperature=key.temperature, words=key.vocabulary
        )
        for row, example in enumerate(rows["example"]):
            if example < 0:
                continue
            trained = rows["loss_weights"][row] > 0
            span = slice(offsets[example], offsets[example + 1])
            ids[span], logprobs[span] = ids_BTK[row][trained], logps_BTK[row][trained]
    for array in (ids, logprobs):
        array.flush()
    np.save(path / "offsets.npy", offsets)
    text = json.dumps({"version": 1, **asdict(key)}, indent=1)
    temporary = path / (_MANIFEST + ".new")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path / _MANIFEST)


class TopStore:
    """Stored top tokens, read by example."""

    def __init__(self, path: Path, key: TopKey):
        """Open the folder.

        Raises:
          DataError: when it is not whole.
          ConfigError: when it is of another teacher, other examples or other settings.
        """
        if not self.exists(path):
            raise DataError(
                f"{path} holds no stored logits (no {_MANIFEST}); name the teacher with --teacher, "
                "and they are written there"
            )
        saved = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        for name, asked in asdict(key).items():
            if asked is not None and saved.get(name) != asked:
                raise ConfigError(
                    f"{path} was written for {name}={saved.get(name)}, and this run has "
                    f"{name}={asked}; {_FIXES[name]}, or use another logits.path"
                )
        self.k = key.k
        self._offsets = np.load(path / "offsets.npy")
        self._ids = np.load(path / "ids.npy", mmap_mode="r")
        self._logprobs = np.load(path / "logprobs.npy", mmap_mode="r")

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether a whole store is there."""
        return (path / _MANIFEST).is_file()

    def columns(self, rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What rows need of it.

        Args:
          rows: loss_weights float32 [B, T]; example int32 [B].

        Returns:
          teacher_ids int32, teacher_logprobs float32 [B, T, K]; 0 where nothing is trained.
        """
        shape = (*rows["loss_weights"].shape, self.k)
        ids, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for row, example in enumerate(rows["example"]):
            if example < 0:
                continue
            trained = rows["loss_weights"][row] > 0
            span = slice(self._offsets[example], self._offsets[example + 1])
            ids[row][trained] = self._ids[span]
            logprobs[row][trained] = self._logprobs[span]
        return {"teacher_ids": ids, "teacher_logprobs": logprobs}


_FIXES = {
    "data": "give it the same data, tokenizer, template and max_length",
    "vocabulary": "give the student the tokenizer it was written with",
    "k": "set logits.k to it",
    "temperature": "set temperature to it",
    "teacher": "name the teacher that wrote it",
}
