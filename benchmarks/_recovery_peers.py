"""From a fault to the next step: a launched run, and Ray Train's JaxTrainer beside it.

Both train a decoder of one size on as many processes of this machine. A fault is a signal to a
worker, or the end of an emulated node with all that runs there; what counts is the time from then
to the end of the first step that the new group makes.
"""

import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from fornax.cluster import drill, read_events
from fornax.config import worker_record
from fornax.config.jsonl import read_json_lines

SECONDS = 900
STEADY_STEPS = 60
SAVE_EVERY = 50
"""Steps between checkpoints on disk, of both."""
PEERS = Path(__file__).parent / "peers"

Kind = Literal["kill", "stop", "node"]
Fault = tuple[Kind, int]
HOSTS = 2
FAULTS: tuple[Fault, ...] = (("kill", 1), ("kill", 0), ("stop", 1))
NODE: Fault = ("node", 1)
"""An elastic run loses a node, and continues with one host less."""
_SIGNALS: Mapping[str, signal.Signals] = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Recovered:
    """How one fault went."""

    seconds: float
    """Until the end of the first step of the new group."""
    again: int
    """Steps that were done a second time."""
    named: float | None = None
    """Seconds until an event named it."""


@dataclass
class Recoveries:
    """All faults of one contestant."""

    found: dict[Fault, list[Recovered]] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    """Seconds of an undisturbed step."""

    def take(self, run: "Disturbed", fault: Fault) -> None:
        """Disturb a run once it is steady."""
        self.steps.append(run.steady())
        self.found.setdefault(fault, []).append(run.disturb(*fault))

    def median(self, fault: Fault) -> float:
        """Of the seconds until the next step."""
        return statistics.median(each.seconds for each in self.found[fault])


class Disturbed(Protocol):
    """A run to disturb."""

    def steady(self) -> float:
        """Wait until all ranks step; seconds of a step."""
        ...

    def disturb(self, kind: Kind, rank: int) -> Recovered:
        """Inject a fault, and wait until it is recovered."""
        ...


def until(condition: Callable[[], Any], process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait for something of a run."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > deadline:
            raise SystemExit("the run ended, or makes no progress")
        time.sleep(0.02 if process is not None else 0.002)


class Ours:
    """A run of `fornax launch`."""

    def __init__(self, folder: Path, config: Mapping[str, Any], flags: list[str]) -> None:
        """Start it; `flags` are those of the launch."""
        self._run = folder / "run"
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(dict(config)))
        words = [sys.executable, "-m", "fornax", "launch", *flags, "--mtbf", "60s", "--", "train"]
        words += ["--config", str(file), "--run-dir", str(self._run)]
        with (folder / "output").open("wb") as output:
            self._process = subprocess.Popen(words, stdout=output, stderr=output)

    def close(self) -> None:
        """Save and end."""
        self._process.terminate()
        self._process.wait(SECONDS)

    def steady(self) -> float:
        """See `Disturbed`."""

        def done() -> int:
            state = self._state(0)
            starts = [e["step"] for e in self._lines() if "step" in e and "state" in e]
            return state.entered_step - starts[-1] if state is not None and starts else 0

        until(lambda: done() > STEADY_STEPS // 2, self._process)
        begun, at = done(), time.monotonic()
        until(lambda: done() > begun + STEADY_STEPS // 2, self._process)
        return (time.monotonic() - at) / (done() - begun)

    def disturb(self, kind: Kind, rank: int) -> Recovered:
        """See `Disturbed`."""
        epoch, state = read_events(self._run)[-1]["epoch"], self._state(rank)
        assert state is not None
        at = time.time()
        if kind == "node":
            end_node(state.pid)
        else:
            drill(self._run, kind, rank)

        def after(name: str) -> list[dict[str, Any]]:
            found = [e for e in read_events(self._run) if e.get("state") == name]
            return [e for e in found if e["time"] >= at]

        until(lambda: [e for e in after("running") if e["epoch"] > epoch], self._process)
        running = next(e for e in after("running") if e["epoch"] > epoch)

        def stepped() -> bool:
            now = self._state(0)
            return now is not None and now.epoch > epoch and now.entered_step > running["step"]

        until(stepped, self._process)
        return Recovered(
            seconds=time.time() - at,
            again=max(0, state.entered_step - running["step"]),
            named=after("teardown")[0]["time"] - at,
        )

    def _state(self, rank: int) -> worker_record.WorkerState | None:
        return worker_record.read(self._run / "cluster" / f"rank-{rank}.record")

    def _lines(self) -> list[dict[str, Any]]:
        return read_json_lines(self._run / "events.jsonl")


class RayTrain:
    """A run of Ray Train's; see `peers/recover_ray_train.py`."""

    def __init__(
        self,
        python: Path,
        folder: Path,
        config: Mapping[str, Any],
        address: str,
        least: int,
    ) -> None:
        """Start it on a cluster of its own; with so many workers at least."""
        self._folder = folder
        words = [str(python), str(PEERS / "recover_ray_train.py"), "--folder", str(folder)]
        words += ["--settings", json.dumps(config), "--address", address]
        words += ["--hosts", str(HOSTS), "--least", str(least)]
        with (folder / "output").open("wb") as output:
            self._process = subprocess.Popen(words, stdout=output, stderr=output)

    def close(self) -> None:
        """End it; its workers end with the cluster."""
        self._process.kill()
        self._process.wait()

    def steady(self) -> float:
        """See `Disturbed`."""

        def done() -> list[dict[str, Any]]:
            latest = self._latest()
            if len(latest) < HOSTS or not all(_lives(each["pid"]) for each in latest):
                return []
            return [each for each in self._steps(0) if each["pid"] == latest[0]["pid"]]

        until(lambda: len(done()) > STEADY_STEPS, self._process)
        times = [each["time"] for each in done()[-STEADY_STEPS // 2 :]]
        return (times[-1] - times[0]) / (len(times) - 1)

    def disturb(self, kind: Kind, rank: int) -> Recovered:
        """See `Disturbed`."""
        latest = self._latest()
        pids, done = {each["pid"] for each in latest}, latest[0]["step"]
        at = time.time()
        if kind == "node":
            end_node(latest[rank]["pid"])
        else:
            os.kill(latest[rank]["pid"], _SIGNALS[kind])

        def new() -> dict[str, Any] | None:
            return next(
                (e for e in self._steps(0) if e["time"] > at and e["pid"] not in pids), None
            )

        until(new, self._process)
        first = new()
        assert first is not None
        return Recovered(seconds=first["time"] - at, again=max(0, done + 1 - first["step"]))

    def _steps(self, rank: int) -> list[dict[str, Any]]:
        path = self._folder / f"rank-{rank}.steps"
        return read_json_lines(path) if path.exists() else []

    def _latest(self) -> list[dict[str, Any]]:
        """The newest step of each rank that has made one."""
        found = (self._steps(rank) for rank in range(HOSTS))
        return [steps[-1] for steps in found if steps]


@contextlib.contextmanager
def nodes(python: Path | str, count: int, processors: int) -> Iterator[str]:
    """A Ray cluster of emulated nodes, its clients with a token; its address."""
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    before = {name: os.environ.get(name) for name in secret}
    os.environ.update(secret)
    words = [str(python), str(PEERS / "_ray_nodes.py"), str(count), str(processors)]
    cluster = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert cluster.stdout is not None
    try:
        if not (address := cluster.stdout.readline().strip()):
            raise SystemExit("Ray's nodes did not start")
        yield address
    finally:
        cluster.communicate(timeout=SECONDS)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def end_node(pid: int) -> None:
    """End the node of Ray's on which a process runs, and all that runs there, at once."""
    while "raylet" not in Path(f"/proc/{pid}/comm").read_text():
        pid = parent(pid)
    of_node, found = {pid}, [pid]
    while found:
        found = [each for each in _processes() if parent(each) in found and each not in of_node]
        of_node |= set(found)
    for each in sorted(of_node):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def parent(pid: int) -> int:
    """The process that started another one; 0 where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def measure(
    folder: Path, config: Mapping[str, Any], rounds: int, peer: Path
) -> tuple[Recoveries, Recoveries]:
    """The faults of a launched run and, with the Python `peer`, of Ray Train's."""
    ours, theirs, fewer = Recoveries(), Recoveries(), HOSTS - 1
    for number in range(rounds):
        here = folder / str(number)
        for name in ("ours", "ours-node", "ray", "ray-node"):
            (here / name).mkdir(parents=True)
        with contextlib.closing(Ours(here / "ours", config, ["--hosts", str(HOSTS)])) as run:
            for fault in FAULTS:
                ours.take(run, fault)
        with (
            nodes(peer, 1, 2 * HOSTS) as address,
            contextlib.closing(RayTrain(peer, here / "ray", config, address, HOSTS)) as run,
        ):
            for fault in FAULTS:
                theirs.take(run, fault)
        with nodes(sys.executable, HOSTS, 1) as address:
            flags = ["--engine", "ray", "--address", address, "--hosts", f"{fewer}..{HOSTS}"]
            with contextlib.closing(Ours(here / "ours-node", config, flags)) as run:
                ours.take(run, NODE)
        with (
            nodes(peer, HOSTS, 1) as address,
            contextlib.closing(RayTrain(peer, here / "ray-node", config, address, fewer)) as run,
        ):
            theirs.take(run, NODE)
    return ours, theirs


HEADER = (
    *("fault", "named after, s", "a step made after, s", "steps done again"),
    *("Ray Train: a step made after, s", "steps done again", "ratio"),
)


def rows(ours: Recoveries, theirs: Recoveries) -> list[list[object]]:
    """Of the table: medians of times, the most of steps."""
    found: list[list[object]] = []
    for fault, each in ours.found.items():
        mine, other = ours.median(fault), theirs.median(fault)
        named = statistics.median(e.named for e in each if e.named is not None)
        again = [max(e.again for e in of.found[fault]) for of in (ours, theirs)]
        row = [" ".join(map(str, fault)), f"{named:.1f}", f"{mine:.1f}", again[0]]
        found.append([*row, f"{other:.1f}", again[1], f"{other / mine:.1f}"])
    return found


def steps(ours: Recoveries, theirs: Recoveries) -> str:
    """How long steps take, in a sentence."""
    mine, other = (1e3 * statistics.median(each.steps) for each in (ours, theirs))
    return (
        f"An undisturbed step takes {mine:.1f} ms, of Ray Train's loop {other:.1f} ms "
        f"({mine / other:.2f} of it)."
    )
