"""Numbers of a fixed model for every example, computed once and stored beside the run.

The reference's log-probs never change while the policy trains, so one pass before the first step
replaces a forward pass in every step, and the reference is not in memory while training. What is
stored says of which weights and which tokens it is; a resumed run checks both.

Legend: N examples, P rows of a batch.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fornax.checkpoint import Checkpointer
from fornax.config.errors import CheckpointError, ConfigError
from fornax.mesh import Rules, use_mesh
from fornax.train.hosts import abstract_batch, to_global
from fornax.train.run_dir import RunDirectory
from fornax.train.task import Hosts

__all__ = ["Key", "data_fingerprint", "for_each_example", "stored", "weights_fingerprint"]

_BLOCK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Key:
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
    key: Key,
    compute: Callable[[], np.ndarray],
    say: Callable[[str], None] = lambda text: None,
) -> np.ndarray:
    """The numbers stored as `out/reference/NAME.npy`, computed first if they are not there.

    Args:
      out: the run directory.
      name: of the numbers, such as `train`.
      key: what they must have been computed from.
      compute: makes them; every process calls it, the first one writes.
      say: told what happens.

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
    say(f"computing the reference's log-probs of the {name} examples, once")
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


def _write(file: Path, record: Path, key: Key, numbers: np.ndarray) -> None:
    """The numbers first, the record that vouches for them last, each in one replacement."""
    file.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    temporary = file.with_suffix(".new")
    with temporary.open("wb") as opened:
        np.save(opened, numbers)
        opened.flush()
        os.fsync(opened.fileno())
    temporary.replace(file)
    text = json.dumps({"key": asdict(key), "numbers": data_fingerprint([numbers])}, indent=1)
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(record)


def for_each_example(
    model: nnx.Module,
    function: Callable[[Any, Mapping[str, Any]], jax.Array],
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

    def run(state: Any, batch: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
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
