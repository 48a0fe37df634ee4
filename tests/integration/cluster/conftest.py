"""`fornax launch` as a process of its own, on the small run of the trainer's tests."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.train.conftest import COMMAND, dataset, environment, finish, settings, start

from fornax.config import worker_record
from fornax.config.jsonl import read_json_lines

__all__ = ["Launched", "dataset", "environment", "finish", "settings", "start"]

CHANGES: dict[str, Any] = {
    "mesh": {"data": -1, "fsdp": 1},
    "steps": 24,
    "save_every": 4,
    "eval": {},
    "log": {"tensorboard": False, "every": 1},
}
EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens", "accuracy", "skipped")
SECONDS = 600


@dataclass
class Launched:
    """A launch that runs."""

    process: subprocess.Popen
    run_dir: Path

    def wait_for_step(self, rank: int, step: int) -> int:
        """Until a rank has entered a step; returns its process."""
        path = self.run_dir / "cluster" / f"rank-{rank}.record"
        deadline = time.monotonic() + SECONDS
        while True:
            state = worker_record.read(path)
            if state is not None and state.entered_step >= step:
                return state.pid
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.events()
            time.sleep(0.01)

    def wait_for_epoch(self, epoch: int) -> None:
        """Until a group of that number, or a later one, makes steps."""
        self.wait_for_event(lambda e: e["epoch"] >= epoch and e.get("state") == "running")

    def wait_for_event(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Until there is such an event."""
        deadline = time.monotonic() + SECONDS
        while not any(map(wanted, self.events())):
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.events()
            time.sleep(0.02)

    def wait_for_worker(self, rank: int, epoch: int) -> None:
        """Until the worker of a rank has taken up its record of an epoch."""
        path = self.run_dir / "cluster" / f"rank-{rank}.record"
        deadline = time.monotonic() + SECONDS
        while (state := worker_record.read(path)) is None or (state.epoch, state.pid) < (epoch, 1):
            assert time.monotonic() < deadline, self.events()
            time.sleep(0.01)

    def finish(self, seconds: float = SECONDS) -> tuple[int, str]:
        """Its exit code and what it printed."""
        return self.process.wait(seconds), self.output()

    def output(self) -> str:
        """What it printed so far; a file, so that it never waits for a reader."""
        return self.run_dir.with_suffix(".output").read_text()

    def events(self) -> list[dict[str, Any]]:
        """All events."""
        return read_json_lines(self.run_dir / "events.jsonl")

    def states(self) -> list[str]:
        """The states that it went through, repeated ones once."""
        states = [e["state"] for e in self.events() if "state" in e]
        return [s for n, s in enumerate(states) if n == 0 or s != states[n - 1]]

    def faults(self) -> list[tuple[str, int]]:
        """What was at fault, as it was torn down."""
        return [(e["kind"], e["rank"]) for e in self.events() if e.get("state") == "teardown"]

    def exact(self) -> list[tuple]:
        """The numbers of every step that must not depend on faults."""
        records = read_json_lines(self.run_dir / "metrics.jsonl")
        return [tuple(record.get(name) for name in EXACT) for record in records]

    def descendants(self) -> set[int]:
        """The processes that were started for this run and still are there."""
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "environ").read_bytes()
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                except OSError:
                    continue
                if f"FORNAX_TEST_RUN={self.run_dir}".encode() in words and state != "Z":
                    found.add(int(entry.name))
        return found


Launch = Callable[..., Launched]


@pytest.fixture
def launch(
    environment: dict[str, str], settings: dict[str, Any], tmp_path: Path
) -> Iterator[Launch]:
    """Start `fornax launch`, or a script with the hosts, the run directory and the config as its
    arguments; `words` end those of the run; other keyword arguments change its settings."""
    started: list[Launched] = []

    def begin(
        name: str = "run",
        hosts: int = 2,
        flags: Sequence[str] = (),
        env: dict[str, str] | None = None,
        script: str = "",
        words: Sequence[str] = (),
        **changes: Any,
    ) -> Launched:
        file, run_dir = tmp_path / f"{name}.yaml", tmp_path / name
        file.write_text(yaml.safe_dump({**settings, **CHANGES, **changes}))
        command = ["launch", "--hosts", str(hosts), *flags, "--", "train"]
        command += ["--config", str(file), "--run-dir", str(run_dir), *words]
        if script:
            command = [str(hosts), str(run_dir), str(file), *words]
        variables = {**environment, "JAX_PLATFORMS": "cpu", "FORNAX_TEST_RUN": str(run_dir)}
        with run_dir.with_suffix(".output").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", script or COMMAND, *command],
                env={**variables, **(env or {})},
                stdout=output,
                stderr=output,
            )
        started.append(Launched(process, run_dir))
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()
        for pid in each.descendants():
            os.kill(pid, signal.SIGKILL)
        each.process.wait()


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A home directory and one for temporary files, in which nothing may be left; nor may memory
    that processes shared. Caches stay."""
    home, temporary = tmp_path / "home", Path(f"/tmp/fornax-test-{os.getpid()}")
    home.mkdir()
    temporary.mkdir()  # Ray's sockets need a short path
    before = set(os.listdir("/dev/shm"))
    yield {"HOME": str(home), "TMPDIR": str(temporary)}
    kept = {home / ".cache", home / ".config"}  # the second is matplotlib's, empty
    left = [*temporary.iterdir(), *(p for p in home.iterdir() if p not in kept)]
    left += [each for each in (home / ".config").rglob("*") if each.is_file()]
    shutil.rmtree(temporary)
    assert not left
    deadline = time.monotonic() + SECONDS  # other programs of this machine share memory for a while
    while found := set(os.listdir("/dev/shm")) - before:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


@pytest.fixture(scope="session")
def undisturbed(
    environment: dict[str, str], settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple]:
    """The numbers of a run on two hosts that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "run.yaml").write_text(yaml.safe_dump({**settings, **CHANGES}))
    words = ["launch", "--hosts", "2", "--no-spares", "--", "train"]
    words += ["--config", str(folder / "run.yaml"), "--run-dir", str(folder / "run")]
    variables = {**environment, "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND, *words],
        env=variables,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    records = [json.loads(x) for x in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, CHANGES["steps"] + 1))
    return [tuple(record.get(name) for name in EXACT) for record in records]
