"""The controller of a launched run: forms the group, watches it, and forms it again after a fault.

One state machine. `forming`: a coordination service and a worker on every host, until all are in
their training loop. `running`. `suspect`: something is wrong; evidence is gathered. `teardown`: the
worker at fault is ended; the others leave the group in their processes, or are ended when they do
not in time. Then the next epoch forms and resumes from the newest step that is whole: in the
agents' memory, else in a checkpoint. For a change of the number of hosts, or a host that is to go,
those that come are made ready first; then all keep one step in the agents' memory and leave. Each
change is a line of events.jsonl.
"""

import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from fornax.cluster.agents import AgentLostError, Agents
from fornax.cluster.attempts import Attempts
from fornax.cluster.coordination import CoordinationService
from fornax.cluster.departure import Arrivals, Departures
from fornax.cluster.files import ClusterFiles
from fornax.cluster.local import Launcher
from fornax.cluster.messages import CLEAN, Assignment, Observation, decode, encode
from fornax.cluster.relay import Relayed
from fornax.cluster.slow import Paces
from fornax.cluster.snapshot_places import SnapshotPlaces
from fornax.cluster.verdict import (
    Limits,
    Verdict,
    departed,
    judge,
    lost_agent,
    lost_service,
    without_room,
)
from fornax.config.errors import ClusterError
from fornax.config.jsonl import JsonLines, read_json_lines
from fornax.config.worker_process import WorkerProcess

__all__ = ["Controller", "Job", "SlowPolicy", "State"]

State = Literal["forming", "running", "suspect", "teardown", "ended"]
SlowPolicy = Literal["report", "evict"]

_TICK_SECONDS = 0.05
_EVIDENCE_SECONDS = 0.3
_COUNT_SECONDS = 1.0
_SILENT_SECONDS = 3.0
_USER_ERROR = 2
_OF_SNAPSHOTS = ("listening", "holds", "fetched", "kept", "on_disk", "local_checkpoints")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is launched."""

    hosts: int
    """How many hosts; the most, where `least` says that fewer will do."""
    words: tuple[str, ...]
    program: str = "fornax.cli.main:main"
    """`package.module:NAME`, called with `words` in every worker; it returns an exit code."""
    least: int | None = None
    """The fewest hosts to begin and to continue with; more are taken in at a step. None:
    `hosts`."""
    limits: Limits = field(default_factory=Limits)
    mtbf: float = 24 * 3600.0
    """Mean seconds between failures of one host, until there were more: snapshots in memory are as
    far apart as loses the least."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that every worker finds in its environment."""
    local_checkpoints: str | None = None
    """A directory of each host's own disk to which its agent copies snapshots from memory, for a
    launch after this one; None: they are in memory only."""
    slow: SlowPolicy = "report"
    """What becomes of a worker that holds the others up: it is named in the events, or its host is
    replaced too, once."""


class _Resized:
    """All workers have kept the same step and left, to continue with another number."""


class Controller:
    """One run from its first epoch to its end."""

    def __init__(
        self,
        job: Job,
        files: ClusterFiles,
        launcher: Launcher,
        *,
        announce: Callable[[str], None],
        tick: Callable[[int], None] = lambda step: None,
        tell: Callable[[Mapping[str, Any]], None] = lambda message: None,
        kept: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Start nothing yet.

        Args:
          job: what to run.
          files: of the run, which the caller holds.
          launcher: places agents.
          announce: shows a line a change of state.
          tick: called many times a second with the newest step that all ranks have entered.
          tell: takes what another controller needs to take this one's place: `memory` of an agent,
            the number of hosts that is `wanted`, and that a group has `settled`.
          kept: what an earlier one told of the agents' memory, by rank: `KeptMemory.places`.
        """
        self._job = job
        self._files = files
        self._launcher = launcher
        self._hosts = self._most = job.hosts
        self._resizes = False
        self._counted_at = 0.0
        self._announce = announce
        self._tick = tick
        self._tell = tell
        self._events = JsonLines(files.events)
        self._agents = Agents(self._take)
        self._service: CoordinationService | None = None
        self._standby: CoordinationService | None = None
        self._epoch = max((e["epoch"] for e in read_json_lines(files.events)), default=0)
        self._state: State | None = None
        self._seen: dict[int, Observation] = {}
        self._ended: list[int] = []
        local = job.local_checkpoints
        local = None if local is None else str(Path(local) / files.run_id())
        self._places = SnapshotPlaces(launcher.credentials, kept, local)
        self._departures = Departures(launcher, self._places)
        self._arrivals = Arrivals(launcher, self._places)
        self._signals: list[int] = []
        self._step = -1
        self._stepped_at = 0.0
        self._step_seconds: deque[float] = deque(maxlen=50)
        self._paces = Paces()
        self._evicted: set[int] = set()
        self._attempts = Attempts()
        self._free = 0
        self._unsaved = -1
        self._stack = ""

    def run(self) -> int:
        """Run to the end, or until `stop`; returns the exit code of the command.

        0 when the run is done, 128 + signal when it was asked to stop, 2 when a worker ended with a
        mistake of the user's.

        Raises:
          ClusterError: when the run fails again and again at one step.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._events.close)
            stack.callback(self._close)
            while True:
                self._form()
                found = self._watch()
                if isinstance(found, _Resized):
                    self._end_service()
                    self._free = sum(each.left for each in self._seen.values())
                    continue
                if isinstance(found, int):
                    self._enter("ended", f"exit code {found}", code=found)
                    return found
                self._teardown(found)
                if found.code == _USER_ERROR:
                    why = f"rank {found.rank} ended with an error that another attempt repeats"
                    self._enter("ended", why, code=_USER_ERROR)
                    return _USER_ERROR
                if self._signals and not self._departures.in_memory:
                    code = 128 + self._signals[-1]
                    self._enter("ended", "a fault while stopping", code=code)
                    return code
                self._count(found)

    def resize(self, hosts: int) -> None:
        """Ask for another number of hosts; the run changes at its next step. From any thread.

        Raises:
          ClusterError: for a number below 1.
        """
        if hosts < 1:
            raise ClusterError(f"a run cannot continue with {hosts} hosts; use 1 or more")
        self._most = hosts
        self._counted_at = 0.0  # at once

    @property
    def hosts_at_work(self) -> int | None:
        """How many hosts train; None while a group forms or ends."""
        return self._hosts if self._state == "running" and not self._resizes else None

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask for a stop as a signal does: all finish the step and save. From any thread."""
        self._signals.append(number)

    def _form(self) -> None:
        """Begin an epoch: a service, and a worker on every host."""
        self._epoch += 1
        self._place()
        self._resizes = False
        self._seen.clear()
        self._ended.clear()
        self._paces.clear()
        self._departures.leave_by = 0.0
        self._step = -1
        self._free = min(self._free, self._hosts)
        stayed = f", {self._free} in their processes" if self._free else ""
        self._enter("forming", f"{self._hosts} hosts{stayed}", hosts=self._hosts, free=self._free)
        self._tell({"kind": "wanted", "hosts": self._most})
        self._service = self._take_service()
        mtbf = self._attempts.mtbf(self._job.mtbf / self._hosts)
        for rank, agent in self._agents.items():
            assignment = Assignment(
                epoch=self._epoch,
                rank=rank,
                hosts=self._hosts,
                coordinator=self._service.address,
                program=self._job.program,
                words=list(self._job.words),
                mtbf=mtbf,
                lease=self._job.limits.lease,
                environment=dict(self._job.environment),
                credentials=self._launcher.credentials.fields(),
                holders=self._places.holders(rank),
                leaving=self._places.leaving(rank, self._hosts),
            )
            agent.send(encode("start", assignment))

    def _take_service(self) -> CoordinationService:
        """The service of the epoch that forms; one that was started before it, if there is one."""
        standby, self._standby = self._standby, None
        if standby is not None and standby.count == self._hosts and standby.alive():
            return standby
        if standby is not None:
            standby.close()
        return self._new_service(self._hosts)

    def _new_service(self, hosts: int) -> CoordinationService:
        with self._files.services.open("ab") as log:
            return CoordinationService(hosts, log, self._launcher.address)

    @property
    def _least(self) -> int:
        return self._most if self._job.least is None else min(self._job.least, self._most)

    def _place(self) -> None:
        """Have an agent for every rank of as many hosts as there are; wait for the fewest.

        Raises:
          ClusterError: when they do not come.
        """
        until = time.monotonic() + self._job.limits.slow
        why = ""
        while not self._signals or (self._departures.in_memory and len(self._signals) == 1):
            self._take_request()
            there = min(self._most, self._launcher.capacity())
            if there >= self._least:
                self._take_leave([rank for rank in self._agents if rank >= there], there)
                self._hosts = there
                for rank, (agent, address) in self._arrivals.take(range(there)).items():
                    self._places.add(rank, address)
                    self._agents.put(rank, agent)
                missing = [rank for rank in range(there) if rank not in self._agents]
                try:
                    started = self._launcher.start(missing)
                    self._agents.renew()
                    for rank, agent in started.items():
                        self._places.let_listen(agent, self._launcher.address, rank, there)
                        self._agents.put(rank, agent)
                    return
                except ClusterError as error:
                    why = f": {error}"
            if self._state != "forming":
                self._enter(
                    "forming", f"waits: {there} of at least {self._least} hosts{why}", waiting=there
                )
            if time.monotonic() > until:
                text = f"only {there} of the {self._least} hosts that the run needs came{why}"
                self._enter("ended", text, code=1)
                raise ClusterError(
                    f"{text}; add hosts, or ask for fewer with --hosts, and run the command again"
                )
            time.sleep(_TICK_SECONDS)

    def _take_request(self) -> None:
        """Want as many hosts as were asked for since the last look."""
        if hosts := self._files.asked("hosts"):
            self._most = hosts
            self._tell({"kind": "wanted", "hosts": hosts})

    def _next_hosts(self) -> int | None:
        """Another number of hosts to continue with, now that a step boundary can be agreed."""
        now = time.monotonic()
        if self._state != "running" or now - self._counted_at < _COUNT_SECONDS:
            return None
        self._counted_at = now
        self._take_request()
        there = self._most
        if there > self._hosts:
            there = min(there, self._launcher.capacity())
        return there if there != self._hosts and there >= self._least else None

    def _watch(self) -> int | Verdict | _Resized:
        """Until the workers have ended, or one is at fault."""
        stopping_since: float | None = None
        while True:
            try:
                self._pump(_TICK_SECONDS)
            except AgentLostError as lost:
                return self._lost(lost)
            self._relay()
            forming = self._state == "forming"
            if len(self._signals) > 1 or (
                self._signals and forming and not self._departures.in_memory
            ):
                return 128 + self._signals[0]
            if self._signals and stopping_since is None and not forming:
                stopping_since = time.monotonic()
                name = signal.Signals(self._signals[0]).name
                self._enter("running", f"{name}: all finish this step and save", stop=name)
                self._ask_to_save()
            settled = not (self._resizes or self._signals or self._departures.ranks)
            if settled and (hosts := self._next_hosts()):
                self._resize(hosts)
            if self._state == "running" and not self._resizes and not self._signals:
                self._depart()
            if stopping_since and time.monotonic() - stopping_since > self._job.limits.slow:
                return 128 + self._signals[0]
            codes = [each.code for each in self._seen.values()]
            if len(codes) == self._hosts and all(code in CLEAN for code in codes):
                worst = max(code for code in codes if code is not None)
                self._departures.in_memory = any(each.kept >= 0 for each in self._seen.values())
                if self._resizes and worst and not self._signals:
                    return _Resized()
                if (
                    worst
                    and self._departures.leave_by
                    and (self._departures.in_memory or not self._signals)
                ):
                    return self._departures.verdict(self._seen, "all left at one step")
                return 128 + self._signals[0] if self._signals and worst else worst
            if self._service is not None and not self._service.alive():  # all workers abort of it
                return lost_service("jax's coordination service ended")
            if verdict := self._judge():
                return self._gather_evidence(verdict)
            if self._departures.leave_by and time.monotonic() > self._departures.leave_by:
                return self._departures.verdict(self._seen, "not all left in time")
            if self._state == "running" and not self._departures.leave_by and self._paces.judge():
                try:
                    self._tell_slow(evict=settled)
                except AgentLostError as lost:
                    return self._lost(lost)

    def _resize(self, hosts: int) -> None:
        """Have all keep one step in memory and leave, once those that come are ready."""
        if self._standby is None or self._standby.count != hosts:
            if self._standby is not None:
                self._standby.close()
            self._standby = self._new_service(hosts)
        if not self._arrivals.are_ready(range(self._hosts, hosts)):
            self._counted_at = 0.0  # look again at once
            return
        self._resizes = True
        why = f"{hosts} hosts are next: all finish this step and keep it in memory"
        self._enter("running", why, hosts=hosts)
        for agent in self._agents.values():
            agent.send({"kind": "depart", "number": signal.SIGTERM})

    def _tell_slow(self, *, evict: bool) -> None:
        """Say who holds the others up, or that nobody does now; by policy replace it."""
        slow = self._paces.named
        if slow is None:
            self._enter("running", "no rank holds up the others any more", slow=None)
            return
        evict = evict and self._job.slow == "evict" and slow.rank not in self._evicted
        what = "; another host is made ready to take its place" if evict else ""
        why = f"rank {slow.rank} {slow.text}{what}"
        found = departed(self._seen[slow.rank], "", slow=True, since=time.time())
        told = {**found.meanwhile, **slow.facts, **self._said(found), **self._stacks(found)}
        self._enter("running", why, slow=slow.rank, evict=evict, **told)
        if evict:
            self._evicted.add(slow.rank)
            self._departures.begin(slow.rank, slow=True)

    def _relay(self) -> None:
        """Put a relay before an agent where a drill asked for it; the event says its process."""
        rank = self._files.asked("relay")
        agent = None if rank is None else self._agents.get(rank)
        if rank is not None and self._state is not None and isinstance(agent, WorkerProcess):
            with self._files.services.open("ab") as log:
                self._agents.put(rank, relayed := Relayed(agent, log), starts=False)
            why = f"rank {rank} is reached through a relay, process {relayed.pid}"
            self._enter(self._state, why, relay=rank, pid=relayed.pid)

    def _depart(self) -> None:
        """Make others ready for the hosts that are to go; then have all leave at one step.

        They keep it in memory, where the agent that leaves can give it to the one that comes.
        """
        departures = self._departures
        for rank, seen in self._seen.items():
            if seen.preempted and rank not in departures.ranks and not departures.leave_by:
                why = f"rank {rank} is on a host that is to go (SIGTERM): another is made ready"
                found = departed(seen, "", slow=False, since=time.time())
                told = {**found.meanwhile, **self._said(found)}
                self._enter("running", why, going=rank, entered=self._step, **told)
                departures.begin(rank)
        if departures.leave_by or not departures.are_due():
            return
        by_memory = departures.ask(self._agents, max(self._step_seconds, default=0.0))
        where = "keep it in memory" if by_memory else "save it, as no other host is there"
        self._enter("running", f"all finish this step and {where}", leaves=sorted(departures.ranks))

    def _take_over(self, verdict: Verdict) -> None:
        """Put the agents that were made ready in the places of those that go."""
        for rank, departure in self._departures.of(verdict).items():
            if departure.agent is None:
                self._forget(rank)
                continue
            if self._departures.in_memory:
                self._departures.keep(rank, self._agents[rank])
            else:
                self._forget(rank)
            self._places.add(rank, departure.address)
            self._agents.put(rank, departure.agent)

    def _ask_to_save(self) -> None:
        for agent in self._agents.values():
            agent.send({"kind": "signal", "number": signal.SIGTERM})

    def _end_service(self) -> None:
        if self._service is not None:
            self._service.close()
            self._service = None

    def _judge(self) -> Verdict | None:
        ended = [self._seen[rank] for rank in self._ended]
        others = [each for rank, each in self._seen.items() if rank not in self._ended]
        return judge([*ended, *others], self._job.limits, self._step_seconds)

    def _gather_evidence(self, verdict: Verdict) -> Verdict:
        """Gather what else there is to know before the evidence is gone."""
        self._enter("suspect", verdict.text, **verdict.facts, **self._said(verdict))
        until = time.monotonic() + _EVIDENCE_SECONDS
        try:
            while time.monotonic() < until or self._waits_for_one(verdict):
                self._pump(_TICK_SECONDS)
            if not verdict.hangs:
                verdict = self._judge() or verdict
            if verdict.has_stacks:
                told = self._stacks(verdict)
                self._stack = told.get("stack", "")
                where = f"is at {self._stack}" if self._stack else told["no_stack"]
                self._enter("suspect", f"rank {verdict.rank} {where}", **verdict.facts, **told)
        except AgentLostError as lost:
            return self._lost(lost)
        return verdict

    def _waits_for_one(self, verdict: Verdict) -> bool:
        """Whether ranks lost another and one sends nothing: it is that one if it stays so."""
        return verdict.may_follow and self._agents.silent > _SILENT_SECONDS

    def _stacks(self, verdict: Verdict) -> dict[str, str]:
        """A worker's stacks and the innermost calls of its main thread; or why there are none.

        Raises:
          AgentLostError: for the worker's agent.
        """
        answer = self._agents.ask(verdict.rank, {"kind": "stacks"}, "stacks")
        if not answer["text"]:
            return {"no_stack": answer["why_not"]}
        main = answer["text"].rpartition("(most recent call first):")[2].strip().splitlines()
        top = " < ".join(line.strip() for line in main[:3])
        return {"stack": top, "stacks": answer["text"]}

    def _said(self, verdict: Verdict) -> dict[str, str]:
        """The last line of a rank's log, for a line of the events."""
        return {"last_line": self._files.last_line(verdict.rank)}

    def _teardown(self, verdict: Verdict) -> None:
        """End the worker at fault, have the others leave, and end this epoch's service.

        The service comes last: it ends every process that is still connected.
        """
        told = self._said(verdict)
        last = told["last_line"]
        said = f'; its last line: "{last}"' if last and verdict.kind == "failed" else ""
        if verdict.has_stacks and self._stack:
            told["stack"] = self._stack
        why, self._stack = f"{verdict.text}{said}", ""
        self._enter("teardown", why, entered=self._step, **verdict.facts, **told)
        before = dict(self._agents)
        self._take_over(verdict)
        for rank, agent in list(self._agents.items()):
            faulty = (
                agent is before[rank]
                and rank == verdict.rank
                and verdict.kind not in ("group", "service")
            )
            if faulty and verdict.takes_agent:
                self._forget(rank)
            else:
                seconds = 0.0 if faulty else self._job.limits.leave
                agent.send({"kind": "leave", "seconds": seconds})
        self._free = 0
        for rank in list(self._agents):
            try:
                self._free += self._agents.ask(rank, None, "left", self._job.limits.leave)["free"]
            except AgentLostError:
                self._forget(rank)
        if verdict.rank in self._agents and self._attempts.needs_another_host(verdict):
            self._move(verdict.rank)
        self._end_service()

    def _move(self, rank: int) -> None:
        """Have a rank's next agent be another: on another host, where one is free, which takes the
        snapshots over."""
        if self._launcher.capacity() > len(self._agents):
            self._departures.keep(rank, self._agents.release(rank))
        else:
            self._forget(rank)

    def _count(self, verdict: Verdict) -> None:
        """Refuse to try again what does not get further."""
        why = self._attempts.fail(verdict)
        if why is not None:
            self._enter("ended", why, code=1)
            raise ClusterError(
                f"{why}. Look at {self._files.log(verdict.rank)}, fix it, and run the same "
                "command again: it resumes from the newest checkpoint"
            )

    def _pump(self, seconds: float) -> None:
        """Take what the agents say within `seconds`.

        Raises:
          AgentLostError: for an agent that ended, or was silent for long.
        """
        self._agents.hear(seconds)
        self._follow()
        self._places.tell(self._agents, self._hosts, running=self._state == "running")
        self._agents.check(self._job.limits.silence)
        self._tick(self._step)

    def _take(self, rank: int, message: Mapping[str, Any]) -> None:
        """What an agent says of its host's memory and of its worker."""
        if message["kind"] in _OF_SNAPSHOTS:
            said = self._places.hear(rank, message)
            if said is not None and self._state is not None:
                fact = message["written" if "written" in message else "steps"]
                self._enter(self._state, said, **{message["kind"]: fact}, rank=rank)
            return
        if message["kind"] == "memory":
            self._tell({**message, "rank": rank})
        if message["kind"] != "observation":
            return
        seen = decode(Observation, message)
        if seen.epoch != self._epoch:
            return
        self._seen[rank] = seen
        self._paces.add(seen)
        if seen.code is not None and rank not in self._ended:
            self._ended.append(rank)
        if seen.unsaved > self._unsaved and self._state is not None:
            self._unsaved = seen.unsaved
            found = without_room(seen)
            told = {**found.meanwhile, **self._said(found)}
            self._enter(self._state, found.text, unsaved=seen.unsaved, **told)

    def _follow(self) -> None:
        """Notice the first step, and how long steps take."""
        if len(self._seen) < self._hosts:
            return
        step = min(each.entered_step for each in self._seen.values())
        if step <= self._step:
            return
        now = time.monotonic()
        if self._state == "forming":
            self._attempts.begin(step)
            self._enter("running", f"from step {step}", step=step)
            self._departures.settle(self._hosts)
            agents = [each.agent_pid for each in self._seen.values()]
            settled = {"agents": agents, "hosts": self._hosts, "step": step}
            self._tell({"kind": "settled", **settled})
            if self._standby is None:  # a second less to wait for after a fault
                self._standby = self._new_service(self._hosts)
        elif self._step > 0:
            self._step_seconds.append((now - self._stepped_at) / (step - self._step))
        self._step, self._stepped_at = step, now
        self._attempts.reach(step)

    def _lost(self, lost: AgentLostError) -> Verdict:
        seen = self._seen.get(lost.rank)
        return lost_agent(lost.rank, seen, lost.what, cut=lost.cut, since=lost.since)

    def _forget(self, rank: int) -> None:
        self._places.forget(rank)
        self._agents.forget(rank)

    def _take_leave(self, ranks: Sequence[int], hosts: int) -> None:
        """Agents leave a group that continues with fewer: those that stay take their snapshots
        over, unless a machine is needed for a rank that has none."""
        if len(self._agents) - len(ranks) < hosts:
            self._dismiss(ranks)
            return
        for rank in ranks:
            self._departures.drop(rank)
            self._departures.keep(rank, self._agents.release(rank))
            self._files.record(rank).unlink(missing_ok=True)

    def _dismiss(self, ranks: Sequence[int]) -> None:
        """End agents with their workers, and wait until they have ended."""
        for rank in ranks:
            self._departures.drop(rank)
            self._places.forget(rank)
        self._agents.dismiss(ranks)

    def _enter(self, state: State, why: str, **facts: object) -> None:
        """Change state: a line of events, a line on the terminal."""
        self._state = state
        self._events.write(
            {
                "time": round(time.time(), 3),
                "epoch": self._epoch,
                "state": state,
                "why": why,
                **facts,
            }
        )
        self._announce(f"epoch {self._epoch}  {state}: {why}")

    def _close(self) -> None:
        """End agents, workers and service, and wait until they have ended."""
        self._dismiss(list(self._agents))
        self._departures.close()
        self._arrivals.close()
        for service in (self._service, self._standby):
            if service is not None:
                service.close()
        for record in self._files.records().values():
            record.unlink(missing_ok=True)
