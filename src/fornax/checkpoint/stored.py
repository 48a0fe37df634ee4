"""The complete steps of a directory: what is there, and whether it is whole."""

from pathlib import Path

import jax

from fornax.checkpoint.files import complete_steps, find_damage, step_path
from fornax.checkpoint.records import Record, read_record, read_records
from fornax.checkpoint.together import raise_anywhere
from fornax.config.errors import CheckpointError

__all__ = ["StoredSteps"]


class StoredSteps:
    """What is complete is read from disk each time it is asked."""

    def __init__(self, directory: Path, *, contents: bool) -> None:
        """Read nothing yet.

        Args:
          directory: of a run's checkpoints.
          contents: whether a step is whole only when its files have their checksums; else their
            sizes are enough.
        """
        self._directory, self._contents = directory, contents

    def steps(self) -> list[int]:
        """Complete steps, ascending."""
        return complete_steps(self._directory)

    def first_record(self, step: int | None) -> Record:
        """What process 0 wrote of a step; of the newest for None.

        Raises:
          CheckpointError: when there is no such step, or its record is damaged.
        """
        path = self.existing(step)
        try:
            return read_record(path, 0)
        except CheckpointError as error:
            raise self._damaged(path, str(error)) from error

    def existing(self, step: int | None) -> Path:
        """Where a complete step lies; the newest for None.

        Raises:
          CheckpointError: when there is no such step.
        """
        steps = self.steps()
        if not steps:
            what = "has no complete checkpoint" if self._directory.is_dir() else "does not exist"
            raise CheckpointError(f"{self._directory} {what}; check the path, or start a new run")
        if step is None:
            return step_path(self._directory, steps[-1])
        if step not in steps:
            raise CheckpointError(
                f"step {step} is not complete in {self._directory}; complete are "
                f"{', '.join(map(str, steps))}"
            )
        return step_path(self._directory, step)

    def records(self, path: Path) -> list[Record]:
        """The records of a step, whose files are all there in their sizes.

        Raises:
          CheckpointError: in all processes, when one found a record or a size damaged.
        """
        records = []
        try:
            records = read_records(path)
            damage = self._damage(path, records, contents=False)
        except CheckpointError as error:
            damage = str(self._damaged(path, str(error)))
        raise_anywhere(damage)
        return records

    def damage(self, path: Path, records: list[Record]) -> str | None:
        """What checksums say against this process's share of a step's files, and what to do.

        None when nothing, or when sizes are enough. Asks no other process, so that any thread may
        call it.
        """
        return self._damage(path, records, contents=True) if self._contents else None

    def _damage(self, path: Path, records: list[Record], *, contents: bool) -> str | None:
        files = dict(pair for record in records for pair in record.files.items())
        share = sorted(files)[jax.process_index() :: jax.process_count()]
        found = find_damage(
            path,
            {name: files[name] for name in share},
            contents=contents,
        )
        return None if found is None else str(self._damaged(path, found))

    def _damaged(self, path: Path, what: str) -> CheckpointError:
        return CheckpointError(f"step {path.name}: {what}. {self.advice(int(path.name))}")

    def advice(self, bad: int) -> str:
        """What to do about a bad step: the newest older one that is whole."""
        for step in reversed([step for step in self.steps() if step < bad]):
            path = step_path(self._directory, step)
            try:
                records = read_records(path)
            except CheckpointError:
                continue
            files = dict(pair for record in records for pair in record.files.items())
            if find_damage(path, files, contents=self._contents) is None:
                return (
                    f"Step {step} is intact: restore it by number, or delete "
                    f"{step_path(self._directory, bad)} and resume"
                )
        return "No older step is intact: start a new run"
