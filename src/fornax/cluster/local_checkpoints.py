"""Snapshots on a host's own disk, which outlives agents, the launch and a restart of the machine.

The worker marks some of its snapshots, as far apart as their copies and failures make best. In the
background, outside the worker's step, the agent copies those to files of the same layout: its own,
and the replicas that it holds for others. A file is there whole or not at all, and there are the
two newest of each rank. Where the disk refuses, the run trains on, and each snapshot that is marked
later is another attempt.
"""

import contextlib
import errno
import os
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fornax.config.files import replacing
from fornax.config.snapshot_file import FIRST, Snapshot, SnapshotFile

__all__ = ["LocalCheckpoints"]

_COUNT = 2
_PIECE = 8 << 20
_END_SECONDS = 10.0
_NAME = re.compile(r"(\.?)(\d+)-(\d+)(?:\..*)?")

Report = Callable[[dict[str, object]], None]


class LocalCheckpoints:
    """The directory of one agent; its work is done by a thread."""

    def __init__(self, directory: Path, rank: int, report: Report) -> None:
        """Copy nothing before `look`.

        Args:
          directory: of this agent, for this run; it is made when it is needed.
          rank: of its worker.
          report: called from any thread with a message for the controller.
        """
        self.directory = directory
        self._rank, self._report = rank, report
        self._queue: queue.SimpleQueue[tuple[int, int, Snapshot] | None] = queue.SimpleQueue()
        self._seen: dict[tuple[int, int], Snapshot] = {}
        self._closed = self._refused = False
        with contextlib.suppress(OSError):  # which the first copy says
            if steps := sorted({step for draft, _, step in self._files().values() if not draft}):
                report({"kind": "on_disk", "steps": steps, "directory": str(directory)})
        self._thread = threading.Thread(target=self._run, name="local-checkpoints", daemon=True)
        self._thread.start()

    def look(self, held: Mapping[int, Sequence[int]]) -> None:
        """Notice marked snapshots: to be called often, by the thread that closes the files.

        Args:
          held: descriptors of the snapshots in this host's memory, by the rank whose they are.
        """
        for rank, descriptors in held.items():
            for place, descriptor in enumerate(descriptors):
                file = SnapshotFile(descriptor)
                found = file.found()
                if found is None or not found.to_disk or self._seen.get((rank, place)) == found:
                    continue
                self._seen[rank, place] = found
                if file.copied(found) is None:
                    self._queue.put((rank, os.dup(descriptor), found))

    def close(self, *, remove: bool) -> None:
        """Copy no more.

        Args:
          remove: whether the run is done, so that nobody needs what is there.
        """
        self._closed = True
        self._queue.put(None)
        self._thread.join(_END_SECONDS)  # a disk that hangs is not waited for
        if remove:
            shutil.rmtree(self.directory, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.directory.parent.rmdir()  # of the run, by the last of its agents

    def _run(self) -> None:
        while (each := self._queue.get()) is not None:
            rank, descriptor, found = each
            try:
                self._copy(rank, SnapshotFile(descriptor), found)
            finally:
                os.close(descriptor)

    def _copy(self, rank: int, file: SnapshotFile, found: Snapshot) -> None:
        began = time.monotonic()
        try:
            self._write(self.directory / f"{rank}-{found.step}", file, found)
            self._prune(rank, found.step)
        except OSError as error:
            file.set_copied(found, 0.0)
            if rank == self._rank or error.errno != errno.EBUSY:  # of a replica a later one comes
                self._say(f"{error.strerror or error}")
        else:
            file.set_copied(found, time.monotonic() - began)
            self._say(None)

    def _write(self, path: Path, file: SnapshotFile, found: Snapshot) -> None:
        """Copy a snapshot, and sync it.

        Raises:
          OSError: when the disk refuses, or the worker wrote another snapshot meanwhile.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < found.size:
            raise OSError(errno.ENOSPC, f"it has less than {found.size / 1e6:.1f} MB free")
        room = memoryview(bytearray(min(_PIECE, found.size)))
        with replacing(path, durable=True) as draft, draft.open("w+b", buffering=0) as out:
            copy = SnapshotFile(out.fileno())
            copy.begin(found.size)
            for offset in range(FIRST, found.size, _PIECE):
                count = os.preadv(file.descriptor, [room[: found.size - offset]], offset)
                if file.found() != found or self._closed:
                    raise OSError(errno.EBUSY, "the next snapshots came before it was copied")
                _write_all(out.fileno(), room[:count], offset)
            copy.commit(found)

    def _prune(self, rank: int, step: int) -> None:
        """Leave the newest whole ones of a rank, and no drafts of those that were killed."""
        mine = {path: each for path, each in self._files().items() if each[1] == rank}
        whole = sorted(step for draft, _, step in mine.values() if not draft)
        for path, (draft, _, at) in mine.items():
            if (draft and at <= step) or at not in whole[-_COUNT:]:
                path.unlink(missing_ok=True)

    def _files(self) -> dict[Path, tuple[bool, int, int]]:
        """What is there: whether it is a draft, rank and step."""
        if not self.directory.is_dir():
            return {}
        named = [(path, _NAME.fullmatch(path.name)) for path in self.directory.iterdir()]
        return {path: (bool(m[1]), int(m[2]), int(m[3])) for path, m in named if m is not None}

    def _say(self, why_not: str | None) -> None:
        """Report that copies fail, once, and once that they do not any more."""
        if (why_not is not None) != self._refused and not self._closed:
            self._refused = why_not is not None
            text = "continue" if why_not is None else f"have no room or fail: {why_not}"
            said = f"local checkpoints in {self.directory} {text}"
            self._report({"kind": "local_checkpoints", "text": said, "written": not self._refused})


def _write_all(descriptor: int, piece: memoryview, offset: int) -> None:
    while piece:
        count = os.pwrite(descriptor, piece, offset)
        piece, offset = piece[count:], offset + count
