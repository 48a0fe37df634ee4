"""Which worker is at fault, judged from outside: the one that exits first is often not it."""

import signal
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fornax.cluster.messages import CLEAN, Observation
from fornax.config.errors import GroupLostError
from fornax.config.worker_process import ending

__all__ = [
    "Limits",
    "Verdict",
    "departed",
    "judge",
    "lost_agent",
    "lost_controller",
    "lost_service",
    "without_room",
]

_USUALLY_QUICK = ("step", "wait_for_data")
_STOPPED_SECONDS = 1.0
_MEDIANS = 5
_WAITING_MEDIANS = 20
_WAITING_SECONDS = 60.0
_CONSEQUENCES = (-signal.SIGABRT, GroupLostError.exit_code)
"""How a worker ends that loses another: with an error or, in C++, it aborts."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long what may take before a worker counts as hanging, in seconds."""

    frozen: float = 1.0
    """Without heartbeat between steps whose length is known; at least five median steps."""
    stall: float = 5.0
    """Without heartbeat in other phases, in which calls that hold Python's lock for seconds are
    usual, or waiting for data while others wait in the step; at least five median steps. The record
    does not tell a slow read from one that has no end, so it is longer than `frozen`."""
    slow: float = 900.0
    """In a phase that may take long: joining, compiling, restoring, evaluating, saving."""
    leave: float = 5.0
    """To leave the group after another worker's fault; a worker that does not is replaced."""
    lease: float = 12.0
    """Without an answer of the controller an agent ends its worker after this long; the controller
    replaces an agent that sends nothing for a quarter longer."""

    @property
    def silence(self) -> float:
        """After how many seconds an agent is counted out: its worker has ended by then."""
        return 1.25 * self.lease


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is wrong, and with whom."""

    kind: str
    """`killed`, `failed`, `stopped`, `frozen`, `stuck`, `waiting`, `preempted`, `slow`,
    `partition`, `group`, `service`, `agent`, `controller`, or `disk` of a checkpoint that had no
    room."""
    rank: int
    """-1 of the controller."""
    host: str
    pid: int
    phase: str
    step: int
    since: float
    """Wall time of the worker's last change of phase or step, seconds since 1970; of a notice, when
    it came; of a slow worker, when it was named; of an agent, when it last sent something."""
    code: int | None
    what: str
    """In words, without the rank."""
    agent: int = 0
    """The process of the host's agent; 0 where it is not known."""
    batch: int = -1
    """The number of the step's batch, as in `data.skip_steps`; -1 where it is not known."""
    record: int = -1
    """The index in its source of the record of data that a function of the user's had; -1: none."""
    part: str = ""
    """The name of that record's part of a mixture."""

    @property
    def text(self) -> str:
        """One line."""
        at = f" in phase {self.phase}" if self.phase else ""
        step = f" of step {self.step}" if self.step >= 0 else ""
        process = f" (process {self.pid})" if self.pid else ""
        who = "the controller" if self.rank < 0 else f"rank {self.rank} on {self.host}"
        return f"{who}{process} {self.what}{at}{step}"

    @property
    def meanwhile(self) -> dict[str, object]:
        """For a line of the events while the run is in progress, where `step` is the first of a
        group."""
        facts = self.facts
        return {"at_step": facts.pop("step"), **facts}

    @property
    def facts(self) -> dict[str, object]:
        """For a line of the events."""
        return {
            "rank": self.rank,
            "host": self.host,
            "kind": self.kind,
            "phase": self.phase,
            "step": self.step,
            "batch": self.batch,
            "since": round(self.since, 3),
        }

    @property
    def hangs(self) -> bool:
        """Whether the process lives, and would for long if it were left."""
        return self.kind in ("frozen", "stuck", "waiting")

    @property
    def has_stacks(self) -> bool:
        """Whether the process is there, with stacks to be read."""
        return self.hangs or self.kind == "stopped"

    @property
    def leaves(self) -> bool:
        """Whether the host is to go by request or policy, without a step being lost."""
        return self.kind in ("preempted", "slow")

    @property
    def may_follow(self) -> bool:
        """Whether it may be for the loss of a rank that has sent nothing yet."""
        return self.kind == "group" or self.code in _CONSEQUENCES

    @property
    def of_rank(self) -> bool:
        """Whether it is a fault of one rank or its host, and not of the group."""
        return not self.leaves and self.kind not in ("group", "service", "controller")

    @property
    def takes_agent(self) -> bool:
        """Whether the host's agent is lost too, or to go; one that ended its worker stays."""
        cut_off = self.kind == "partition" and self.code is None
        return cut_off or self.leaves or self.kind == "agent"


def judge(
    seen: Sequence[Observation], limits: Limits, step_seconds: Sequence[float] = ()
) -> Verdict | None:
    """The worker at fault; None while all is well, or some have ended and none badly.

    Args:
      seen: the latest observation of each rank, those that ended badly in the order of their ends.
      step_seconds: how long recent steps took.
    """
    ended = _fenced(seen) or _dead(seen)
    return ended or _stopped(seen) or _lost(seen) or _hanging(seen, limits, step_seconds)


def departed(each: Observation, what: str, *, slow: bool, since: float) -> Verdict:
    """Of a worker whose host is to go: it holds the others up, or a scheduler takes it.

    Args:
      each: the latest of the worker.
      what: became of it; may be empty.
      slow: whether it goes because it is slow.
      since: wall time at which it was named, or its notice came.
    """
    if slow:
        return _verdict("slow", each, "; ".join(filter(None, ("is slow", what))), since)
    why = "is on a host that is to go (SIGTERM)"
    return _verdict("preempted", each, "; ".join(filter(None, (why, what))), since)


def without_room(each: Observation) -> Verdict:
    """Of a worker whose last checkpoint had no room on its disk; it trains on."""
    what = (
        f"found no room on the disk for a checkpoint after step {each.unsaved}; training continues"
    )
    return _verdict("disk", each, what)


def lost_agent(
    rank: int, seen: Observation | None, what: str, *, cut: bool, since: float
) -> Verdict:
    """Of a worker whose agent is gone, or is out of reach.

    Args:
      rank: of both.
      seen: the last that was received from the worker.
      what: how it was noticed.
      cut: whether the agent may run, out of reach.
      since: wall time at which the agent last sent something.
    """
    kind, what = "partition" if cut else "agent", f"lost its agent: {what}"
    if seen is not None:
        lost = replace(seen, code=None, pid=seen.agent_pid)
        return _verdict(kind, lost, what, since)
    return Verdict(
        kind=kind,
        rank=rank,
        host="a host that has said nothing yet",
        pid=0,
        phase="",
        step=-1,
        since=since,
        code=None,
        what=what,
    )


def lost_service(what: str) -> Verdict:
    """Of all workers, whose group ended with the coordination service."""
    return Verdict(
        kind="service",
        rank=0,
        host=socket.gethostname(),
        pid=0,
        phase="",
        step=-1,
        since=time.time(),
        code=None,
        what=f"and all others lost their group: {what}",
    )


def lost_controller(pid: int, code: int) -> Verdict:
    """Of the run's controller, which ended with an exit code, or by the signal -code."""
    by = "was ended by" if code < 0 else "crashed with"
    return Verdict(
        kind="controller",
        rank=-1,
        host="this host",
        pid=pid,
        phase="",
        step=-1,
        since=time.time(),
        code=code,
        what=f"{by} {ending(code)}",
    )


def _fenced(seen: Sequence[Observation]) -> Verdict | None:
    for each in seen:
        if each.fenced:
            what = "was cut off from the controller, and its agent ended it"
            return _verdict("partition", each, what)
    return None


def _dead(seen: Sequence[Observation]) -> Verdict | None:
    """Of those that ended badly: one that was killed, else the first; the rest followed it."""
    dead = [each for each in seen if each.code not in (None, *CLEAN)]
    if not dead:
        return None
    others = [each for each in dead if each.code not in _CONSEQUENCES]
    killed = [each for each in others if each.code is not None and each.code < 0]
    faulty = next(iter(killed or others or dead))
    assert faulty.code is not None
    if faulty.code < 0:
        return _verdict("killed", faulty, f"was ended by {ending(faulty.code)}")
    return _verdict("failed", faulty, f"ended with {ending(faulty.code)}")


def _stopped(seen: Sequence[Observation]) -> Verdict | None:
    for each in seen:
        if each.code is None and each.stopped >= _STOPPED_SECONDS:
            return _verdict("stopped", each, f"is stopped (SIGSTOP) for {each.stopped:.1f} s")
    return None


def _lost(seen: Sequence[Observation]) -> Verdict | None:
    for each in seen:
        if each.left and each.code is None:
            return _verdict("group", each, "lost another process, and no process is at fault,")
    return None


def _hanging(
    seen: Sequence[Observation], limits: Limits, step_seconds: Sequence[float]
) -> Verdict | None:
    alive = [each for each in seen if each.code is None and not each.stopped and not each.left]
    median = statistics.median(step_seconds) if step_seconds else 0.0
    stall = max(limits.stall, _MEDIANS * median)
    frozen = max(limits.frozen, _MEDIANS * median) if len(step_seconds) >= _MEDIANS else stall
    for each in alive:
        quick = each.phase in _USUALLY_QUICK
        if each.silent > (frozen if quick else stall) and each.phase != "exit":
            what = f"does not run Python for {each.silent:.1f} s: something holds its interpreter"
            return _verdict("frozen", each, what)
        if not quick and each.unchanged > limits.slow:
            return _verdict("stuck", each, f"has made no progress for {each.unchanged:.0f} s")
    waiting = [each for each in alive if each.phase == "step" and each.unchanged > stall]
    for each in alive:
        if each.phase == "wait_for_data" and each.unchanged > stall and waiting:
            what = f"holds up the others for {each.unchanged:.1f} s"
            return _verdict("stuck", each, what)
    patience = max(_WAITING_SECONDS, limits.stall, _WAITING_MEDIANS * median)
    patience = patience if step_seconds else max(patience, limits.slow)
    if waiting and len(waiting) == len(seen) and all(e.unchanged > patience for e in waiting):
        last = max(waiting, key=lambda each: (-each.entered_step, each.entered_ns))
        what = f"entered last, {last.unchanged:.0f} s ago, and all wait"
        return _verdict("waiting", last, what)
    return None


def _verdict(kind: str, each: Observation, what: str, since: float | None = None) -> Verdict:
    return Verdict(
        kind=kind,
        rank=each.rank,
        host=each.host,
        pid=each.pid,
        phase=each.phase,
        step=each.step,
        since=each.changed_at if since is None else since,
        code=each.code,
        what=what,
        agent=each.agent_pid,
        batch=each.batch,
        record=each.record,
        part=each.part,
    )
