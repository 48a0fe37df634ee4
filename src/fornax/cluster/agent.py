"""The agent of a host, a process that outlives its workers: starts, watches and ends them.

It reports how its worker fares, seen from outside: from the worker's record and from the kernel.
It sleeps until something is said to it, its worker ends, or a look is due. A worker that lost
another one leaves its group and waits, in its process, for the next assignment; for one that ended
a spare process, its imports done, takes over.
"""

import contextlib
import os
import queue
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fornax.cluster import stacks
from fornax.cluster.files import ClusterFiles
from fornax.cluster.kept_memory import adopt, memory_files, name_of, path_of, whole_steps
from fornax.cluster.local_checkpoints import LocalCheckpoints
from fornax.cluster.messages import CLEAN, Assignment, Observation, decode, encode
from fornax.cluster.peer_memory import PeerMemory
from fornax.cluster.process_state import ProcessState, is_stopped
from fornax.config import worker_record
from fornax.config.addresses import is_loopback, own_address
from fornax.config.allocation import training_memory
from fornax.config.credentials import Credentials
from fornax.config.jsonl import append_json_line
from fornax.config.worker_process import WorkerProcess, has_room, receive, send
from fornax.config.worker_record import RecordReader, WorkerState

__all__ = ["Agent", "run"]

_LOOK_SECONDS = 0.15
_SOON_SECONDS = 0.03
_REPORT_SECONDS = 0.25
_ALIVE_SECONDS = 1.0


def run(controller: Connection) -> None:
    """The agent's process: does what the controller says until it says `end`, or is gone."""
    setup = receive(controller)
    files = ClusterFiles(Path(setup["run_dir"]))
    agent = Agent(
        files,
        setup["rank"],
        place=setup["place"],
        imports=setup["imports"],
        spare=setup["spare"],
    )
    signal.signal(signal.SIGTERM, lambda number, frame: agent.preempt())
    sent_at = asked_at = 0.0
    sent: Observation | None = None
    waiting: deque[dict[str, object]] = deque()
    agent.wakes.register(controller, selectors.EVENT_READ)
    try:
        while True:
            ready = [key.fileobj for key, _ in agent.wakes.select(agent.pause)]
            while controller in ready and controller.poll():
                message = receive(controller)
                if message["kind"] == "end":
                    return
                waiting += agent.obey(message)
            waiting += agent.advance(ready)
            agent.fence()
            seen, now = agent.observe(), time.monotonic()
            if now - asked_at > _ALIVE_SECONDS and has_room(controller):
                send(controller, {"kind": "alive", "at": now})
                asked_at = now
            while waiting and has_room(controller):
                send(controller, waiting.popleft())
            due = now - sent_at > _REPORT_SECONDS
            if seen is not None and (due or _is_news(seen, sent)) and has_room(controller):
                send(controller, encode("observation", seen))
                sent_at, sent = now, seen
            agent.prepare()
    finally:
        agent.close()


def _is_news(seen: Observation, sent: Observation | None) -> bool:
    """Whether more has changed than the step, which is reported a few times a second."""
    return sent is None or _matters(seen) != _matters(sent)


def _matters(seen: Observation) -> tuple[object, ...]:
    flags = seen.left, seen.preempted, seen.fenced, seen.stopped > 0, seen.entered_step >= 0
    return seen.epoch, seen.pid, seen.code, seen.unsaved, seen.kept, *flags


class Agent:
    """One host's worker and its spare."""

    def __init__(
        self, files: ClusterFiles, rank: int, *, place: int, imports: Sequence[str], spare: bool
    ) -> None:
        """Start nothing yet.

        Args:
          files: where logs, records and stacks go.
          rank: which of the run's hosts this is.
          place: which of the hosts that one machine plays, from 0.
          imports: modules that a worker imports before it has an assignment.
          spare: whether to keep such a process for the next assignment.
        """
        self._files = files
        self._rank, self._place, self._host = rank, place, socket.gethostname()
        self._imports = list(imports)
        self._keeps_spare = spare
        self._spare: WorkerProcess | None = None
        self._worker: WorkerProcess | None = None
        self._job: Assignment | None = None
        self._process_state: ProcessState | None = None
        self._record: RecordReader | None = None
        self._ended: int | None = None
        self.wakes = selectors.DefaultSelector()
        """What the agent sleeps on: its owner's connection, which that adds, and the worker."""
        self._waits = self._tells_ready = False
        self._first_step = self._newest_step = 0
        self._left = self._saved = self._preempted = self._fenced = False
        self._lease_until = 0.0
        self._leave_by: float | None = None
        self._memory = memory_files("fornax")
        self._peers: PeerMemory | None = None
        self._local: LocalCheckpoints | None = None
        self._beside_launch = False
        self._reports: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        self._programs = os.memfd_create("fornax-programs") if self._memory else None
        self._helper: WorkerProcess | None = None
        self._made_for: set[int] = set()

    def obey(self, message: Mapping[str, Any]) -> list[dict[str, object]]:
        """Do what a message says; returns the answers to send."""
        match message["kind"]:
            case "listen" if self._memory:
                return self._listen(message)
            case "peers" if self._peers is not None:
                addresses = {int(rank): each for rank, each in message["addresses"].items()}
                self._peers.connect(addresses, message["hosts"])
            case "start":
                self.start(decode(Assignment, message))
                return self._has()
            case "signal":
                self._ask_to_stop(message["number"])
            case "lease":
                self._extend(message["at"])
            case "spare":
                self._tells_ready = True
                self._spare = self._spare or self._process()
            case "depart" if self._job is not None:
                worker_record.ask_to_keep(self._files.record(self._job.rank))
                self._ask_to_stop(signal.SIGTERM)
            case "leave":
                self._leave_by = time.monotonic() + message["seconds"]
                if self._job is not None:
                    worker_record.ask_to_leave(self._files.record(self._job.rank))
            case "stacks":
                text, why_not = self.stacks()
                return [{"kind": "stacks", "text": text, "why_not": why_not}]
        return []

    def _listen(self, message: Mapping[str, Any]) -> list[dict[str, object]]:
        """Take up the memory that an earlier agent of this rank left, and listen for others."""
        answers: list[dict[str, object]] = []
        if (kept := message["kept"]) is not None:
            adopt(self._memory, kept["files"])
            if steps := whole_steps(self._memory):
                answers.append({"kind": "kept", "steps": steps})
            if kept["programs"] and self._programs is not None:
                with contextlib.suppress(OSError):
                    found = os.open(kept["programs"], os.O_RDWR | os.O_CLOEXEC)
                    os.close(self._programs)
                    self._programs = found
        former = {int(rank): adopt([], files) for rank, files in message["former"].items()}
        self._peers = PeerMemory(
            self._rank,
            self._memory,
            credentials=Credentials(**message["credentials"]),
            report=self._reports.put,
            host=own_address(message["towards"]),
            former=former,
        )
        if message["local"] is not None and self._local is None:
            directory = Path(message["local"]) / f"host-{self._place}"
            self._local = LocalCheckpoints(directory, self._rank, self._reports.put)
        answers.append({"kind": "listening", "address": self._peers.address})
        self._beside_launch = is_loopback(message["towards"])
        return answers

    def _has(self) -> list[dict[str, object]]:
        """What memory this holds, for the launch to hold it too; nothing on another machine."""
        if not self._beside_launch:
            return []
        files = [name_of(each) for each in self._memory]
        programs = None if self._programs is None else name_of(self._programs)
        return [{"kind": "memory", "agent": os.getpid(), "files": files, "programs": programs}]

    def preempt(self) -> None:
        """The host is to go, which is reported to the controller: it says when the worker is to
        stop."""
        self._preempted = True

    @property
    def pause(self) -> float:
        """Seconds until the next look: fewer while a group forms or is left."""
        soon = self._waits or self._tells_ready or self._leave_by is not None
        starts = self._job is not None and not self._newest_step and self._ended is None
        return _SOON_SECONDS if soon or starts else _LOOK_SECONDS

    def _ask_to_stop(self, number: int) -> None:
        if self._worker is not None and self._worker.poll() is None:
            os.kill(self._worker.pid, number)

    def _extend(self, at: float) -> None:
        """The controller answered what this said at `at`: it counts the worker in from then on."""
        if self._job is not None:
            self._lease_until = max(self._lease_until, at + self._job.lease)

    def fence(self) -> None:
        """End a worker that the controller may have replaced: it does not answer for too long."""
        worker = self._worker
        if worker is None or self._left or time.monotonic() <= self._lease_until:
            return
        if worker.poll() is None:
            self._fenced = True
            os.killpg(worker.pid, signal.SIGKILL)

    def advance(self, ready: Sequence[object]) -> list[dict[str, object]]:
        """Let the worker begin with what was fetched for it, leave its group, or end it when its
        time is up; returns what to send.

        Args:
          ready: those of `wakes` that can be read.
        """
        if self._worker is not None and self._worker.connection in ready:
            self._hear(self._worker)
        if self._waits and not (self._peers is not None and self._peers.fetching):
            self._begin()
        if self._peers is not None:
            self._peers.look()
            if self._local is not None:
                self._local.look(self._peers.held())
        reports: list[dict[str, object]] = []
        if self._tells_ready and self._spare_is_ready():
            self._tells_ready = False
            reports.append({"kind": "ready"})
        with contextlib.suppress(queue.Empty):
            while True:
                reports.append(self._reports.get_nowait())
        return reports + self._leaving()

    def _leaving(self) -> list[dict[str, object]]:
        worker = self._worker
        if self._leave_by is None:
            return []
        free = self._left and worker is not None and worker.poll() is None
        if not free:
            if worker is not None and worker.poll() is None and time.monotonic() < self._leave_by:
                return []
            self.kill()
        self._leave_by = None
        return [{"kind": "left", "free": free}]

    def _hear(self, worker: WorkerProcess) -> None:
        try:
            while True:
                message = worker.receive(0)
                self._left = message["kind"] == "left"
                self._saved = message.get("code") in CLEAN
        except TimeoutError:
            return
        except EOFError:  # it is about to end, which the kernel tells
            with contextlib.suppress(KeyError):
                self.wakes.unregister(worker.connection)

    def start(self, job: Assignment) -> None:
        """Let the worker that left, the spare or a new process be the worker `job` describes."""
        if not self._left or self._worker is None or self._worker.poll() is not None:
            self.kill()
            if self._spare is None or self._spare.poll() is not None:
                self._spare = self._process()
            self._worker, self._spare = self._spare, None
            self._follow(self._worker)
        self._stop_helper()  # what is idle no more
        self._job, self._left, self._leave_by = job, False, None
        self._fenced = False
        self._extend(time.monotonic())
        self._first_step = self._newest_step = 0
        record = self._files.record(job.rank)
        self._forget_record()
        worker_record.create(record, rank=job.rank, hosts=job.hosts, epoch=job.epoch)
        self._record, self._process_state = RecordReader(record), ProcessState(self._worker.pid)
        if self._peers is not None and (job.holders or job.leaving):
            self._waits = True
            self._peers.fetch(job.holders, {int(rank): at for rank, at in job.leaving.items()})
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
                "credentials": job.credentials,
                "environment": {
                    "FORNAX_EPOCH": str(job.epoch),
                    "FORNAX_COORDINATOR": job.coordinator,
                    "FORNAX_NUM_PROCESSES": str(job.hosts),
                    "FORNAX_PROCESS_ID": str(job.rank),
                    "FORNAX_WORKER_RECORD": str(record),
                    "FORNAX_SNAPSHOT_MEMORY": ":".join(map(path_of, self._memory)),
                    "FORNAX_SNAPSHOT_REPLICAS": ":".join(
                        path_of(number)
                        for number in (self._peers.replicas() if self._peers is not None else ())
                    ),
                    "FORNAX_LOCAL_CHECKPOINTS": ""
                    if self._local is None
                    else str(self._local.directory),
                    "FORNAX_MTBF": str(job.mtbf),
                    "FORNAX_PROGRAM_MEMORY": ""
                    if self._programs is None
                    else path_of(self._programs),
                    **job.environment,
                },
            }
        )

    def kill(self) -> None:
        """End the worker, if there is one, and whatever it started."""
        if self._worker is not None:
            self._unfollow()
            self._worker.kill()
        self._worker = self._job = None
        self._left = False
        self._forget_record()

    def _forget_record(self) -> None:
        for each in (self._record, self._process_state):
            if each is not None:
                each.close()
        self._record = self._process_state = None

    def _follow(self, worker: WorkerProcess) -> None:
        """Wake when the worker says something, or ends."""
        self._ended = None
        self.wakes.register(worker.connection, selectors.EVENT_READ, "connection")
        if hasattr(os, "pidfd_open"):  # its children may keep its end of the connection
            self.wakes.register(os.pidfd_open(worker.pid), selectors.EVENT_READ, "pidfd")

    def _unfollow(self) -> None:
        """Once it has ended, which would wake this again and again."""
        for key in [each for each in self.wakes.get_map().values() if each.data is not None]:
            self.wakes.unregister(key.fileobj)
            if key.data == "pidfd":
                os.close(key.fd)

    def close(self) -> None:
        """End worker and spare, and remove the record and the memory; once the run is done, what
        is on this host's disk too."""
        self.kill()
        self.wakes.close()
        if self._local is not None:
            self._local.close(remove=self._ended == 0)
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
        """Start a spare once the worker has made a step, so that both do not start at once; when
        that is ready, have rank 0's host make the programs for a group with a host less."""
        made = self._newest_step > self._first_step
        if not self._keeps_spare or not made or self._job is None:
            return
        if self._spare is None:
            self._spare = self._process()
        if not self._spare_is_ready():
            return
        fewer = self._job.hosts - 1
        if self._job.rank or not fewer or fewer in self._made_for or self._programs is None:
            return
        if not os.fstat(self._programs).st_size:  # no program of this run is shared
            return
        if self._helper is None:
            with self._files.services.open("ab") as log:
                self._helper = WorkerProcess("fornax.cluster.precompile:run", log=log)
            self._helper.send({"memory": path_of(self._programs), "hosts": fewer})
        elif self._helper.poll() is not None or self._helper.connection.poll():
            self._made_for.add(fewer)
            self._note_made(self._helper, self._job.epoch, fewer)
            self._stop_helper()

    def _spare_is_ready(self) -> bool:
        """Whether it has said that its imports are done, or ended, which nobody should wait for."""
        return self._spare is not None and self._spare.connection.poll()

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
        assert self._record is not None
        assert self._process_state is not None
        record = self._record.state()
        self._process_state.look(record)
        code = self._worker.poll()
        code = self._process_state.ending if code is None else code
        if self._ended is None and code is not None:
            self._ended = code
            self._unfollow()
        return Observation(
            epoch=self._job.epoch,
            rank=self._job.rank,
            host=self._host,
            pid=self._worker.pid,
            agent_pid=os.getpid(),
            code=128 + signal.SIGTERM if self._left and self._saved else self._ended,
            left=self._left,
            preempted=self._preempted,
            fenced=self._fenced,
            stopped=self._process_state.stopped,
            **({} if record is None else self._progress(record, self._process_state)),
        )

    def _progress(self, record: WorkerState, process: ProcessState) -> dict[str, Any]:
        """What the worker's record says, as fields of an observation."""
        if record.entered_step > 0:
            self._newest_step = record.entered_step
            self._first_step = self._first_step or self._newest_step
        now = time.monotonic_ns()
        silent = (now - record.beat_ns) / 1e9
        return {
            "silent": max(0.0, silent - process.starved) if record.pid else 0.0,
            "unchanged": (now - record.changed_ns) / 1e9,
            "changed_at": record.changed_at,
            "step": record.step,
            "phase": record.phase,
            "entered_step": record.entered_step,
            "entered_ns": record.entered_ns,
            "data_seconds": record.data_ns / 1e9,
            "code_seconds": record.code_ns / 1e9,
            "program_seconds": record.busy_ns / 1e9 + process.taken,
            "unsaved": record.unsaved,
            "kept": record.kept,
            "batch": record.batch,
            "record": record.record,
            "part": record.part,
        }

    def stacks(self) -> tuple[str, str]:
        """The Python stacks of the worker's threads, and why there are none."""
        if self._worker is None or self._job is None or self._worker.poll() is not None:
            return "", "shows no stack: the process has ended"
        pid, path = self._worker.pid, self._files.stacks(self._job.rank)
        # Before there is a file no handler is installed, and the signal would end the worker.
        text = stacks.ask(pid, path) if path.exists() and not is_stopped(pid) else ""
        return (text, "") if text else stacks.read(pid)

    def _process(self) -> WorkerProcess:
        with self._files.log(self._rank).open("ab") as log:
            worker = WorkerProcess(
                "fornax.cluster.worker:run", log=log, environment=training_memory()
            )
        worker.send(self._imports)
        return worker
