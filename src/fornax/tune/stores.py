"""Numbers of a fixed model for every example, computed once and stored on disk.

The reference's log-probs and the teacher's top tokens never change while the policy trains, so one
pass before the first step replaces a forward pass in every step, and that model is not in memory
while training. What is stored says of which weights and which tokens it is; a resumed run checks
both.

Legend: N examples, M trained positions of all examples, P rows of a batch, T tokens of a row, K
tokens kept.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fornax.checkpoint import Checkpointer
from fornax.config.errors import CheckpointError, ConfigError, DataError
from fornax.config.files import replacing, write_whole
from fornax.mesh import Rules, hosts, use_mesh
from fornax.train.hosts import abstract_batch, to_global
from fornax.train.run_dir import RunDirectory
from fornax.train.task import Batch, Hosts, ModelT

__all__ = [
    "ReferenceKey",
    "TopKey",
    "TopStore",
    "data_fingerprint",
    "for_each_example",
    "stored",
    "weights_fingerprint",
    "write_top",
]


_BLOCK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class ReferenceKey:
    """What stored numbers were computed from."""

    weights: str
    """`weights_fingerprint` of the model."""
    data: str
    """`data_fingerprint` of the examples."""
    compute: str
    """How: dtypes and whatever else changes the numbers."""


def weights_fingerprint(path: str | Path) -> str:
    """SHA-256 over the files of a Hugging Face directory's model, or of a run's last checkpoint.

    It reads every byte: about a second for each gigabyte.
    """
    root = Path(path).expanduser()
    checkpoints = RunDirectory(root).checkpoints
    step = Checkpointer(checkpoints).latest_step()
    if step is not None:
        root = checkpoints / str(step)
        names = sorted(p for p in root.rglob("*") if p.is_file())
    else:
        patterns = ("*.safetensors", "config.json", "adapter_config.json")
        names = sorted(p for pattern in patterns for p in root.glob(pattern))
    digest = hashlib.sha256()
    for name in names:
        digest.update(str(name.relative_to(root)).encode())
        with name.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def data_fingerprint(arrays: Iterable[np.ndarray]) -> str:
    """SHA-256 over arrays of tokens and masks, their lengths and types included."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def stored(
    out: Path,
    name: str,
    key: ReferenceKey,
    compute: Callable[[], np.ndarray],
) -> np.ndarray:
    """The numbers stored as `out/reference/NAME.npy`, computed first if they are not there.

    Args:
      out: the run directory.
      name: of the numbers, such as `train`.
      key: what they must have been computed from.
      compute: makes them; every process calls it, the first one writes.

    Raises:
      ConfigError: when the run has checkpoints and its numbers are of other weights or examples.
      CheckpointError: when the file does not hold what it was written with.
    """
    file = out / "reference" / f"{name}.npy"
    record = file.with_suffix(".json")
    if record.is_file():
        saved = json.loads(record.read_text(encoding="utf-8"))
        changed = [part for part, value in asdict(key).items() if saved["key"].get(part) != value]
        if not changed:
            return _read(file, saved)
        if Checkpointer(RunDirectory(out).checkpoints).latest_step() is not None:
            what = " and ".join(_CHANGED[part] for part in changed)
            raise ConfigError(
                f"{what} changed since {file} was computed, and {out} has steps trained against "
                "it; put back what it was, or start a new run with another --out"
            )
    numbers = compute()
    if jax.process_index() == 0:
        _write(file, record, key, numbers)
    return numbers


_CHANGED = {
    "weights": "the reference's weights",
    "data": "the examples (or their tokenizer, template or max_length)",
    "compute": "the dtypes",
}


def _read(file: Path, saved: Mapping[str, Any]) -> np.ndarray:
    try:
        numbers = np.load(file, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {file}: {error}; delete {file.parent}") from error
    if data_fingerprint([numbers]) != saved["numbers"]:
        raise CheckpointError(
            f"{file} is damaged: its numbers are not those that were written; delete {file.parent} "
            "and they are computed again"
        )
    return numbers


def _write(file: Path, record: Path, key: ReferenceKey, numbers: np.ndarray) -> None:
    """The numbers first, the record that vouches for them last, each in one replacement."""
    file.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    with replacing(file, durable=True) as draft, draft.open("wb") as opened:
        np.save(opened, numbers)
    _write_json(record, {"key": asdict(key), "numbers": data_fingerprint([numbers])})


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    """What vouches for the other files: written last, in one replacement."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


def for_each_example(
    model: ModelT,
    function: Callable[[ModelT, Batch], jax.Array],
    batches: Iterator[Mapping[str, np.ndarray]],
    count: int,
    *,
    hosts: Hosts,
    mesh: Mesh,
    rules: Rules,
) -> np.ndarray:
    """`function` of every example, by number.

    Args:
      model: laid out on `mesh`.
      function: (model, global batch) to float32 [P, ...], traced by `jax.jit`.
      batches: this host's rows, each example once; `example` int32 [P] is a row's number, -1 that
        of a row that only fills.
      count: N.
      hosts: which rows this process reads.
      mesh: the devices.
      rules: logical axes to mesh axes.

    Returns:
      float32 [N, ...], the same on every host.
    """
    graphdef, state = nnx.split(model)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def run(state: nnx.State, batch: Batch) -> tuple[jax.Array, jax.Array]:
        with use_mesh(mesh, rules):
            return batch["example"], function(nnx.merge(graphdef, state), batch)

    jitted = jax.jit(run, out_shardings=everywhere)
    found: np.ndarray | None = None
    seen = np.zeros(count, bool)
    for rows in batches:
        shapes = abstract_batch(rows, hosts, mesh, rules)
        example_P, values = jax.device_get(jitted(state, to_global(dict(rows), shapes)))
        if found is None:
            found = np.zeros((count, *values.shape[1:]), np.float32)
        real = example_P >= 0
        found[example_P[real]] = values[real]
        seen[example_P[real]] = True
    if found is None or not seen.all():
        raise ValueError(f"{int((~seen).sum())} of {count} examples were in no batch")
    return found


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
    top: Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]],
    batches: Iterator[Mapping[str, np.ndarray]],
    positions: Sequence[int],
) -> None:
    """Ask the teacher about every example, once.

    All processes call it, each with its own rows; process 0 writes everybody's, and none returns
    before the folder is whole.

    Args:
      path: the folder; made here.
      key: written into the manifest.
      top: rows to the teacher's top tokens of the rows of all processes: `Teacher.top`.
      batches: rows, each example once: tokens, positions, segment_ids, loss_weights [B, T] and
        example int32 [B], -1 for a row that only fills.
      positions: trained positions of each example.

    Raises:
      DataError: when `batches` leave an example out.
    """
    offsets = np.concatenate([[0], np.cumsum(positions, dtype=np.int64)])
    writer = _Writer(path, key, offsets) if jax.process_index() == 0 else None
    for rows in batches:
        found = top(rows)
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
        _write_json(self._path / _MANIFEST, {"version": 1, **asdict(self._key)})


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
