"""The folder that a directory is written in before it takes its place, and where a run resumes.

Tensors go into files of a few of them as they are made. A line of the journal says that a file is
whole, and what was done; a file without a line is written again. The folder is beside the target.
"""

import fcntl
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from fornax.config.errors import CheckpointError
from fornax.config.files import put_in_place, replacing, sync, write_whole
from fornax.config.jsonl import JsonLines, read_json_lines

__all__ = ["Folder", "Work"]

_PLAN, _JOURNAL, _LOCK = "plan.json", "journal.jsonl", "lock"
_log = logging.getLogger("fornax.quant")


class Folder:
    """A hidden folder beside the directory that is made, in which killed work is resumed."""

    def __init__(self, target: Path, doing: str, plan: Mapping[str, Any]):
        """Open the folder; empty it where an earlier run had another plan.

        Args:
          target: the directory to make.
          doing: what is done in the folder, the end of its name.
          plan: what its files depend on, as JSON.

        Raises:
          CheckpointError: the target exists, another process writes it, or the disk refuses.
        """
        if target.exists():
            raise CheckpointError(f"{target} exists; give another path, or delete it")
        self.target, self.path = target, target.with_name(f".{target.name}.{doing}")
        text = json.dumps(plan, indent=2, sort_keys=True)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / _LOCK).open("w")  # the kernel's: it ends with the process
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.close()
                raise CheckpointError(
                    f"another process writes {target}; wait for it, or give another path"
                ) from None
            if (self.path / _PLAN).exists() and not self._is(text):
                _log.warning("%s is of a run with other arguments; starting again", self.path)
                for file in self.path.iterdir():
                    if file.is_dir():
                        shutil.rmtree(file)
                    elif file.name != _LOCK:
                        file.unlink()
            write_whole(self.path / _PLAN, text, durable=True)
        except OSError as error:
            raise _unwritable(target, error) from error
        self.records = read_json_lines(self.path / _JOURNAL)
        """The journal: what this and earlier runs noted."""
        self._journal = JsonLines(self.path / _JOURNAL)

    def note(self, record: Mapping[str, Any]) -> None:
        """Append to the journal."""
        self._journal.write(record)
        self.records.append(dict(record))

    def close(self) -> None:
        """Release the folder, for this process to open again or another."""
        self._journal.close()
        self._lock.close()

    def _is(self, plan: str) -> bool:
        file = self.path / _PLAN
        return file.is_file() and file.read_text() == plan


class Work:
    """Tensors of the directory `target`, of which earlier runs may have written some."""

    def __init__(self, target: Path, plan: Mapping[str, Any], limit: int):
        """Open the folder; resume in it where an earlier run had the same plan.

        Args:
          target: the directory to make.
          plan: what the tensors depend on, as JSON.
          limit: bytes of tensors that are held before they are written.

        Raises:
          CheckpointError: see `Folder`.
        """
        self._held = Folder(target, "quantizing", plan)
        self.target, self.folder = target, self._held.path
        self._limit = limit
        records = self._held.records
        self.places: dict[str, str] = {}
        """File of each tensor that is written."""
        self.notes: dict[str, dict[str, Any]] = {}
        """What was done, by name of the leaf."""
        for record in records:
            self.places |= dict.fromkeys(record["tensors"], record["file"])
            self.notes |= record["notes"]
        for file in self.folder.glob("*.safetensors"):
            if file.name not in self.places.values():
                file.unlink()
        if records:
            _log.info("resuming in %s: %d leaves are done", self.folder, len(self.notes))
        self._files = len(records)
        self.bytes = sum(record["bytes"] for record in records)
        """Of the tensors that are written."""
        self._tensors: dict[str, np.ndarray] = {}
        self._waiting: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> "Work":
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def add(self, leaf: str, tensors: Mapping[str, np.ndarray], note: dict[str, Any]) -> None:
        """Take the tensors of a leaf, and write those that wait where they are many."""
        # safetensors writes the memory of arrays as it lies, whatever their strides.
        self._tensors |= {name: np.ascontiguousarray(x) for name, x in tensors.items()}
        self._waiting[leaf] = note
        if sum(tensor.nbytes for tensor in self._tensors.values()) >= self._limit:
            self.flush()

    def flush(self) -> None:
        """Write the tensors that wait.

        Raises:
          CheckpointError: when the disk refuses.
        """
        if not self._waiting:
            return
        name = f"model-{self._files + 1:05d}.safetensors"
        try:
            with replacing(self.folder / name, durable=True) as draft:
                save_file(self._tensors, draft, metadata={"format": "pt"})
        except OSError as error:
            raise _unwritable(self.target, error) from error
        size = sum(tensor.nbytes for tensor in self._tensors.values())
        record = {"file": name, "bytes": size, "tensors": [*self._tensors], "notes": self._waiting}
        self._held.note(record)
        self.places |= dict.fromkeys(self._tensors, name)
        self.notes |= self._waiting
        self._files, self.bytes = self._files + 1, self.bytes + size
        self._tensors, self._waiting = {}, {}

    def write_index(self) -> None:
        """Write which file has which tensor, so that the folder can be read as a directory."""
        self.write_json(
            "model.safetensors.index.json",
            {"metadata": {"total_size": self.bytes}, "weight_map": self.places},
        )

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a file of JSON."""
        try:
            write_whole(self.folder / name, json.dumps(value, indent=2) + "\n", durable=True)
        except OSError as error:
            raise _unwritable(self.target, error) from error

    def commit(self, copied: list[Path]) -> None:
        """Copy files, and give the folder the target's name."""
        try:
            for file in copied:
                shutil.copyfile(file, self.folder / file.name)
                sync(self.folder / file.name)
            put_in_place(self.folder, self.target)
            for name in (_PLAN, _JOURNAL, _LOCK):
                (self.target / name).unlink()
            sync(self.target)
            sync(self.target.parent)
        except OSError as error:
            raise _unwritable(self.target, error) from error


def _unwritable(target: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"cannot write {target}: {error.strerror or error}; make room or make it writable, then "
        "run the same command again: it resumes where it was"
    )
