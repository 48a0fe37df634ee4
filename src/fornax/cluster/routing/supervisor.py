"""Keeps the replicas of a router alive: starts, probes, replaces, restarts them in turn.

Each change of a replica is a line of the run's events.jsonl and of the terminal.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

import aiohttp

from fornax.cluster.files import ClusterFiles
from fornax.cluster.replica_process import Ended
from fornax.cluster.routing.metrics import RouterMetrics
from fornax.cluster.routing.pool import Replica, ReplicaPool
from fornax.cluster.routing.replica import Handle, Placer
from fornax.cluster.routing.service import Service
from fornax.config.errors import ClusterError
from fornax.config.jsonl import JsonLines

__all__ = ["Events", "Supervisor"]

_PROBE_SECONDS = 0.2
_ANSWER_SECONDS = 5.0
_STOPPED_SECONDS = 1.0
_KILL_SECONDS = 10.0
_LONGEST_PAUSE = 60.0
_FRUITLESS_STARTS = 3
_USER_ERROR = 2

State = Literal["forming", "running", "suspect", "teardown", "ended"]
Kind = Literal["killed", "failed", "lost", "stopped", "frozen", "slow", "unplaced", "restart"]


class Events:
    """Writes the events of one launch, and shows them."""

    def __init__(self, lines: JsonLines, epoch: int, announce: Callable[[str], None]):
        self._lines = lines
        self._epoch = epoch
        self._announce = announce

    def write(self, state: State, why: str, **facts: object) -> None:
        """A line of events, a line on the terminal."""
        now = round(time.time(), 3)
        self._lines.write({"time": now, "epoch": self._epoch, "state": state, "why": why, **facts})
        self._announce(f"{state}: {why}")


@dataclass(frozen=True)
class _End:
    """Why a replica's process is gone."""

    kind: Kind
    what: str
    code: int | None = None


@dataclass(eq=False)
class _Slot:
    """A replica's number, and the replica that has it now."""

    number: int
    process: Handle | None = None
    replica: Replica | None = None
    restart: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a start has come to its end, well or not."""
    fruitless: int = 0
    """Starts since it was ready last."""


class Supervisor:
    """The replicas of one router, from start to end."""

    def __init__(
        self,
        placer: Placer,
        service: Service,
        files: ClusterFiles,
        pool: ReplicaPool,
        session: aiohttp.ClientSession,
        *,
        admit: Callable[[Replica], Awaitable[None]],
        events: Events,
        metrics: RouterMetrics,
    ):
        """`admit` lets a replica that answers for the first time take requests."""
        self._placer = placer
        self._service = service
        self._files = files
        self._pool = pool
        self._config = pool.config
        self._session = session
        self._admit = admit
        self._events = events
        self._metrics = metrics
        self._slots = [_Slot(number) for number in range(placer.count)]
        self._served = False
        self._rolling = False

    async def run(self) -> int:
        """Keep the replicas until cancelled; 2 when none starts for a mistake of the user's.

        Raises:
          ClusterError: when none starts.
        """
        tasks = [asyncio.create_task(self._keep(slot)) for slot in self._slots]
        try:
            await asyncio.gather(*tasks)
        except _NoneStartsError as error:
            if error.code == _USER_ERROR:
                return _USER_ERROR
            raise ClusterError(str(error)) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        raise AssertionError("replicas are kept until cancelled")

    async def stop(self) -> None:
        """End all replicas, in order where they can."""
        await asyncio.gather(*(self._terminate(slot) for slot in self._slots))

    def kill(self) -> None:
        """End all replicas at once."""
        for slot in self._slots:
            if slot.process is not None:
                slot.process.kill()

    async def rolling_restart(self) -> None:
        """Restart one replica after another, each when all others are ready."""
        if self._rolling:
            self._write("a rolling restart is under way; this one is left out", rolling="stopped")
            return
        self._rolling = True
        try:
            self._write(f"rolling restart of {len(self._slots)} replicas", rolling="begun")
            for slot in self._slots:
                if not await self._all_but(slot):
                    why = f"not all others are ready, {self._config.start_timeout:g} s later"
                    self._write(f"rolling restart stopped: {why}", rolling="stopped")
                    return
                before = slot.replica
                while slot.replica is before:
                    slot.started.clear()
                    slot.restart.set()
                    if not await self._started(slot):
                        return
                    if slot.replica is None:
                        break
                if slot.replica is None or slot.replica.phase == "ended":
                    why = f"the new replica {slot.number} did not start; the others still serve"
                    self._write(f"rolling restart stopped: {why}", rolling="stopped")
                    return
            self._write("rolling restart done", rolling="done")
        finally:
            self._rolling = False

    async def _started(self, slot: _Slot) -> bool:
        """Wait for the end of a restart; False when it does not come."""
        seconds = self._config.drain_timeout + self._config.start_timeout
        try:
            await asyncio.wait_for(slot.started.wait(), seconds)
        except TimeoutError:
            why = f"replica {slot.number} is not ready after {seconds:g} s"
            self._write(f"rolling restart stopped: {why}", rolling="stopped")
            return False
        return True

    async def _all_but(self, slot: _Slot) -> bool:
        """Wait until the other replicas are ready, so that no more than one is lacking."""
        others = [each for each in self._slots if each is not slot]
        until = time.monotonic() + self._config.start_timeout
        while any(each.replica is None or each.replica.phase != "ready" for each in others):
            if time.monotonic() > until:
                return False
            await asyncio.sleep(_PROBE_SECONDS)
        return True

    async def _keep(self, slot: _Slot) -> None:
        while True:
            end = await self._life(slot)
            if end.kind == "restart":
                continue
            slot.fruitless += 1
            self._metrics.restarted(slot.number, end.kind)
            if not self._served and (
                end.code == _USER_ERROR or slot.fruitless >= _FRUITLESS_STARTS
            ):
                why = (
                    f"replica {slot.number} does not start: it {end.what}. See "
                    f"{self._files.replica_log(slot.number)}, fix it, and run the same command "
                    "again"
                )
                raise _NoneStartsError(why, end.code)
            pause = min(_LONGEST_PAUSE, 2.0 ** (slot.fruitless - 2)) if slot.fruitless > 1 else 0.0
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(slot.restart.wait(), pause)

    async def _life(self, slot: _Slot) -> _End:
        """One process, from its start to its end."""
        slot.restart.clear()
        try:
            process = slot.process = await self._placed(slot.number)
        except ClusterError as error:
            slot.process = slot.replica = None
            slot.started.set()
            self._write(f"replica {slot.number} has no place: {error}", replica=slot.number)
            return _End("unplaced", f"has no place: {error}")
        replica = slot.replica = Replica(number=slot.number, url=process.url, grpc=process.grpc)
        self._pool.add(replica)
        address = process.url.partition("://")[2]
        self._tell(slot, "starts", address=address, pids=process.pids)
        try:
            end = await self._watch(slot, process, replica)
        finally:
            self._pool.enter(replica, "ended")
        if end.kind != "restart":
            self._told_end(slot, end)
            slot.started.set()
        process.kill()
        return end

    async def _placed(self, number: int) -> Handle:
        """Start a replica beside the event loop; when this is cancelled, none is left."""
        starting = asyncio.create_task(asyncio.to_thread(self._placer.start, number))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._placer.give_up()
            with contextlib.suppress(ClusterError):
                (await starting).kill()
            raise

    async def _watch(self, slot: _Slot, process: Handle, replica: Replica) -> _End:
        """Until it ends, is at fault, or is to be restarted; then it no longer takes requests."""
        began = heard = time.monotonic()
        stopped_since: float | None = None
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(slot.restart.wait(), _PROBE_SECONDS)
            if slot.restart.is_set():
                return await self._retire(slot, replica)
            if (ended := process.ended()) is not None:
                return _End(_kind(ended), ended.how, ended.code)
            now = time.monotonic()
            stopped_since = (stopped_since or now) if process.is_stopped() else None
            if stopped_since is not None and now - stopped_since >= _STOPPED_SECONDS:
                return _End("stopped", f"is stopped (SIGSTOP) for {now - stopped_since:.1f} s")
            status = await self._probe(replica)
            now = time.monotonic()
            heard = now if status else heard
            self._pool.heard(replica, bool(status))
            if replica.phase == "starting":
                if status == 200:
                    await self._welcome(slot, replica, now - began)
                elif now - (heard if self._service.partial else began) > self._config.start_timeout:
                    return _End("slow", f"is not ready after {now - began:.0f} s")
                continue
            if now - heard > self._config.stall_limit:
                where = await asyncio.to_thread(process.stacks)
                at = f"; it is at {where}" if where else ""
                what = f"does not answer {self._service.ready} for {now - heard:.0f} s{at}"
                return _End("frozen", what)
            self._judge(slot, replica, status, now - heard)

    async def _welcome(self, slot: _Slot, replica: Replica, seconds: float) -> None:
        await self._admit(replica)
        self._served, slot.fruitless = True, 0
        slot.started.set()
        self._tell(slot, f"is ready after {seconds:.1f} s", url=replica.url)

    def _judge(self, slot: _Slot, replica: Replica, status: int, silent: float) -> None:
        """Take a replica out of service or in again, by a probe's status; 0: no answer."""
        if replica.phase == "ready" and (status not in (0, 200) or silent > _ANSWER_SECONDS):
            self._pool.enter(replica, "unready")
            said = f"answers {status} to {self._service.ready}" if status else "is silent"
            self._tell(slot, f"takes no requests: it {said}")
        elif replica.phase == "unready" and status == 200:
            self._pool.enter(replica, "ready")
            self._tell(slot, "takes requests again")

    async def _probe(self, replica: Replica) -> int:
        """The status of the readiness probe; 0 where there is no answer."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                url = replica.url + self._service.ready
                async with self._session.get(url, allow_redirects=False) as response:
                    await response.read()
                    return response.status
        except (aiohttp.ClientError, OSError, TimeoutError):
            return 0

    async def _retire(self, slot: _Slot, replica: Replica) -> _End:
        """Let a replica finish its requests, and end it."""
        self._pool.enter(replica, "draining")
        self._tell(slot, f"drains: {replica.running} requests may finish")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(replica.idle.wait(), self._config.drain_timeout)
        await self._terminate(slot)
        return _End("restart", "is restarted")

    async def _terminate(self, slot: _Slot) -> None:
        """Ask a replica to end, and end it when it does not."""
        process = slot.process
        if process is None:
            return
        process.terminate()
        until = time.monotonic() + self._service.drain_seconds + _KILL_SECONDS
        while process.ended() is None and time.monotonic() < until:
            await asyncio.sleep(0.02)
        process.kill()

    def _told_end(self, slot: _Slot, end: _End) -> None:
        assert slot.process is not None
        last = slot.process.last_line() if end.kind == "failed" else ""
        said = f'; its last line: "{last}"' if last else ""
        self._tell(slot, f"{end.what}{said}", state="suspect", kind=end.kind)

    def _tell(self, slot: _Slot, what: str, state: State | None = None, **facts: object) -> None:
        assert slot.replica is not None
        assert slot.process is not None
        pid, phase = slot.process.pids[0], slot.replica.phase
        why = f"replica {slot.number} (process {pid}) {what}"
        self._write(why, state, replica=slot.number, pid=pid, phase=phase, **facts)

    def _write(self, why: str, state: State | None = None, **facts: object) -> None:
        now: State = "running" if self._pool.ready() else "forming"
        self._events.write(state or now, why, **facts)


def _kind(ended: Ended) -> Kind:
    if ended.code is None:
        return "lost"
    return "killed" if ended.code < 0 else "failed"


class _NoneStartsError(Exception):
    """No replica starts, and none ever did."""

    def __init__(self, why: str, code: int | None):
        super().__init__(why)
        self.code = code
