"""Capture a running JAX program: bounded in time and memory, one at a time, as XProf reads it.

from fornax import profile

with profile.capture("prof/"):
    for _ in range(5):
        state = step(state)
    jax.block_until_ready(state)
"""

import contextlib
import dataclasses
import fcntl
import gc
import importlib.metadata
import itertools
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from fornax.config import environment
from fornax.config.errors import ProfileError
from fornax.mesh.hardware.cpu import processor_name
from fornax.profile.perf_events import PerfEvents
from fornax.profile.records import COLLECTION, SPACES, CaptureRecord, write_record

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS = 0.05
_EVERY = 4
"""Looks until counters are read again: that takes a call for each thread."""
_SCRATCH = ".capture-"
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_running = threading.Lock()
"""Held while a capture runs: jax has one profiler session a process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """What to record, and when to end at the latest."""

    seconds: float = 60.0
    """The capture ends after this, whatever runs."""
    bytes: int = 1 << 30
    """It ends when the process has grown by this: events are kept in memory until the end."""
    python: bool = False
    """Record each Python call: much slower, and says what the host did."""
    host_level: int = 1
    """How much the host's own code records: 1 what matters, 2 more, 3 all."""
    folder: str | None = None
    """Name of the capture, which takes the place of an earlier one of the name; None takes the
    time. Ranks of one program must agree on it."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 3600:
            raise ProfileError(
                f"a capture of {self.seconds:g} seconds; use more than 0 and at most 3600"
            )
        if self.bytes < 1 << 20:
            raise ProfileError(f"a capture of {self.bytes} bytes; use at least {1 << 20} (1 MiB)")
        if self.host_level not in (1, 2, 3):
            raise ProfileError(f"host_level={self.host_level}; use 1, 2 or 3")
        if self.folder is not None and Path(self.folder).name != self.folder:
            raise ProfileError(f"folder={self.folder!r} is a path; use a plain name")


class Capture:
    """One capture, from `start` to `stop`, from any thread of the process.

    It ends by itself at its limits; `stop` then only says where it lies.
    """

    def __init__(self, directory: Path | str, options: CaptureOptions | None = None) -> None:
        """`directory` gets `plugins/profile/<folder>/`, and may hold other captures."""
        self.directory = Path(directory)
        self.options = options or CaptureOptions()
        self._ended = threading.Event()
        self._ending = threading.Lock()
        self._result: Path | ProfileError | None = None
        self._samples: list[tuple[int, str, int, int, int | None]] = []
        self._counted: list[list[float]] = []

    def start(self) -> None:
        """Begin.

        Raises:
            ProfileError: another capture runs in this process, or the directory cannot be written.
        """
        if self._result is not None or self._ended.is_set():
            raise ProfileError("this capture has ended; make another `Capture`")
        if not _running.acquire(blocking=False):
            raise ProfileError(
                "a capture runs already in this process and there can be only one; wait until it "
                "ends, or stop it"
            )
        try:
            self._begin()
        except BaseException:
            _running.release()
            raise

    def _begin(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._scratch, self._lock = _scratch(self.directory)
        except OSError as error:
            raise ProfileError(
                f"{self.directory} cannot be written ({error.strerror}); give another directory"
            ) from error
        given = jax.profiler.ProfileOptions()
        given.python_tracer_level = int(self.options.python)
        given.host_tracer_level = self.options.host_level
        self._counters = PerfEvents()
        self._resident = _resident_bytes()
        self._begun = time.time()
        try:
            jax.profiler.start_trace(self._scratch, profiler_options=given)
        except RuntimeError as error:
            self._counters.close()
            self._drop_scratch()
            raise ProfileError(
                f"jax's profiler did not start: {error}; end the trace that runs in this process"
            ) from error
        with self._ending:
            self._count()
        self._collector = _Collections()
        gc.callbacks.append(self._collector)
        self._watch = threading.Thread(target=self._guard, name="capture watch", daemon=True)
        self._watch.start()

    def stop(self) -> Path:
        """End, write, and return the capture's folder.

        Raises:
            ProfileError: it was never started, or could not be written.
        """
        self._end("stopped")
        if isinstance(self._result, ProfileError):
            raise self._result
        assert self._result is not None
        return self._result

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return hasattr(self, "_watch") and not self._ended.is_set()

    def _end(self, reason: str) -> None:
        if not hasattr(self, "_watch"):
            raise ProfileError("this capture was never started; call `start` before `stop`")
        with self._ending:
            if self._result is not None:
                return
            self._ended.set()
            seconds = time.time() - self._begun
            if self._collector in gc.callbacks:
                gc.callbacks.remove(self._collector)
            self._count()
            self._counters.close()
            try:
                jax.profiler.stop_trace()
                self._result = self._keep(reason, seconds)
            except (OSError, RuntimeError) as error:
                self._result = ProfileError(
                    f"the capture could not be written to {self.directory}: {error}; free space "
                    "there or give another directory"
                )
            except ProfileError as error:
                self._result = error
            finally:
                self._drop_scratch()
                _running.release()

    def _drop_scratch(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    def _guard(self) -> None:
        """End the capture at its limits, and sample allocators until then."""
        devices = [each for each in jax.local_devices() if each.memory_stats()]
        limit = time.monotonic() + self.options.seconds
        for look in itertools.count(1):
            if self._ended.wait(_LOOK_SECONDS):
                break
            if not look % _EVERY:
                with self._ending:
                    self._count()
            for device in devices:
                self._sample(device)
            if time.monotonic() >= limit:
                self._end("seconds")
            elif _resident_bytes() - self._resident > self.options.bytes:
                self._end("bytes")

    def _sample(self, device: Any) -> None:
        stats = device.memory_stats() or {}
        used = int(stats.get("bytes_in_use", 0))
        name = f"{device.platform}:{device.local_hardware_id or 0}"
        limit = stats.get("bytes_limit")
        peak = int(stats.get("peak_bytes_in_use", used))
        self._samples.append((time.time_ns(), name, used, peak, limit and int(limit)))

    def _count(self) -> None:
        """Read counters; `_ending` is held, so that times rise."""
        values = self._counters.read()
        if values:
            self._counted.append([time.time_ns(), *values])

    def _keep(self, reason: str, seconds: float) -> Path:
        """Move the XSpace to its folder under a name of this rank's own, and write the record."""
        spaces = sorted(self._scratch.glob(f"plugins/profile/*/{SPACES}"))
        if not spaces or not spaces[0].stat().st_size:
            raise ProfileError(
                f"jax wrote {'an empty' if spaces else 'no'} capture: of more than 2 GB it writes "
                "nothing; capture fewer steps or seconds"
            )
        rank, ranks, host = jax.process_index(), jax.process_count(), socket.gethostname()
        name = f"{host}.xplane.pb" if ranks == 1 else f"{host}-{rank}.xplane.pb"
        size = spaces[0].stat().st_size
        folder = self._folder()
        spaces[0].replace(folder / name)
        device = jax.local_devices()[0]
        record = CaptureRecord(
            rank=rank,
            ranks=ranks,
            host=host,
            space=name,
            size=size,
            begin=self._begun,
            seconds=seconds,
            ended=reason,
            platform=device.platform,
            device_kind=device.device_kind,
            devices=jax.local_device_count(),
            processor=processor_name(),
            cores=environment.usable_cores(),
            versions={
                "jax": jax.__version__,
                "jaxlib": importlib.metadata.version("jaxlib"),
                "fornax": importlib.metadata.version("fornax-ai"),
            },
            samples=self._samples,
            counter_names=list(self._counters.names),
            counter_samples=self._counted,
            counters_absent=self._counters.absent,
        )
        write_record(folder, record)
        return folder

    def _folder(self) -> Path:
        """The folder of the capture; of those without a name each has its own."""
        held = self.directory / "plugins" / "profile"
        stamp = time.strftime("%Y_%m_%d_%H_%M_%S", time.localtime(self._begun))
        names = (stamp if n == 1 else f"{stamp}-{n}" for n in itertools.count(1))
        fresh = (held / name for name in names if not (held / name).exists())
        folder = held / self.options.folder if self.options.folder else next(fresh)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@contextlib.contextmanager
def capture(directory: Path | str, *, options: CaptureOptions | None = None) -> Iterator[Capture]:
    """Capture what runs inside: any JAX program, with or without annotated steps.

    Wait for the results of what should be in it (`jax.block_until_ready`) before the end. In a
    program of several processes all must come here together, since they agree on a folder.

    Args:
        directory: gets `plugins/profile/<folder>/`.
        options: what to record, and its limits.

    Raises:
        ProfileError: another capture runs in this process, or nothing could be written.
    """
    chosen = options or CaptureOptions()
    if chosen.folder is None and jax.process_count() > 1:
        chosen = dataclasses.replace(chosen, folder=_common_folder())
    running = Capture(directory, chosen)
    running.start()
    try:
        yield running
    finally:
        running.stop()


def _common_folder() -> str:
    """The time of process 0, as the name of a folder."""
    import numpy as np
    from jax.experimental import multihost_utils

    now = multihost_utils.broadcast_one_to_all(np.int32(time.time()))
    return time.strftime("%Y_%m_%d_%H_%M_%S", time.gmtime(int(now)))


def _scratch(directory: Path) -> tuple[Path, int | None]:
    """A folder for jax to write in, and its lock; what killed processes left in `directory` goes.

    Locks are the kernel's (`flock`) and end with their process, a `kill -9` included.
    """
    turn = _lock(directory, wait=True)
    try:
        for left in directory.glob(f"{_SCRATCH}*"):
            lock = None if turn is None else _lock(left, wait=False)
            if lock is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        path = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=directory))
        return path, _lock(path, wait=False)
    finally:
        if turn is not None:
            os.close(turn)


def _lock(folder: Path, *, wait: bool) -> int | None:
    """A descriptor that holds a folder; None where another does, where it has gone, and on a file
    system without locks."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


class _Collections:
    """Annotate each garbage collection in its thread."""

    def __init__(self) -> None:
        self._open: list[jax.profiler.TraceAnnotation] = []

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            annotation = jax.profiler.TraceAnnotation(f"{COLLECTION}{info['generation']}")
            annotation.__enter__()
            self._open.append(annotation)
        elif self._open:
            self._open.pop().__exit__(None, None, None)


def _resident_bytes() -> int:
    """Memory that the process holds; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0
