"""Top tokens of a teacher on disk: written once by a pass over the examples, read in any order.

A folder holds `ids.npy` int32 [M, K], `logprobs.npy` float32 [M, K], `offsets.npy` int64 [N + 1]
and `manifest.json`, which is written last and says of which teacher and examples they are.

Legend: N examples, M trained positions of all examples, T tokens of a row, K tokens kept.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np

from fornax.config.errors import ConfigError, DataError
from fornax.mesh import hosts
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

    All processes call it, each with its own rows; process 0 writes everybody's, and none returns
    before the folder is whole.

    Args:
      path: the folder; made here.
      key: written into the manifest.
      teacher: whom to ask.
      batches: rows, each example once: tokens, positions, segment_ids, loss_weights [B, T] and
        example int32 [B], -1 for a row that only fills.
      positions: trained positions of each example.

    Raises:
      DataError: when `batches` leave an example out.
    """
    offsets = np.concatenate([[0], np.cumsum(positions, dtype=np.int64)])
    writer = _Writer(path, key, offsets) if jax.process_index() == 0 else None
    for rows in batches:
        found = teacher.top(rows, key.k, temperature=key.temperature, words=key.vocabulary)
        if writer is not None:
            writer.add(found)
    hosts.decide(lambda: writer and writer.finish())


class _Writer:
    """The files of a store in the making."""

    def __init__(self, path: Path, key: TopKey, offsets: np.ndarray) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / _MANIFEST).unlink(missing_ok=True)
        self._path, self._key, self._offsets = path, key, offsets
        self._missing = set(range(len(offsets) - 1))
        shape = (int(offsets[-1]), key.k)
        self._files = {
            name: np.lib.format.open_memmap(
                path / f"{name}.npy", mode="w+", dtype=dtype, shape=shape
            )
            for name, dtype in (("ids", np.int32), ("logprobs", np.float32))
        }

    def add(self, found: Mapping[str, np.ndarray]) -> None:
        """Write the examples of a batch: what `Teacher.top` returns."""
        for row, example in enumerate(found["example"].tolist()):
            if example < 0:
                continue
            trained = found["loss_weights"][row] > 0
            span = slice(self._offsets[example], self._offsets[example + 1])
            for name, file in self._files.items():
                file[span] = found[name][row][trained]
            self._missing.discard(example)

    def finish(self) -> None:
        """Write the manifest, which says that all the rest is there."""
        if self._missing:
            raise DataError(
                f"{len(self._missing)} of {len(self._offsets) - 1} examples were in no batch that "
                "the teacher was asked about, so their logits cannot be stored"
            )
        for file in self._files.values():
            file.flush()
        np.save(self._path / "offsets.npy", self._offsets)
        text = json.dumps({"version": 1, **asdict(self._key)}, indent=1)
        temporary = self._path / (_MANIFEST + ".new")
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(self._path / _MANIFEST)


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
                "and they are written there. Processes on several hosts need a folder that all of "
                "them see"
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
