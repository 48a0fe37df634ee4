"""The files of a launched run, in its run directory.

runs/<name>/events.jsonl            one line a change of state, by the controller
            cluster/rank-R.log      what each rank printed
            cluster/rank-R.record   what each rank is doing, while it runs
            cluster/rank-R.goodput.jsonl  where the time of a rank but the first went
            cluster/rank-R.stacks   the stacks of a rank that hung
            cluster/hosts           how many hosts were asked for since, until the run looks
            cluster/run-id          what tells its snapshots on hosts' disks from another run's
            cluster/relay           the rank that a drill asked a relay for, until the run looks
            cluster/snapshots/      what hosts give each other of a group of another size
            cluster/agents.log      what agents and coordination service printed
            cluster/controller.log  what the controller printed, such as why it crashed
            cluster/replica-N.log   what each replica of a server printed
            cluster/sampler-N.log   what each sampler of reinforcement learning printed
            cluster/sampler-N.record  what each sampler is doing, while it runs
            cluster/sampler.addresses  host:port of each sampler
            cluster/data-N.log      what each data worker printed
            cluster/data-N.record   what each data worker is doing, while it runs
            cluster/data.addresses  host:port of each data worker
"""

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from fornax.config.errors import ClusterError, ConfigError
from fornax.config.files import write_whole
from fornax.config.jsonl import read_json_lines

__all__ = ["CONTROLLER", "ClusterFiles", "Request", "RoleName"]

RoleName = Literal["sampler", "data"]
"""Processes beside the hosts: samplers of reinforcement learning, data workers."""

CONTROLLER = "fornax.cluster.launch:control"
"""What the process of a controller runs."""

_NOISE = re.compile(r"^\[Gloo\] |^[IWE]\d{4} [\d:.]+ ")
_TAIL_BYTES = 8192

Request = Literal["hosts", "relay"]
"""What another process asks a controller for."""


@dataclass(frozen=True)
class ClusterFiles:
    """The paths below a run directory."""

    run_dir: Path

    @property
    def events(self) -> Path:
        """The events."""
        return self.run_dir / "events.jsonl"

    @property
    def directory(self) -> Path:
        """Logs and records."""
        return self.run_dir / "cluster"

    @property
    def services(self) -> Path:
        """What agents and coordination services printed."""
        return self.directory / "agents.log"

    @property
    def controller(self) -> Path:
        """What the controller printed."""
        return self.directory / "controller.log"

    def controller_pid(self) -> int | None:
        """The process of a launch's controller; None where there is none now."""
        said = [e["controller"] for e in read_json_lines(self.events) if "controller" in e]
        try:
            words = Path(f"/proc/{said[-1]}/cmdline").read_bytes()
        except (IndexError, OSError):
            return None
        return said[-1] if CONTROLLER.encode() in words else None

    def run_id(self) -> str:
        """What tells this run from one that had this directory before it."""
        path = self.directory / "run-id"
        if not path.exists():
            write_whole(path, secrets.token_hex(8), durable=True)
        return path.read_text()

    def ask(self, what: Request, number: int) -> None:
        """Leave word for the controller: how many hosts the run is to have, or the rank whose
        agent is to be reached through a relay."""
        path = self.directory / f".{what}"
        path.write_text(str(number))
        path.rename(self.directory / what)  # whole, whenever the run looks

    def asked(self, what: Request) -> int | None:
        """What was asked for since the last call."""
        path = self.directory / what
        try:
            number = int(path.read_text())
        except FileNotFoundError:
            return None
        path.unlink()
        return number

    def log(self, rank: int) -> Path:
        """What a rank printed, in all epochs."""
        return self.directory / f"rank-{rank}.log"

    def last_line(self, rank: int) -> str:
        """The last line of a rank's log that says something; empty without one."""
        try:
            with self.log(rank).open("rb") as file:
                file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        said = (line.strip()[:500] for line in reversed(lines) if not _NOISE.match(line))
        return next(filter(None, said), "")

    def record(self, rank: int) -> Path:
        """What a rank is doing."""
        return self.directory / f"rank-{rank}.record"

    def stacks(self, rank: int) -> Path:
        """Where a rank writes its stacks when it is asked."""
        return self.directory / f"rank-{rank}.stacks"

    def records(self) -> dict[int, Path]:
        """The records there are, by rank."""
        paths = self.directory.glob("rank-*.record")
        return {int(path.stem.removeprefix("rank-")): path for path in sorted(paths)}

    def goodput_records(self) -> dict[int, Path]:
        """Where the time of each rank went, by rank; rank 0's is the run's own."""
        paths = self.directory.glob("rank-*.goodput.jsonl")
        return {int(path.name.split(".")[0].removeprefix("rank-")): path for path in paths}

    def replica_log(self, number: int, rank: int = 0) -> Path:
        """What a replica printed, as often as it was started, in its process of a rank."""
        return self.directory / f"replica-{number}{f'-{rank}' if rank else ''}.log"

    def replica_stacks(self, number: int, rank: int = 0) -> Path:
        """Where a process of a replica writes its stacks when it is asked."""
        return self.directory / f"replica-{number}{f'-{rank}' if rank else ''}.stacks"

    def beside_log(self, role: RoleName, number: int) -> Path:
        """What a sampler or data worker printed, in all its processes."""
        return self.directory / f"{role}-{number}.log"

    def beside_record(self, role: RoleName, number: int) -> Path:
        """What a sampler or data worker is doing."""
        return self.directory / f"{role}-{number}.record"

    def beside_addresses(self, role: RoleName) -> Path:
        """host:port of each sampler or data worker, one per line."""
        return self.directory / f"{role}.addresses"

    def beside_records(self, role: RoleName) -> dict[int, Path]:
        """The records of samplers or data workers that there are, by number."""
        paths = self.directory.glob(f"{role}-*.record")
        return {int(path.stem.removeprefix(f"{role}-")): path for path in sorted(paths)}

    def is_held(self) -> bool:
        """Whether a launch has the directory now."""
        try:
            descriptor = os.open(self.directory / ".lock", os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Make the directory, keep other launches out of it, and forget what one that ended was
        asked for.

        Raises:
          ClusterError: when another launch has it.
          ConfigError: when it cannot be written.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"cannot write the run directory {self.run_dir}: {error.strerror or error}; choose "
                "another with --run-dir, or make this one writable"
            ) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ClusterError(
                    f"{self.run_dir} is in use by another fornax launch; wait for it, stop it, or "
                    "choose another directory with --run-dir"
                ) from error
            for request in get_args(Request):
                self.asked(request)
            yield
        finally:
            os.close(descriptor)
