"""The run directory: the one place that names its files, and the lock on it.

runs/<name>/config.yaml     the resolved config of the latest attempt
            metrics.jsonl   one line a logged step
            events.jsonl    changes of state, of a launched run
            goodput.jsonl   where the time went
            spikes.jsonl    loss spikes that the run went back from: the skip list
            checkpoints/    weights, optimizer, RNG, data position, config
            program.json    work, memory and roofline of its programs, once they are compiled
            data.json       documents and tokens under it, as it found them
            tensorboard/    event files
            profile/        captured profiles
            requests/       what the run is asked for while it goes, and its answers
            report.html     the report
"""

import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

from fornax.config.errors import ConfigError

__all__ = ["RunDirectory"]

_held: set[int] = set()


def _release_in_child() -> None:
    """A forked worker shares its parent's lock and would keep it after the parent was killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)


class RunDirectory:
    """The files of a run, and a lock that keeps a second process out of it.

    The lock is the kernel's (`flock`): it ends with its process, a `kill -9` included, so there
    is not a stale lock to remove.
    """

    def __init__(self, path: str | Path) -> None:
        """Name the directory; nothing is created."""
        self.path = Path(path).expanduser()
        self._lock: int | None = None

    @property
    def config(self) -> Path:
        """The resolved config of the latest attempt."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON line a logged step."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """One JSON line a completion that was trained on, of runs that draw their own data."""
        return self.path / "samples.jsonl"

    @property
    def snapshots(self) -> Path:
        """Where processes of a launched run exchange snapshots while a group forms."""
        return self.path / "cluster" / "snapshots"

    @property
    def goodput(self) -> Path:
        """The goodput ledger."""
        return self.path / "goodput.jsonl"

    @property
    def spikes(self) -> Path:
        """One JSON line a rewind: the skip list."""
        return self.path / "spikes.jsonl"

    @property
    def events(self) -> Path:
        """The events of a launched run."""
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The checkpoints, one folder per step."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files."""
        return self.path / "tensorboard"

    @property
    def profile(self) -> Path:
        """Captured profiles."""
        return self.path / "profile"

    @property
    def program(self) -> Path:
        """What its programs do."""
        return self.path / "program.json"

    @property
    def data(self) -> Path:
        """What its data is."""
        return self.path / "data.json"

    @property
    def report(self) -> Path:
        """The report."""
        return self.path / "report.html"

    def create(self) -> None:
        """Make the directory.

        Raises:
          ConfigError: when it cannot be made or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._probe()
        except OSError as error:
            raise ConfigError(
                f"cannot write the run directory {self.path}: {error.strerror or error}; choose "
                "another with --run-dir (tune: --out), or make this one writable"
            ) from error

    def _probe(self) -> None:
        probe = self.path / f".probe-{os.getpid()}"
        try:
            probe.write_text("probe")
        finally:
            probe.unlink(missing_ok=True)

    def lock(self) -> None:
        """Keep other processes from training here until this one ends or `unlock` is called.

        Raises:
          ConfigError: when another process trains here.
        """
        if self._lock is not None:
            return
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(descriptor, 200).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise ConfigError(
                f"{self.path} is in use: {owner} trains there; wait for it, stop it, or choose "
                "another directory with --run-dir"
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        self._lock = descriptor
        _held.add(descriptor)

    def unlock(self) -> None:
        """Let other processes in."""
        if self._lock is not None:
            _held.discard(self._lock)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "RunDirectory":
        """Create and lock."""
        self.create()
        self.lock()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Unlock."""
        self.unlock()

    def save_config(self, text: str) -> None:
        """Write `config.yaml` in one atomic replacement."""
        temporary = self.config.with_name("config.yaml.new")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.config)
        except OSError as error:
            raise ConfigError(
                f"cannot write {self.config}: {error.strerror or error}; make room or make it "
                "writable"
            ) from error
