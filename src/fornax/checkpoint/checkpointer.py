"""Save and restore a training run: asynchronous, atomic, verified."""

import errno
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

from fornax.checkpoint.arrays import check_fits, load_arrays, save_arrays, table
from fornax.checkpoint.config import CheckpointConfig
from fornax.checkpoint.files import (
    checksums,
    claim,
    complete_steps,
    delete_step,
    find_damage,
    remove_leftovers,
    step_path,
)
from fornax.checkpoint.records import (
    Record,
    is_complete,
    json_copy,
    read_record,
    read_records,
    write_record,
)
from fornax.checkpoint.retention import Kept, expired
from fornax.config.errors import CheckpointError

__all__ = ["Checkpointer", "Restored"]

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_POLL_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A step, back from disk."""

    step: int
    state: Any
    """Tree like the abstract state it was asked for."""
    data: dict[int, Any]
    """Data positions by virtual shard, of all processes that saved."""
    config_yaml: str
    metadata: dict[str, Any]


class Checkpointer:
    """The checkpoints of one run in one directory.

    A save copies the arrays and returns; a background thread writes them, adds checksums, and only
    then makes the step complete. What is complete is read from disk each time it is asked.

    With several processes, all call `save`, `restore`, `wait` and `close` together, on a
    directory they share.
    """

    def __init__(self, directory: str | Path, config: CheckpointConfig | None = None) -> None:
        """Nothing is written before the first `save`, so reading a live run is safe.

        Raises:
          CheckpointError: when `directory` is a URL or a file.
        """
        if "://" in str(directory):
            raise CheckpointError(
                f"{directory} is a URL; checkpoints go to a mounted file system, such as a local "
                "disk or NFS"
            )
        self.directory = Path(directory).absolute()
        if self.directory.exists() and not self.directory.is_dir():
            raise CheckpointError(f"{self.directory} is a file; choose a directory")
        self._config = config or CheckpointConfig()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._claimed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def save(
        self,
        step: int,
        *,
        state: Any,
        data: Mapping[int, Any] = MappingProxyType({}),
        config_yaml: str = "",
        metadata: Mapping[str, Any] = _NOTHING,
        metrics: Mapping[str, float] = _NOTHING,
        force: bool = False,
    ) -> bool:
        """Start saving a step; wait for the save before it, if that still runs.

        Args:
          step: number of the step, 0 or more.
          state: tree of arrays. They may be donated or overwritten as soon as this returns.
          data: JSON-able data positions by virtual shard; each process gives its own.
          config_yaml: resolved config of the run.
          metadata: JSON-able, anything.
          metrics: numbers that `keep_best` may compare.
          force: return only when the step is complete, as before a shutdown.

        Returns:
          False when the step is complete on disk already, and nothing was done.

        Raises:
          CheckpointError: when the directory cannot be written, or an earlier save failed.
        """
        self.wait()
        self._claim()
        path = step_path(self.directory, step)
        if is_complete(path):
            return False
        record = Record(
            step=step,
            process=jax.process_index(),
            processes=jax.process_count(),
            saved_at=time.time(),
            data={shard: json_copy(position) for shard, position in data.items()},
            files={},
            config_yaml=config_yaml,
            metadata=json_copy(dict(metadata)),
            metrics=json_copy(dict(metrics)),
            arrays=table(state),
        )
        if record.process == 0 and path.exists():
            shutil.rmtree(path)
        try:
            response = save_arrays(path, state, timeout_seconds=self._config.timeout_seconds)
        except Exception as error:
            raise self._save_error(step, error) from error
        self._pending = self._executor.submit(self._finish, path, response, record)
        if force:
            self.wait()
        return True

    @property
    def saving(self) -> bool:
        """Whether a save is running in the background."""
        return self._pending is not None and not self._pending.done()

    def check(self) -> None:
        """Raise the failure of a background save that has ended; cheap, for every step.

        Raises:
          CheckpointError: once per failure, naming the step, the directory and what to do.
        """
        if not self.saving:
            self.wait()

    def wait(self) -> None:
        """Block until the save in the background, if any, is complete in all processes.

        Raises:
          CheckpointError: when it failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, then end the background thread.

        Raises:
          CheckpointError: when the last save failed.
        """
        try:
            self.wait()
        finally:
            self._executor.shutdown()

    def all_steps(self) -> list[int]:
        """Complete steps on disk, ascending."""
        return complete_steps(self.directory)

    def latest_step(self) -> int | None:
        """Newest complete step on disk, or None."""
        steps = self.all_steps()
        return steps[-1] if steps else None

    def read_config(self, step: int | None = None) -> str:
        """The config a step was saved with; of the latest step when `step` is None.

        Raises:
          CheckpointError: when there is no such step, or its record is damaged.
        """
        path = self._existing(step)
        try:
            return read_record(path, 0).config_yaml
        except CheckpointError as error:
            raise self._damaged(path, str(error)) from error

    def restore(
        self, abstract_state: Any, step: int | None = None, *, partial: bool = False
    ) -> Restored:
        """Verify a step's files and load it.

        Args:
          abstract_state: tree of `jax.ShapeDtypeStruct` with the shardings and dtypes wanted; they
            may differ from those saved. A leaf without a sharding goes to the first device.
          step: None takes the latest complete one.
          partial: load only the arrays that `abstract_state` has, such as the parameters.

        Raises:
          CheckpointError: when there is no such step, a file is damaged, or the arrays saved are
            not those asked for. The message names the step, the file and what to do.
        """
        path = self._existing(step)
        records = self._verified(path)
        check_fits(abstract_state, records[0].arrays, partial=partial, where=str(path))
        try:
            state = load_arrays(
                path,
                abstract_state,
                partial=partial,
                timeout_seconds=self._config.timeout_seconds,
            )
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"step {path.name} in {self.directory} cannot be loaded: {_first_line(error)}. "
                f"{self._advice(int(path.name))}"
            ) from error
        return Restored(
            step=int(path.name),
            state=state,
            data={shard: position for record in records for shard, position in record.data.items()},
            config_yaml=records[0].config_yaml,
            metadata=dict(records[0].metadata),
        )

    def _claim(self) -> None:
        """Before the first save: make sure the directory is ours, and clear what kills left."""
        if self._claimed:
            return
        refusal = None
        if jax.process_index() == 0:
            try:
                claim(self.directory)
                remove_leftovers(self.directory)
            except CheckpointError as error:
                refusal = error
            except OSError as error:
                refusal = CheckpointError(
                    f"cannot clear {error.filename} ({error.strerror}), which an interrupted save "
                    "left; delete it"
                )
        if _anywhere(refusal is not None):
            raise refusal or CheckpointError(f"process 0 cannot use {self.directory}; see its log")
        self._claimed = True

    def _finish(self, path: Path, response: Any, record: Record) -> None:
        """The background part: Orbax's commit, checksums, the record, then retention."""
        try:
            response.result(timeout=self._config.timeout_seconds)
            files = checksums(path, record.process, record.processes)
            write_record(path, replace(record, files=files))
            self._wait_for_others(path, record.processes)
        except Exception as error:
            if record.processes == 1:
                # Give back what the failed save took; the failure itself is reported below.
                with suppress(OSError):
                    remove_leftovers(self.directory)
            raise self._save_error(record.step, error) from error
        if record.process == 0:
            self._prune(record.step)

    def _wait_for_others(self, path: Path, processes: int) -> None:
        deadline = time.monotonic() + self._config.timeout_seconds
        while not is_complete(path):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"not all {processes} processes finished within "
                    f"{self._config.timeout_seconds} seconds"
                )
            time.sleep(_POLL_SECONDS)

    def _prune(self, saved: int) -> None:
        """Delete the steps that no rule keeps."""
        kept = []
        for step in self.all_steps():
            try:
                record = read_record(step_path(self.directory, step), 0)
            except CheckpointError:
                continue  # Damaged: for a person to look at, not for us to count or delete.
            saved_at = datetime.fromtimestamp(record.saved_at, UTC)
            kept.append(Kept(step, saved_at, dict(record.metrics)))
        for step in expired(self._config, kept):
            try:
                delete_step(self.directory, step)
            except OSError as error:
                raise CheckpointError(
                    f"step {saved} is saved, but step {step} in {self.directory}, which no rule "
                    f"keeps, cannot be deleted ({error.strerror}); delete it"
                ) from error

    def _existing(self, step: int | None) -> Path:
        steps = self.all_steps()
        if not steps:
            what = "has no complete checkpoint" if self.directory.is_dir() else "does not exist"
            raise CheckpointError(f"{self.directory} {what}; check the path, or start the run anew")
        if step is None:
            return step_path(self.directory, steps[-1])
        if step not in steps:
            raise CheckpointError(
                f"step {step} is not complete in {self.directory}; complete are "
                f"{', '.join(map(str, steps))}"
            )
        return step_path(self.directory, step)

    def _verified(self, path: Path) -> list[Record]:
        """The records of a step, after all processes found their share of its files intact."""
        try:
            damage = None
            records = read_records(path)
        except CheckpointError as error:
            damage, records = str(error), []
        damage = damage or self._damage(path, records)
        if _anywhere(damage is not None):
            what = damage or f"another process found a damaged file in {path}"
            raise self._damaged(path, what)
        return records

    def _damage(self, path: Path, records: list[Record]) -> str | None:
        """What is wrong with this process's share of a step's files."""
        files = dict(pair for record in records for pair in record.files.items())
        share = sorted(files)[jax.process_index() :: jax.process_count()]
        return find_damage(
            path,
            {name: files[name] for name in share},
            contents=self._config.verify == "checksum",
        )

    def _damaged(self, path: Path, what: str) -> CheckpointError:
        return CheckpointError(f"step {path.name}: {what}. {self._advice(int(path.name))}")

    def _advice(self, bad: int) -> str:
        """What to do about a bad step: the newest older one that is whole."""
        for step in reversed([step for step in self.all_steps() if step < bad]):
            path = step_path(self.directory, step)
            try:
                records = read_records(path)
            except CheckpointError:
                continue
            files = dict(pair for record in records for pair in record.files.items())
            if find_damage(path, files, contents=self._config.verify == "checksum") is None:
                return (
                    f"Step {step} is intact: restore it by number, or delete "
                    f"{step_path(self.directory, bad)} and resume"
                )
        return "No older step is intact: start the run anew"

    def _save_error(self, step: int, error: Exception) -> CheckpointError:
        latest = self.latest_step()
        return CheckpointError(
            f"saving step {step} to {self.directory} failed: {_reason(error, self.directory)}. "
            + (f"Step {latest} is intact" if latest is not None else "No step is complete yet")
        )


def _anywhere(found: bool) -> bool:
    """Whether any process found something."""
    if jax.process_count() == 1:
        return found
    return bool(multihost_utils.process_allgather(found).any())


def _reason(error: BaseException, directory: Path) -> str:
    """The cause in words, and the fix where there is one."""
    text = " ".join(str(cause) for cause in _causes(error))
    codes = {cause.errno for cause in _causes(error) if isinstance(cause, OSError)}
    if errno.ENOSPC in codes or "No space left" in text or errno.EDQUOT in codes:
        free = shutil.disk_usage(directory).free / 1e6
        return f"no space left on the disk ({free:.0f} MB free); free some, or keep fewer steps"
    if errno.EFBIG in codes or "File too large" in text:
        return "a file grew over the limit of this system; raise the file-size limit"
    if codes & {errno.EROFS, errno.EACCES, errno.EPERM} or "Read-only file system" in text:
        return "the directory cannot be written; choose another or change its permissions"
    return _first_line(error)


def _causes(error: BaseException | None) -> list[BaseException]:
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
