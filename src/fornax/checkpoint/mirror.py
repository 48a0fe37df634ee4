"""A copy of a run's checkpoints in an object store, from which it goes on elsewhere.

A store has no renames and no locks: a step's files are put first and its records last, that of
process 0 at the very end, and deleted in the opposite order. So a step of which the record of
process 0 is there is whole, whenever the copying was killed.
"""

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fornax.checkpoint.config import CheckpointConfig
from fornax.checkpoint.files import step_path
from fornax.checkpoint.records import is_complete, read_record, record_path
from fornax.checkpoint.retention import Kept, expired
from fornax.config.errors import CheckpointError

__all__ = ["Mirror"]

_RECORD = "fornax.0.json"


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
        return max(self._asked(self._steps), default=None)

    def put(self, step: int, config: CheckpointConfig) -> None:
        """Copy a step that is complete here; then delete those that no rule of `config` keeps."""
        self._asked(lambda: self._put(step))
        self._asked(lambda: self._prune(config))

    def get(self, step: int) -> None:
        """Copy a step from there; killed at any point, it leaves the step whole or not complete."""
        self._asked(lambda: self._get(step))

    def _put(self, step: int) -> None:
        folder, there = step_path(self._local, step), f"{self._root}/{step}"
        names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        records = [record_path(folder, process).name for process in _processes(folder)]
        files = [name for name in names if name not in records]
        self._remove(there)  # what an interrupted copy left
        self._store.put([str(folder / n) for n in files], [f"{there}/{n}" for n in files])
        for name in reversed(records):
            self._store.put_file(str(folder / name), f"{there}/{name}")

    def _get(self, step: int) -> None:
        folder, there = step_path(self._local, step), f"{self._root}/{step}"
        if folder.exists():
            shutil.rmtree(folder)
        names = [name.removeprefix(f"{there}/") for name in self._store.find(there)]
        records = [name for name in names if "/" not in name and name.startswith("fornax.")]
        files = [name for name in names if name not in records]
        for parent in {(folder / name).parent for name in names}:
            parent.mkdir(parents=True, exist_ok=True)
        self._store.get([f"{there}/{n}" for n in files], [str(folder / n) for n in files])
        for name in sorted(records, key=lambda name: name == _RECORD):
            self._store.get_file(f"{there}/{name}", str(folder / name))
        if not is_complete(folder):
            raise CheckpointError(f"step {step} at {self.address} lacks records of its processes")

    def _prune(self, config: CheckpointConfig) -> None:
        kept = []
        for step in sorted(self._steps()):
            local = step_path(self._local, step)
            fields = vars(read_record(local, 0)) if is_complete(local) else self._fields(step)
            saved_at = datetime.fromtimestamp(fields["saved_at"], UTC)
            kept.append(Kept(step, saved_at, dict(fields["metrics"])))
        for step in expired(config, kept):
            self._remove(f"{self._root}/{step}")

    def _fields(self, step: int) -> dict[str, Any]:
        """What the record of process 0 says of a step that is not here."""
        wrapper = json.loads(self._store.cat_file(f"{self._root}/{step}/{_RECORD}"))
        return json.loads(wrapper["body"])

    def _steps(self) -> list[int]:
        """The steps whose record of process 0 is there."""
        self._store.invalidate_cache()
        names = (name.removeprefix(f"{self._root}/") for name in self._store.find(self._root))
        heads = (name.partition("/") for name in names)
        return [int(step) for step, _, rest in heads if step.isdecimal() and rest == _RECORD]

    def _remove(self, there: str) -> None:
        self._store.invalidate_cache()
        names = self._store.find(there)
        record = f"{there}/{_RECORD}"
        if record in names:
            self._store.rm_file(record)
        others = [name for name in names if name != record]
        if others:
            self._store.rm(others)

    def _asked(self, action: Callable[[], Any]) -> Any:
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
