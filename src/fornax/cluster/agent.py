"""The agent of a host, a process that outlives its workers: starts, watches and ends them.

It reports how its worker fares, seen from outside: from the worker's record and from the kernel.
A worker that lost another one leaves its group and waits, in its process, for the next assignment;
for one that ended a spare process, its imports done, takes over.
"""

import contextlib
import os
import queue
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fornax.cluster.credentials import Credentials, own_address
from fornax.cluster.files import ClusterFiles
from fornax.cluster.messages import CLEAN, Assignment, Observation, decode, encode
from fornax.cluster.peer_memory import PeerMemory, memory_files
from fornax.config import worker_record
from fornax.config.jsonl import append_json_line
from fornax.config.worker_process import WorkerProcess, receive, send
from fornax.config.worker_record import WorkerState

__all__ = ["Agent", "run"]

_TICK_SECONDS = 0.03
_REPORT_SECONDS = 0.25
_ALIVE_SECONDS = 1.0
_STACK_SECONDS = 0.5


def run(controller: Connection) -> None:
    """The agent's process: does what the controller says until it says `end`, or is no more."""
    setup = receive(controller)
    files = ClusterFiles(Path(setup["run_dir"]))
    agent = Agent(files, setup["rank"], imports=setup["imports"], spare=setup["spare"])
    signal.signal(signal.SIGTERM, lambda number, frame: agent.preempt())
    sent_at = asked_at = 0.0
    sent: Observation | None = None
    waiting: deque[dict[str, object]] = deque()
    try:
        while True:
            while controller.poll(_TICK_SECONDS):
                message = receive(controller)
                if message["kind"] == "end":
                    return
                waiting += agent.obey(message)
            waiting += agent.advance()
            agent.fence()
            seen, now = agent.observe(), time.monotonic()
            if now - asked_at > _ALIVE_SECONDS and _has_room(controller):
                send(controller, {"kind": "alive", "at": now})
                asked_at = now
            while waiting and _has_room(controller):
                send(controller, waiting.popleft())
            due = now - sent_at > _REPORT_SECONDS
            if seen is not None and (due or _differs(seen, sent)) and _has_room(controller):
                send(controller, encode("observation", seen))
                sent_at, sent = now, seen
            agent.prepare()
    finally:
        agent.close()


def _has_room(connection: Connection) -> bool:
    """Whether a message can be sent without waiting for whoever reads: an agent must not hang."""
    return bool(select.select([], [connection], [], 0)[1])


def _differs(seen: Observation, sent: Observation | None) -> bool:
    if sent is None:
        return True
    same = replace(seen, silent=sent.silent, unchanged=sent.unchanged, stopped=sent.stopped)
    return same != sent or (seen.stopped > 0) != (sent.stopped > 0)


class Agent:
    """One host's worker and its spare."""

    def __init__(
        self, files: ClusterFiles, rank: int, *, imports: Sequence[str], spare: bool
    ) -> None:
        """Start nothing yet.

        Args:
          files: where logs, records and stacks go.
          rank: which of the run's hosts this is.
          imports: modules that a worker imports before it has an assignment.
          spare: whether to keep such a process for the next assignment.
        """
        self._files = files
        self._rank = rank
        self._imports = list(imports)
        self._keeps_spare = spare
        self._spare: WorkerProcess | None = None
        self._worker: WorkerProcess | None = None
        self._job: Assignment | None = None
        self._kernel = _Kernel()
        self._waits = False
        self._first_step = self._newest_step = 0
        self._left = self._saved = self._preempted = self._fenced = False
        self._lease_until = 0.0
        self._leave_by: float | None = None
        self._memory = memory_files("fornax")
        self._peers: PeerMemory | None = None
        self._reports: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        self._programs = os.memfd_create("fornax-programs") if self._memory else None
        self._helper: WorkerProcess | None = None
        self._made_for: set[int] = set()

    def obey(self, message: Mapping[str, Any]) -> list[dict[str, object]]:
        """Do what a message says; returns the answers to send."""
        match message["kind"]:
            case "listen" if self._memory:
                self._peers = PeerMemory(
                    self._rank,
                    self._memory,
                    credentials=Credentials(**message["credentials"]),
                    report=self._reports.put,
                    host=own_address(message["towards"]),
                )
                return [{"kind": "listening", "address": self._peers.address}]
            case "peers" if self._peers is not None:
                addresses = {int(rank): each for rank, each in message["addresses"].items()}
                self._peers.connect(addresses, message["hosts"])
            case "start":
                self.start(decode(Assignment, message))
            case "signal" if self._worker is not None and self._worker.poll() is None:
                os.kill(self._worker.pid, message["number"])
            case "lease":
                self._extend(message["at"])
            case "preempt":
                self.preempt()
            case "leave":
                self._leave_by = time.monotonic() + message["seconds"]
            case "stacks":
                return [{"kind": "stacks", "text": self.stacks()}]
        return []

    def preempt(self) -> None:
        """The host is to go: all finish the step and save, as after SIGTERM to the worker."""
        self._preempted = True
        if self._worker is not None and self._worker.poll() is None:
            os.kill(self._worker.pid, signal.SIGTERM)

    def _extend(self, at: float) -> None:
        """The controller answered what this said at `at`: it counts the worker in from then on."""
        if self._job is not None:
            self._lease_until = max(self._lease_until, at + self._job.lease)

    def fence(self) -> None:
        """End a worker that the controller may have replaced: it does not answer for too long."""
        worker = self._worker
        if worker is None or self._left or worker.poll() is not None:
            return
        if time.monotonic() > self._lease_until:
            self._fenced = True
            os.killpg(worker.pid, signal.SIGKILL)

    def advance(self) -> list[dict[str, object]]:
        """Let the worker begin with what was fetched for it, leave its group, or end it when its
        time is up; returns what to send."""
        if self._waits and not (self._peers is not None and self._peers.fetching):
            self._begin()
        reports = []
        with contextlib.suppress(queue.Empty):
            while True:
                reports.append(self._reports.get_nowait())
        return reports + self._leaving()

    def _leaving(self) -> list[dict[str, object]]:
        worker = self._worker
        if worker is not None and not self._left and worker.connection.poll():
            with contextlib.suppress(EOFError, TimeoutError):
                message = worker.receive(0)
                self._left, self._saved = message["kind"] == "left", message["code"] in CLEAN
        if self._leave_by is None:
            return []
        free = self._left and worker is not None and worker.poll() is None
        if not free:
            if worker is not None and worker.poll() is None and time.monotonic() < self._leave_by:
                return []
            self.kill()
        self._leave_by = None
        return [{"kind": "left", "free": free}]

    def start(self, job: Assignment) -> None:
        """Let the worker that left, the spare or a new process be the worker `job` describes."""
        if not self._left or self._worker is None or self._worker.poll() is not None:
            self.kill()
            if self._spare is None or self._spare.poll() is not None:
                self._spare = self._process()
            self._worker, self._spare = self._spare, None
        self._stop_helper()  # what is idle no more
        self._job, self._left, self._leave_by = job, False, None
        self._fenced = False
        self._extend(time.monotonic())
        self._kernel, self._first_step, self._newest_step = _Kernel(), 0, 0
        worker_record.create(
            self._files.record(job.rank), rank=job.rank, hosts=job.hosts, epoch=job.epoch
        )
        if self._peers is not None and job.holders:
            self._waits = True
            self._peers.fetch(job.holders)
        else:
            self._begin()

    def _begin(self) -> None:
        """Give the worker its assignment."""
        job, self._waits = self._job, False
        if job is None or self._worker is None:
            return
        record, stacks = self._files.record(job.rank), self._files.stacks(job.rank)
        self._worker.send(
            {
                "program": job.program,
                "words": job.words,
                "stacks": str(stacks),
                "environment": {
                    "FORNAX_EPOCH": str(job.epoch),
                    "FORNAX_COORDINATOR": job.coordinator,
                    "FORNAX_NUM_PROCESSES": str(job.hosts),
                    "FORNAX_PROCESS_ID": str(job.rank),
                    "FORNAX_WORKER_RECORD": str(record),
                    "FORNAX_SNAPSHOT_MEMORY": ":".join(
                        self._path(number) for number in self._memory
                    ),
                    "FORNAX_SNAPSHOT_MTBF": str(job.mtbf),
                    "FORNAX_PROGRAM_MEMORY": self._path(self._programs),
                    **job.environment,
                },
            }
        )

    @staticmethod
    def _path(number: int | None) -> str:
        """Where other processes find a file of this one; nowhere without one."""
        return "" if number is None else f"/proc/{os.getpid()}/fd/{number}"

    def kill(self) -> None:
        """End the worker, if there is one, and whatever it started."""
        if self._worker is not None:
            self._worker.kill()
        self._worker = self._job = None
        self._left = False

    def close(self) -> None:
        """End worker and spare, and remove the record and the memory."""
        self.kill()
        if self._peers is not None:
            self._peers.close()
        if self._spare is not None:
            self._spare.kill()
        self._files.record(self._rank).unlink(missing_ok=True)
        self._stop_helper()
        while self._memory:
            os.close(self._memory.pop())
        if self._programs is not None:
            os.close(self._programs)
            self._programs = None

    def prepare(self) -> None:
        """Start a spare once the worker has made a step, so that both do not start at once; then
        have rank 0's host make the programs for a group with a host less."""
        made = self._newest_step > self._first_step
        if not self._keeps_spare or not made or self._job is None:
            return
        if self._spare is None:
            self._spare = self._process()
            return
        fewer = self._job.hosts - 1
        if self._job.rank or not fewer or fewer in self._made_for or self._programs is None:
            return
        if not os.fstat(self._programs).st_size:  # no program of this run is shared
            return
        if self._helper is None:
            with self._files.services.open("ab") as log:
                self._helper = WorkerProcess("fornax.cluster.precompile:run", log=log)
            self._helper.send({"memory": self._path(self._programs), "hosts": fewer})
        elif self._helper.poll() is not None or self._helper.connection.poll():
            self._made_for.add(fewer)
            self._note_made(self._helper, self._job.epoch, fewer)
            self._stop_helper()

    def _note_made(self, helper: WorkerProcess, epoch: int, hosts: int) -> None:
        try:
            names, seconds = helper.receive(0)
            how = f"made ahead for {hosts} of the hosts"
        except (EOFError, TimeoutError):
            names, seconds, how = ["step"], 0.0, "not made ahead, see agents.log; it failed"
        if not names:  # a run whose programs no other process can make
            return
        program = " and ".join(names)
        event = {"epoch": epoch, "program": program, "how": how, "seconds": round(seconds, 3)}
        with contextlib.suppress(OSError):
            append_json_line(self._files.events, event)

    def _stop_helper(self) -> None:
        if self._helper is not None:
            self._helper.kill()
            self._helper = None

    def observe(self) -> Observation | None:
        """How the worker fares; None where there is none."""
        if self._worker is None or self._job is None:
            return None
        pid, now = self._worker.pid, time.monotonic_ns()
        record = worker_record.read(self._files.record(self._job.rank))
        self._kernel.look(pid, record)
        known = Observation(
            epoch=self._job.epoch,
            rank=self._job.rank,
            host=socket.gethostname(),
            pid=pid,
            agent_pid=os.getpid(),
            code=128 + signal.SIGTERM if self._left and self._saved else self._worker.poll(),
            left=self._left,
            preempted=self._preempted,
            fenced=self._fenced,
            stopped=self._kernel.stopped,
        )
        if record is None:
            return known
        if record.entered_step > 0:
            self._newest_step = record.entered_step
            self._first_step = self._first_step or self._newest_step
        return replace(
            known,
            silent=(now - record.beat_ns) / 1e9 if record.pid else 0.0,
            unchanged=(now - record.changed_ns) / 1e9,
            changed_at=record.changed_at,
            step=record.step,
            phase=record.phase,
            entered_step=record.entered_step,
            entered_ns=record.entered_ns,
            data_seconds=record.data_ns / 1e9,
            code_seconds=record.code_ns / 1e9,
            program_seconds=record.busy_ns / 1e9 + self._kernel.taken,
            unsaved=record.unsaved,
        )

    def stacks(self) -> str:
        """The Python stacks of the worker's threads; empty when it cannot write them."""
        if self._worker is None or self._job is None:
            return ""
        path = self._files.stacks(self._job.rank)
        if not path.exists():  # the worker has not installed the handler: the signal would end it
            return ""
        os.kill(self._worker.pid, signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        return path.read_text(encoding="utf-8", errors="replace")

    def _process(self) -> WorkerProcess:
        with self._files.log(self._rank).open("ab") as log:
            worker = WorkerProcess("fornax.cluster.worker:run", log=log)
        worker.send(self._imports)
        return worker


class _Kernel:
    """What the kernel does with a worker's process, where it tells (Linux)."""

    def __init__(self) -> None:
        self.stopped = 0.0
        """For how long the process has been held by SIGSTOP, in seconds."""
        self.taken = 0.0
        """Seconds, up to the step that it entered last, for which a program of the devices could
        not run: the process was held, or its main thread waited for a processor."""
        self._taken = self._delay = 0.0
        self._entered = -1
        self._looked_at = time.monotonic()
        self._stopped_at: int | None = None

    def look(self, pid: int, record: WorkerState | None) -> None:
        """Look at a process, many times a second."""
        now, delay, held = time.monotonic(), _delay(pid), is_stopped(pid)
        if not held:
            self._stopped_at = None
        elif self._stopped_at is None or (record and record.beat_ns > self._stopped_at):
            self._stopped_at = time.monotonic_ns()  # or it ran since, and was stopped again
        since = self._stopped_at
        self.stopped = 0.0 if since is None else max((time.monotonic_ns() - since) / 1e9, 1e-3)
        if record is not None:
            if record.in_program:
                self._taken += delay - self._delay + (now - self._looked_at if held else 0.0)
            if record.entered_step != self._entered:
                self._entered, self.taken = record.entered_step, self._taken
        self._looked_at, self._delay = now, delay


def _delay(pid: int) -> float:
    """For how long the main thread of a process has waited for a processor, in seconds."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal, where the system tells (Linux)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in ("T", "t")
