"""A copy of a run's checkpoints in an object store, from which it is resumed elsewhere.

A store has no renames and no locks, and what a machine sent before it died may arrive after the
next machine wrote the same step. So each copy of a step has a folder of its own, `<step>-<random>`.
Its files are put first and its records last, that of process 0 last of all, and deleted in the
opposite order. A copy is whole when its records are there and all that they name, in their sizes.
"""

import secrets
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fornax.checkpoint.files import step_path
from fornax.checkpoint.records import Record, parse_record, read_record, record_path
from fornax.checkpoint.retention import CheckpointConfig, Kept, expired
from fornax.config.errors import CheckpointError

__all__ = ["Mirror"]

_RECORD = "fornax.0.json"


class _Copy(NamedTuple):
    """A step's folder there."""

    step: int
    path: str
    sizes: dict[str, int]
    """Bytes by file, relative to the folder."""


class Mirror:
    """The steps of the checkpoint directory `local` below `address`, such as gs://bucket/run.

    Raises:
      CheckpointError: in every method, when the store cannot be reached, read or written; at once
        for a protocol that nothing installed speaks.
    """

    def __init__(self, address: str, local: Path) -> None:
        """Nothing is asked of the store yet."""
        self.address = address.rstrip("/")
        self._local = local
        self._store, self._root = self._asked(lambda: _open(self.address))

    def latest_step(self) -> int | None:
        """The newest step that is whole there, or None."""
        found = self._asked(lambda: next(self._whole_copies(), None))
        return None if found is None else found.step

    def put(self, step: int, config: CheckpointConfig) -> None:
        """Copy a step that is complete here; then delete those that no rule of `config` keeps.

        Deletes other copies of the step too, and what interrupted copies left.
        """
        self._asked(lambda: self._put(step, config))

    def get(self, step: int) -> None:
        """Copy a step from there; killed at any point, it leaves the step whole or not complete."""
        self._asked(lambda: self._get(step))

    def discard(self, after: int) -> None:
        """Delete the steps after `after` there."""
        self._asked(lambda: self._discard(after))

    def _discard(self, after: int) -> None:
        for copy in self._copies():
            if copy.step > after:
                self._remove(copy)

    def _put(self, step: int, config: CheckpointConfig) -> None:
        folder, there = step_path(self._local, step), f"{self._root}/{step}-{secrets.token_hex(4)}"
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        records = [record_path(folder, process).name for process in _processes(folder)]
        files = [name for name in names if name not in records]
        self._store.put([str(folder / n) for n in files], [f"{there}/{n}" for n in files])
        for name in reversed(records):
            self._store.put_file(str(folder / name), f"{there}/{name}")
        self._prune(there, config)

    def _get(self, step: int) -> None:
        folder = step_path(self._local, step)
        copy = next((copy for copy in self._whole_copies() if copy.step == step), None)
        if copy is None:
            raise CheckpointError(f"step {step} at {self.address} is not whole any more")
        if folder.exists():
            shutil.rmtree(folder)
        records = [name for name in copy.sizes if "/" not in name and name.startswith("fornax.")]
        files = [name for name in copy.sizes if name not in records]
        for parent in {(folder / name).parent for name in copy.sizes}:
            parent.mkdir(parents=True, exist_ok=True)
        self._store.get([f"{copy.path}/{n}" for n in files], [str(folder / n) for n in files])
        for name in sorted(records, key=lambda name: name == _RECORD):
            self._store.get_file(f"{copy.path}/{name}", str(folder / name))

    def _prune(self, mine: str, config: CheckpointConfig) -> None:
        """Delete what no rule keeps; of the step that was just put, keep the copy `mine` alone."""
        copies = self._copies()
        step = next(copy.step for copy in copies if copy.path == mine)
        kept: dict[int, tuple[str, Kept]] = {}
        for copy in copies:
            if _RECORD in copy.sizes and (copy.step != step or copy.path == mine):
                record = self._record(copy, 0)
                saved_at = datetime.fromtimestamp(record.saved_at, UTC)
                kept[copy.step] = copy.path, Kept(copy.step, saved_at, dict(record.metrics))
        for each in expired(config, [kept[each][1] for each in sorted(kept)]):
            del kept[each]
        paths = {path for path, _ in kept.values()}
        for copy in copies:
            if copy.path not in paths:
                self._remove(copy)

    def _whole_copies(self) -> Iterator[_Copy]:
        """Copies whose records are there and all that they name, in their sizes; newest first."""
        for copy in sorted(self._copies(), key=lambda copy: copy.step, reverse=True):
            if _RECORD not in copy.sizes:
                continue
            processes = range(self._record(copy, 0).processes)
            if any(record_path(Path(), process).name not in copy.sizes for process in processes):
                continue
            records = (self._record(copy, process) for process in processes)
            files = (each for record in records for each in record.files.items())
            if all(copy.sizes.get(name) == size for name, (size, _) in files):
                yield copy

    def _record(self, copy: _Copy, process: int) -> Record:
        name = f"{copy.path}/{record_path(Path(), process).name}"
        return parse_record(self._store.cat_file(name).decode(), name)

    def _copies(self) -> list[_Copy]:
        """What is there, whole or not."""
        self._store.invalidate_cache()
        copies: dict[str, _Copy] = {}
        for path, info in self._store.find(self._root, detail=True).items():
            folder, _, name = path.removeprefix(f"{self._root}/").partition("/")
            step = folder.partition("-")[0]
            if step.isdecimal():
                copy = copies.setdefault(folder, _Copy(int(step), f"{self._root}/{folder}", {}))
                copy.sizes[name] = info["size"]
        return list(copies.values())

    def _remove(self, copy: _Copy) -> None:
        if _RECORD in copy.sizes:
            self._store.rm_file(f"{copy.path}/{_RECORD}")
        others = [f"{copy.path}/{name}" for name in copy.sizes if name != _RECORD]
        if others:
            self._store.rm(others)

    def _asked(self, action: Callable[[], object]) -> Any:
        try:
            return action()
        except CheckpointError:
            raise
        except Exception as error:  # each store has errors of its own kind
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise CheckpointError(
                f"the checkpoints at {self.address} cannot be reached: {reason}. Look at the "
                "address, the credentials and the network, or take checkpoint.mirror out"
            ) from error


def _open(address: str) -> tuple[Any, str]:
    import fsspec

    try:
        return fsspec.url_to_fs(address)
    except ImportError as error:
        raise CheckpointError(
            f"{address} needs a package that is not installed: pip install 'fornax-ai[gcs]' for "
            "gs://, 'fornax-ai[s3]' for s3://"
        ) from error


def _processes(folder: Path) -> range:
    return range(read_record(folder, 0).processes)
