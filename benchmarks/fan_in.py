"""What one controller takes: messages, bytes and processor time for each host that it watches.

Real agents and a real controller, over the sockets that they always use, on this machine; the
workers make steps without arrays, so that many of them fit. Measured once all of them make steps:

    python benchmarks/fan_in.py [--hosts 4 16 64] [--step 1.0] [--seconds 15]
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from _harness import machine, table, write_results
from fornax.cluster.beside_process import BesideJob, BesideProcess
from fornax.cluster.controller import Controller, Job
from fornax.cluster.files import ClusterFiles
from fornax.cluster.local import AgentProcess, LocalLauncher
from fornax.config import worker_record
from fornax.config.credentials import Credentials
from fornax.config.jsonl import read_json_lines

PATIENCE = 300
HEAD = (
    "hosts",
    "messages/s a host",
    "bytes/s a host",
    "controller, of one core",
    "us a message",
    "agent, of one core",
)


def work(words: Sequence[str]) -> int:
    """A worker: steps that take their time, until the file that the arguments name exists."""
    end, seconds = Path(words[0]), float(words[1])
    record = worker_record.current()
    assert record is not None
    step = 0
    while not end.exists():
        step += 1
        record.change("wait_for_data", step)
        record.change("step", step)
        time.sleep(seconds)
    return 0


@dataclass
class Tally:
    """What came to the controller."""

    messages: int = 0
    size: int = 0


class Counted:
    """An agent's process, its messages counted."""

    def __init__(self, agent: AgentProcess, tally: Tally) -> None:
        self._agent, self._tally = agent, tally

    @property
    def connection(self) -> Connection:
        return self._agent.connection

    def send(self, message: object) -> None:
        self._agent.send(message)

    def receive(self, seconds: float | None = None) -> object:
        message = self._agent.receive(seconds)
        self._tally.messages += 1
        self._tally.size += len(json.dumps(message))
        return message

    def kill(self) -> int:
        return self._agent.kill()


class CountingLauncher:
    """Starts agents as `fornax launch` does on this machine."""

    def __init__(self, inner: LocalLauncher, tally: Tally) -> None:
        self._inner, self._tally = inner, tally

    @property
    def address(self) -> str:
        return self._inner.address

    @property
    def credentials(self) -> Credentials:
        return self._inner.credentials

    def capacity(self) -> int:
        return self._inner.capacity()

    def start(self, ranks: Sequence[int]) -> Mapping[int, AgentProcess]:
        started = self._inner.start(ranks)
        return {rank: Counted(agent, self._tally) for rank, agent in started.items()}

    def start_beside(self, job: BesideJob) -> BesideProcess:
        return self._inner.start_beside(job)


def processor_seconds(pids: Iterable[int]) -> float:
    """User and system time of some processes."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def measure(hosts: int, step: float, seconds: float) -> list[str]:
    """A row: messages and bytes per second and processor time, for each host."""
    with tempfile.TemporaryDirectory() as name:
        folder, tally = Path(name), Tally()
        files = ClusterFiles(folder / "run")
        files.directory.mkdir(parents=True)
        end = folder / "end"
        job = Job(hosts=hosts, program="fan_in:work", words=(str(end), str(step)))
        launcher = LocalLauncher(files=files, spare=False, imports=())
        controller = Controller(
            job, files, CountingLauncher(launcher, tally), announce=lambda line: None
        )
        thread = threading.Thread(target=controller.run, daemon=True)
        thread.start()
        deadline = time.monotonic() + PATIENCE
        while not any("step" in e for e in read_json_lines(files.events)):
            if time.monotonic() > deadline or not thread.is_alive():
                raise SystemExit(f"{hosts} hosts do not come to train: {files.events.read_text()}")
            time.sleep(0.1)
        time.sleep(2)
        agents = children(os.getpid())
        before = (time.monotonic(), time.process_time(), processor_seconds(agents))
        counted = Tally(tally.messages, tally.size)
        time.sleep(seconds)
        after = (time.monotonic(), time.process_time(), processor_seconds(agents))
        wall, own, theirs = (b - a for a, b in zip(before, after, strict=True))
        messages, size = tally.messages - counted.messages, tally.size - counted.size
        end.touch()
        thread.join(PATIENCE)
    each = hosts * wall
    return [
        str(hosts),
        f"{messages / each:.2f}",
        f"{size / each:.0f}",
        f"{own / wall:.2%}",
        f"{own / messages * 1e6:.0f}",
        f"{theirs / each:.2%}",
    ]


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--step", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    rows = [measure(hosts, given.step, given.seconds) for hosts in given.hosts]
    text = "\n".join(
        [
            "# Fan-in of a controller",
            "",
            f"{machine()}; Python {sys.version.split()[0]}; steps of {given.step:g} s; load "
            f"{os.getloadavg()[0]:.1f}",
            "",
            table(HEAD, rows),
            "",
        ]
    )
    print(text)
    write_results("fan_in", text)


if __name__ == "__main__":
    main()
