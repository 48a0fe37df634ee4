"""Save and restore a training run: asynchronous, atomic, verified."""

import errno
import shutil
import socket
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import jax

from fornax.checkpoint.arrays import (
    check_fits,
    count_alike,
    load_arrays,
    save_arrays,
    table,
)
from fornax.checkpoint.failures import first_line, has_no_room, reason
from fornax.checkpoint.files import (
    checksums,
    claim,
    delete_step,
    read_epoch,
    remove_leftovers,
    step_path,
    write_epoch,
)
from fornax.checkpoint.mirror import Mirror
from fornax.checkpoint.records import (
    Record,
    is_complete,
    json_copy,
    read_record,
    record_path,
    write_record,
)
from fornax.checkpoint.retention import CheckpointConfig, Kept, expired
from fornax.checkpoint.stored import StoredSteps
from fornax.checkpoint.together import SavingTogether, ended, meet, raise_anywhere
from fornax.config.errors import CheckpointError, DiskFullError, GroupLostError
from fornax.mesh import hosts

__all__ = ["Checkpointer", "Restored"]

_NOTHING: Mapping[str, Any] = MappingProxyType({})


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

    With several processes, all call `save`, `restore`, `resume_step` and `wait` together, on a
    directory they share: process 0 decides, and what fails in one is raised in all.
    """

    def __init__(self, directory: str | Path, config: CheckpointConfig | None = None) -> None:
        """Nothing is written before the first `save`, so reading a live run is safe.

        Raises:
          CheckpointError: when `directory` is a URL or a file.
        """
        if "://" in str(directory):
            raise CheckpointError(
                f"{directory} is a URL; checkpoints go to a mounted file system, such as a local "
                "disk or NFS, and from there to the address of checkpoint.mirror"
            )
        self.directory = Path(directory).absolute()
        if self.directory.exists() and not self.directory.is_dir():
            raise CheckpointError(f"{self.directory} is a file; choose a directory")
        self._config = config or CheckpointConfig()
        self._mirror: Mirror | None = None
        if self._config.mirror is not None:
            self._mirror = Mirror(self._config.mirror, self.directory)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._stored = StoredSteps(self.directory, contents=self._config.verify == "checksum")
        self._together = SavingTogether(self.directory)
        self._claimed = False
        self._epoch: int | None = None
        self.seconds = 0.0
        """What the last save took until it was complete and copied to the mirror; 0 before one."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def begin_epoch(self, epoch: int) -> None:
        """From now on only this group of processes may save here; all of them call it.

        A process of another group, which lost its network and runs on, is refused when it begins to
        save a step and again before that step becomes complete.

        Args:
          epoch: the group's number under `fornax launch`, 0 without it.

        Raises:
          CheckpointError: when the directory cannot be written.
        """
        self._epoch = epoch
        hosts.decide(self._write_epoch)

    def _write_epoch(self) -> None:
        assert self._epoch is not None
        if read_epoch(self.directory) != self._epoch:
            write_epoch(self.directory, self._epoch)

    def _check_epoch(self, step: int) -> None:
        now = read_epoch(self.directory)
        if self._epoch not in (None, now):
            raise CheckpointError(
                f"step {step} is not saved: this process belongs to group {self._epoch} of the "
                f"run, and {self.directory} is group {now}'s, which took over; end this process"
            )

    def save(
        self,
        step: int,
        *,
        state: object,
        data: Mapping[int, object] = MappingProxyType({}),
        config_yaml: str = "",
        metadata: Mapping[str, object] = _NOTHING,
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
          DiskFullError: when there is no room; of an earlier save too.
          CheckpointError: when the directory cannot be written, or an earlier save failed.
        """
        self.wait()
        path = step_path(self.directory, step)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        at = hosts.decide(lambda: self._make_room(path, size))
        if at is None:
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
            epoch=self._epoch or 0,
        )
        seconds = self._config.timeout_seconds
        try:
            response = self._together.run(
                lambda: save_arrays(path, state, timeout_seconds=seconds), step
            )
        except GroupLostError:
            raise
        except Exception as error:
            if jax.process_count() == 1:
                self._clear()
                raise self._save_error(step, error) from error
            self._together.end()
            response = Future()  # the others began, and learn of it when they wait
            response.set_exception(error)
        self._pending = self._executor.submit(self._finish, path, response, record, at)
        if force:
            self.wait()
        return True

    @property
    def saving(self) -> bool:
        """Whether a save is running in the background."""
        return self._pending is not None and not self._pending.done()

    def check(self) -> None:
        """Raise the failure of a background save that has ended; cheap, for every step.

        With several processes `wait` raises it, at the next save: all stop at the same step.

        Raises:
          CheckpointError: once per failure, naming the step, the directory and what to do.
        """
        if not self.saving and jax.process_count() == 1:
            self.wait()

    def wait(self) -> None:
        """Block until the save in the background, if any, is complete in all processes.

        Raises:
          DiskFullError: when there was no room for it.
          CheckpointError: when it failed, in any of them.
          GroupLostError: when another process is gone.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        while not ended(pending):
            pass
        failure = pending.exception()
        if jax.process_count() == 1:
            if failure is not None:
                raise failure
            return
        try:
            raise_anywhere(
                None if failure is None else str(failure), full=isinstance(failure, DiskFullError)
            )
        except CheckpointError:
            hosts.decide(self._clear)  # nobody writes there any more
            count_alike()
            raise

    def _clear(self) -> None:
        """Give back what a failed save took."""
        with suppress(OSError):
            remove_leftovers(self.directory)

    def close(self) -> None:
        """Wait for this process's part of the last save, then end the background thread.

        Raises:
          CheckpointError: when that part failed.
        """
        pending, self._pending = self._pending, None
        self._executor.shutdown()
        if self._together.left_waiting:
            jax.distributed.shutdown()  # ends Orbax's wait for the process that failed
        if pending is not None:
            pending.result()

    def all_steps(self) -> list[int]:
        """Complete steps on disk, ascending."""
        return self._stored.steps()

    def latest_step(self) -> int | None:
        """Newest complete step on disk, or None."""
        steps = self.all_steps()
        return steps[-1] if steps else None

    def resume_step(self) -> int | None:
        """The step to resume from: the newest complete one that process 0 finds; None to start from
        scratch.

        Where the mirror has a newer one than the directory, it is fetched.

        Raises:
          CheckpointError: when another process does not find that very step, naming the processes
            and what each has.
        """
        step = hosts.decide(self._newest_step)
        if jax.process_count() == 1:
            return step
        found = hosts.gather([socket.gethostname(), self.all_steps(), self._mark(step)])
        others = [
            f"process {number} on {host} has {_listed(steps)}"
            for number, (host, steps, mark) in enumerate(found)
            if mark != found[0][2] or (step is None and steps)
        ]
        if others:
            raise CheckpointError(
                f"the processes do not share {self.directory}: process 0 on {found[0][0]} "
                f"{'starts from scratch' if step is None else f'resumes from step {step}'} and has "
                f"{_listed(found[0][1])}; {'; '.join(others)}"
                + ("" if step is None else f", or another step {step}")
                + ". Give all of them one directory on storage that every host reaches"
            )
        return step

    def _newest_step(self) -> int | None:
        here = self.latest_step()
        there = None if self._mirror is None else self._mirror.latest_step()
        if self._mirror is None or there is None or (here is not None and there <= here):
            return here
        claim(self.directory)
        self._mirror.get(there)
        return there

    def _mark(self, step: int | None) -> int | None:
        """What tells a step from another of the same number; None when it is not complete here."""
        path = step_path(self.directory, step or 0)
        if step is None or not is_complete(path):
            return None
        return zlib.crc32(record_path(path, 0).read_bytes())

    def read_config(self, step: int | None = None) -> str:
        """The config a step was saved with; of the latest step when `step` is None.

        Raises:
          CheckpointError: when there is no such step, or its record is damaged.
        """
        return self._stored.first_record(step).config_yaml

    def read_metadata(self, step: int) -> dict[str, Any]:
        """The `metadata` that a step was saved with.

        Raises:
          CheckpointError: when there is no such step, or its record is damaged.
        """
        return dict(self._stored.first_record(step).metadata)

    def discard(self, after: int) -> None:
        """Delete the steps after `after`, the mirror's too: the run goes another way from there.

        Raises:
          CheckpointError: when one cannot be deleted, or a save in the background failed.
        """
        self.wait()
        hosts.decide(lambda: self._discard(after))

    def _discard(self, after: int) -> None:
        for step in (step for step in self.all_steps() if step > after):
            try:
                delete_step(self.directory, step)
            except OSError as error:
                raise CheckpointError(
                    f"step {step} in {self.directory} is not needed any more, as the run resumes "
                    f"from step {after}, and cannot be deleted ({error.strerror}); delete it"
                ) from error
        if self._mirror is not None:
            self._mirror.discard(after)

    def restore(
        self, abstract_state: object, step: int | None = None, *, partial: bool = False
    ) -> Restored:
        """Load a step while its files are verified; nothing is returned of one that is damaged.

        Args:
          abstract_state: tree of `jax.ShapeDtypeStruct` with the shardings and dtypes wanted; they
            may differ from those saved. A leaf without a sharding goes to the first device.
          step: None takes that of `resume_step`.
          partial: load only the arrays that `abstract_state` has, such as the parameters.

        Raises:
          CheckpointError: when there is no such step, a file is damaged, or the arrays saved are
            not those asked for. The message names the step, the file and what to do.
        """
        path = self._stored.existing(self.resume_step() if step is None else step)
        records = self._stored.records(path)
        check_fits(abstract_state, records[0].arrays, partial=partial, where=str(path))
        with ThreadPoolExecutor(1, thread_name_prefix="verify") as verifier:
            damage = verifier.submit(self._stored.damage, path, records)
            state, failure = self._load(path, abstract_state)
        raise_anywhere(damage.result())
        raise_anywhere(failure)
        return Restored(
            step=int(path.name),
            state=state,
            data={shard: position for record in records for shard, position in record.data.items()},
            config_yaml=records[0].config_yaml,
            metadata=dict(records[0].metadata),
        )

    def _load(self, path: Path, abstract_state: object) -> tuple[Any, str | None]:
        """The state, or why there is none."""
        try:
            return load_arrays(path, abstract_state), None
        except CheckpointError:
            raise
        except Exception as error:
            return None, (
                f"step {path.name} in {self.directory} cannot be loaded: {first_line(error)}. "
                f"{self._stored.advice(int(path.name))}"
            )

    def _make_room(self, path: Path, size: int) -> str | None:
        """Process 0 before a save: make its place free.

        Args:
          path: the step's directory.
          size: bytes of the arrays, without which a save is not begun: it would take what others
            on that disk need, and of several processes some would wait for the one that failed.

        Returns:
          The name at which the processes meet once it is written; None for a step that is complete.
          Process 0 chooses it: those that joined later have saved less often than others.
        """
        self._check_epoch(int(path.name))
        try:
            if not self._claimed:
                claim(self.directory)
                remove_leftovers(self.directory)
                self._claimed = True
            if is_complete(path):
                return None
            if path.exists():
                shutil.rmtree(path)
            free = shutil.disk_usage(self.directory).free
            if free < size:
                said = f"needs {size / 1e6:.0f} MB"
                no_room = OSError(errno.ENOSPC, said, str(self.directory))
                raise self._save_error(int(path.name), no_room)
            self._together.begin()
        except OSError as error:
            raise CheckpointError(
                f"cannot clear {error.filename} ({error.strerror}), which an interrupted save "
                "left; delete it"
            ) from error
        return f"fornax/checkpoint/{path.name}/{time.monotonic_ns()}"

    def _finish(self, path: Path, response: Any, record: Record, at: str) -> None:
        """The background part: Orbax's commit, checksums, the record, then retention."""
        began = time.monotonic()
        failure = None
        try:
            seconds = self._config.timeout_seconds
            self._together.run(lambda: response.result(timeout=seconds), record.step)
            files = checksums(path, record.process, record.processes)
            self._check_epoch(record.step)
            write_record(path, replace(record, files=files))
        except Exception as error:
            failure = error
            self._together.end()
        try:
            # Also after a failure, so that nobody waits for a record that will not come.
            meet(at, self._config.timeout_seconds)
        except Exception as error:
            failure = failure or error
        if failure is not None:
            if record.processes == 1:
                self._clear()
            if isinstance(failure, DiskFullError):
                raise failure
            raise self._save_error(record.step, failure) from failure
        if record.process == 0:
            if not is_complete(path):
                raise CheckpointError(
                    f"step {record.step} in {self.directory} lacks the record of another process: "
                    "its save failed, or its directory is another one"
                )
            self._together.end()
            self._prune(record.step)
            if self._mirror is not None:
                self._mirror.put(record.step, self._config)
        self.seconds = time.monotonic() - began

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

    def _save_error(self, step: int, error: Exception) -> CheckpointError:
        latest = self.latest_step()
        return (DiskFullError if has_no_room(error) else CheckpointError)(
            f"saving step {step} to {self.directory} failed: {reason(error, self.directory)}. "
            + (f"Step {latest} is intact" if latest is not None else "No step is complete yet")
        )


def _listed(steps: list[int]) -> str:
    return f"steps {', '.join(map(str, steps))}" if steps else "none"
