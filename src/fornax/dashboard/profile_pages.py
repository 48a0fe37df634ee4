"""Pages of captures, made when somebody asks, each in a process of bounded memory and time.

They lie in the cache folder, never in a run, under a name that changes with the capture.
"""

import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fornax import __version__
from fornax.config import environment
from fornax.config.worker_process import WorkerProcess, ending, last_line
from fornax.dashboard.answers import RefusedError
from fornax.dashboard.captures import CaptureFound

__all__ = ["ProfilePages"]

_WORKER = "fornax.profile.page_worker:work"
_SECONDS = 300.0
_BYTES = 4 << 30
"""Memory of the process that makes a page."""
_LOOK_SECONDS = 0.2
_MOST_WAITING = 16
_KEPT_BYTES = 512 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")


class ProfilePages:
    """Makes one page after the other. Methods may be called from any thread."""

    def __init__(self, *, seconds: float = _SECONDS, memory_bytes: int = _BYTES) -> None:
        """Nothing is made yet.

        Args:
          seconds: that making a page may take.
          memory_bytes: that its process may hold.
        """
        self._seconds, self._memory = seconds, memory_bytes
        self._folder = environment.cache_dir() / "profile-pages"
        self._turns = ThreadPoolExecutor(1, "profile pages")
        self._making: dict[str, Future[None]] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def close(self) -> None:
        """End the page that is being made, and make no other."""
        self._closed.set()
        self._turns.shutdown(cancel_futures=True)

    def ask(self, captures: Sequence[CaptureFound]) -> tuple[str, Future[None]]:
        """Have the page of a capture made, or of the one before a change and the one after.

        Returns:
          The page's key, under which `read` has it, and what is done when it is there. That raises
          RefusedError where it cannot be made, with the reason.

        Raises:
          RefusedError: too many pages are waited for.
        """
        told = [__version__, *([each.path, each.files] for each in captures)]
        key = hashlib.sha256(json.dumps(told).encode("utf-8", "surrogateescape")).hexdigest()
        done: Future[None] = Future()
        with self._lock:
            if key in self._making:
                return key, self._making[key]
            if self._is_there(key):
                done.set_result(None)
                return key, done
            if len(self._making) >= _MOST_WAITING:
                raise RefusedError(f"{_MOST_WAITING} pages are waited for; ask again later")
            folders = [each.path for each in captures]
            self._making[key] = done = self._turns.submit(self._make, key, folders)
        done.add_done_callback(lambda _: self._forget(key))
        return key, done

    def read(self, key: str) -> bytes:
        """A page that was made.

        Raises:
          OSError: it is not there any more.
        """
        return self._path(key).read_bytes()

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.html"

    def _is_there(self, key: str) -> bool:
        """Whether it is; then it counts as new, so that it is kept for longer."""
        try:
            os.utime(self._path(key))
        except OSError:
            return False
        return True

    def _forget(self, key: str) -> None:
        with self._lock:
            self._making.pop(key, None)

    def _make(self, key: str, folders: Sequence[str]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RefusedError(
                f"{self._folder} cannot be made ({error.strerror or error}), in which pages of "
                "captures are kept; set FORNAX_CACHE_DIR to a folder that can be written"
            ) from error
        with (
            tempfile.TemporaryFile() as log,
            WorkerProcess(_WORKER, log=log, environment={"JAX_PLATFORMS": "cpu"}) as worker,
        ):
            worker.send({"captures": folders, "page": str(self._path(key))})
            try:
                answer = self._wait(worker)
            except EOFError:
                code = worker.wait()
                raise RefusedError(
                    f"the capture cannot be read: the process that reads it ended by {ending(code)}"
                    f" ({last_line(log)}); fornax profile show {folders[-1]} says more"
                ) from None
        if answer["error"] is not None:
            raise RefusedError(answer["error"])
        self._prune()

    def _wait(self, worker: WorkerProcess) -> Any:
        """What a worker answers, which stays within the bounds until then."""
        limit = time.monotonic() + self._seconds
        while not self._closed.is_set():
            try:
                return worker.receive(_LOOK_SECONDS)
            except TimeoutError:
                pass
            if time.monotonic() > limit:
                raise RefusedError(
                    f"the page was not made in {self._seconds:g} s: capture fewer steps, or write "
                    "it with fornax profile show --html, which has no limit"
                )
            if _resident_bytes(worker.pid) > self._memory:
                raise RefusedError(
                    f"the page takes more than {self._memory >> 20} MiB of memory to make: capture "
                    "fewer steps, or write it with fornax profile show --html, which has no limit"
                )
        raise RefusedError("fornax ui is stopping")

    def _prune(self) -> None:
        """Delete the pages that were asked for longest ago, all but this many bytes."""
        kept = 0
        try:
            pages = [(each.stat(), each) for each in self._folder.glob("*.html")]
        except OSError:  # another server deletes too
            return
        for number, (told, page) in enumerate(
            sorted(pages, key=lambda pair: pair[0].st_mtime, reverse=True)
        ):
            kept += told.st_size
            if number and kept > _KEPT_BYTES:
                page.unlink(missing_ok=True)


def _resident_bytes(pid: int) -> int:
    """Memory of a process; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0
