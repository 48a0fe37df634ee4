"""Completions by samplers that are processes of their own, on this machine or others.

Shards of a round wait in one queue, from which each sampler takes its next: what one that is lost
had, another draws from the beginning, to the same bits. Weights go over connections of their own,
so that a sampler draws on while the next version comes.
"""

import contextlib
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import cast

from fornax.config.credentials import Credentials, TlsError
from fornax.config.errors import ClusterError, EngineError
from fornax.config.frames import Frame, Kind, LinkError, connect, receive, send
from fornax.tune.rollout.sampler import (
    SamplerStats,
    SampleSettings,
    Weights,
    check_seeds,
    split_shards,
)
from fornax.tune.rollout.segments import HostWeights, Segment, SegmentPool
from fornax.tune.rollout.shards import (
    Shard,
    array_frames,
    frame_completions,
    mapped_frame,
    shard_frame,
)
from fornax.tune.rollout.types import Completion

__all__ = ["RemoteSampler"]

_AGAIN_SECONDS = 0.2
_TICK_SECONDS = 0.5
_CONNECT_SECONDS = 10.0


class RemoteSampler:
    """A `PartSampler` over the samplers at some addresses; any thread may draw.

    A sampler holds the versions that it was sent until newer ones are drawn with. `update` only
    hands the arrays over: threads send them, while rounds of the version before are drawn.

    Example:
      addresses = ["127.0.0.1:4001", "127.0.0.1:4002"]
      sampler = RemoteSampler(addresses, credentials, shards=8, max_model_len=2048)
      sampler.update(weights, version=0)
      groups = sampler.sample([[1, 5, 9]], SampleSettings(n=4, max_tokens=32), seeds=[7])
    """

    def __init__(
        self,
        addresses: Sequence[str],
        credentials: Credentials,
        *,
        shards: int,
        max_model_len: int,
        versions: int = 2,
        lost_seconds: float = 600.0,
    ) -> None:
        """Begin to connect, in threads.

        Args:
          addresses: host:port of each sampler; looked up again for each connection.
          credentials: what they want to see.
          shards: parts in which prompts are drawn, each in one sampler.
          max_model_len: tokens of a prompt and its completion together, at most, of the samplers.
          versions: how many of the newest are kept for samplers that have them not, or not yet.
          lost_seconds: how long all samplers may be out of reach.
        """
        self.shards, self.max_model_len = shards, max_model_len
        self._versions, self._lost_seconds = versions, lost_seconds
        self.session = secrets.token_hex(8)
        """Names this object to samplers: what they hold of another is not useful to it."""
        self.changed = threading.Condition()
        self.pool = SegmentPool()
        """Memory for versions; used with `changed` held."""
        self.weights: dict[int, Segment] = {}
        """What may still be asked for, by version."""
        self.closed = False
        self.refused = ""
        """Why a sampler cannot be spoken to, ever."""
        self._waiting: deque[_Task] = deque()
        self._interrupted = False
        self._version: int | None = None
        self._numbers = 0
        self._stats = SamplerStats()
        self._drawing, self._began = 0, 0.0
        self.bytes = 0
        """Bytes of weights that were sent."""
        self._links = [_Link(self, addresses, n, credentials) for n in range(len(addresses))]

    def sample(
        self, prompts: Sequence[Sequence[int]], settings: SampleSettings, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """Completions of each prompt under the newest version; see `Sampler`.

        Raises:
          EngineError: what a sampler does not support; or after `interrupt`.
          ClusterError: no sampler can be reached.
        """
        return self.at(self._newest()).sample(prompts, settings, seeds)

    def sample_part(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[SampleSettings],
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        """See `PartSampler`; raises what `sample` raises."""
        return self.at(self._newest()).sample_part(prompts, settings, seeds)

    def at(self, version: int) -> "VersionSampler":
        """The sampler of one version, whatever `update` says meanwhile."""
        return VersionSampler(self, version)

    def draw(
        self,
        version: int,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[SampleSettings],
        seeds: Sequence[int],
        parts: Sequence[slice],
    ) -> list[list[Completion]]:
        """Completions of each prompt under a version that `update` was given; see `sample`."""
        check_seeds(prompts, seeds)
        tasks = []
        with self.changed:
            if version not in self.weights:
                raise EngineError(f"version {version} of the weights is no longer held")
            for part in parts:
                shard = Shard(
                    number=self._numbers,
                    version=version,
                    prompts=prompts[part],
                    settings=settings[part],
                    seeds=seeds[part],
                )
                self._numbers += 1
                tasks.append(_Task(shard))
            for old in [each for each in self.weights if each < version]:
                self.pool.leave(self.weights.pop(old))
            self._waiting.extend(tasks)
            self._count_time(1)
            self.changed.notify_all()
        try:
            self._wait(tasks)
        finally:
            with self.changed:
                self._count_time(-1)
                for task in tasks:
                    task.wanted = False
        return [group for task in tasks for group in task.found]

    def _newest(self) -> int:
        if self._version is None:
            raise EngineError("the samplers have no weights; call update first")
        return self._version

    def _count_time(self, change: int) -> None:
        """One thread more or less waits for completions: time counts while any does."""
        now = time.monotonic()
        if self._drawing:
            self._stats = _sum(self._stats, SamplerStats(seconds=now - self._began))
        self._drawing, self._began = self._drawing + change, now

    def update(self, params: Weights, version: int) -> None:
        """Let the samplers have another version, which is copied; returns before they have it.

        Args:
          params: `HostWeights`: path to array, on the host, of all parameters.
          version: what tokens are tagged with; later ones have greater numbers.
        """
        given = cast("HostWeights", params)
        with self.changed:
            segment, layout = self.pool.take(given)
        segment.write(given, layout)
        with self.changed:
            self._interrupted = False
            self._version = version
            dropped = sorted(self.weights.keys() | {version})[: -self._versions]
            for old in {version, *dropped} & self.weights.keys():
                self.pool.leave(self.weights.pop(old))
            self.weights[version] = segment
            self.changed.notify_all()
            self._stats = _sum(self._stats, SamplerStats(updates=1))

    def interrupt(self) -> None:
        """Make `sample` raise EngineError until the next `update`; from any thread."""
        with self.changed:
            self._interrupted = True
            self.changed.notify_all()
        for link in self._links:
            if link.task is not None:
                link.cut("work")

    def stats(self) -> SamplerStats:
        """Sums over all samplers; `seconds` is the time that drawing took altogether."""
        with self.changed:
            return self._stats

    def close(self) -> None:
        """End the connections; samplers stop what they draw."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
            for segment in self.weights.values():
                self.pool.leave(segment)
            self.weights.clear()
            self.pool.close()
        for link in self._links:
            link.close()

    def next_task(self) -> "_Task | None":
        """The next shard to draw, waited for; None after `close`."""
        with self.changed:
            while not self.closed:
                while self._waiting:
                    if (task := self._waiting.popleft()).wanted:
                        return task
                self.changed.wait()
        return None

    def put_back(self, task: "_Task") -> None:
        """A shard that its sampler did not answer: the next one to be drawn."""
        with self.changed:
            if task.wanted:
                self._waiting.appendleft(task)
                self.changed.notify_all()

    def finish(self, task: "_Task", frame: Frame) -> None:
        """Take a sampler's answer."""
        with self.changed:
            if not task.wanted:
                return
            if frame.kind is Kind.REFUSED:
                task.refused = str(frame.facts.get("why"))
            else:
                task.found, stats = frame_completions(frame)
                self._stats = _sum(self._stats, stats)
            task.done = True
            self.changed.notify_all()

    def _wait(self, tasks: Sequence["_Task"]) -> None:
        seen = time.monotonic()
        with self.changed:
            while not all(task.done for task in tasks):
                if self._interrupted or self.closed:
                    raise EngineError(
                        "sampling was interrupted; it continues after the next update"
                    )
                if self.refused:
                    raise ClusterError(self.refused)
                if any(link.connected for link in self._links):
                    seen = time.monotonic()
                elif time.monotonic() - seen > self._lost_seconds:
                    names = ", ".join(link.address for link in self._links)
                    raise ClusterError(
                        f"no sampler at {names} could be reached for {self._lost_seconds:g} s; see "
                        "cluster/sampler-N.log of the run directory"
                    )
                self.changed.wait(_TICK_SECONDS)
        refused = [task.refused for task in tasks if task.refused]
        if refused:
            raise EngineError(f"a sampler: {refused[0]}")


@dataclass(frozen=True)
class VersionSampler:
    """A `RemoteSampler` held to one version."""

    inner: RemoteSampler
    version: int

    def sample(
        self, prompts: Sequence[Sequence[int]], settings: SampleSettings, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """See `RemoteSampler.sample`."""
        same, parts = [settings] * len(prompts), split_shards(len(prompts), self.inner.shards)
        return self.inner.draw(self.version, prompts, same, seeds, parts)

    def sample_part(
        self,
        prompts: Sequence[Sequence[int]],
        settings: Sequence[SampleSettings],
        seeds: Sequence[int],
    ) -> list[list[Completion]]:
        """See `RemoteSampler.sample_part`."""
        return self.inner.draw(self.version, prompts, settings, seeds, [slice(None)])

    @property
    def max_model_len(self) -> int:
        """See `PartSampler`."""
        return self.inner.max_model_len

    @property
    def shards(self) -> int:
        """See `PartSampler`."""
        return self.inner.shards

    def update(self, params: Weights, version: int) -> None:
        """See `RemoteSampler.update`; this object stays with its version."""
        self.inner.update(params, version)

    def stats(self) -> SamplerStats:
        """See `RemoteSampler.stats`."""
        return self.inner.stats()

    def close(self) -> None:
        """See `RemoteSampler.close`."""
        self.inner.close()


@dataclass(eq=False)
class _Task:
    """A shard on its way."""

    shard: Shard
    found: list[list[Completion]] = field(default_factory=list)
    refused: str = ""
    done: bool = False
    wanted: bool = True
    """Whether somebody waits for it."""


class _Link:
    """One sampler: a thread that has it draw, and one that sends it weights."""

    def __init__(
        self,
        owner: RemoteSampler,
        addresses: Sequence[str],
        number: int,
        credentials: Credentials,
    ) -> None:
        self._owner, self._credentials = owner, credentials
        self._addresses, self._number = addresses, number
        self.task: _Task | None = None
        self.connected = False
        # The sampler's process, as it names itself, that each connection found.
        self._processes: dict[str, str] = {}
        self._sockets: dict[str, socket.socket] = {}
        # Versions whose memory the sampler maps.
        self._lent: dict[int, Segment] = {}
        for run in (self._work, self._send_weights):
            threading.Thread(target=run, name=f"sampler {number}", daemon=True).start()

    @property
    def address(self) -> str:
        """Where the sampler is now."""
        return self._addresses[self._number]

    def cut(self, role: str) -> None:
        """End a connection; its thread makes another one."""
        found = self._sockets.get(role)
        if found is not None:
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut("work")
        self.cut("weights")

    @contextlib.contextmanager
    def _connection(self, role: str) -> Iterator[tuple[socket.socket, Frame]]:
        """A connection, and what the sampler said on it first.

        Raises:
          LinkError: when the sampler is not there, or needs another token.
        """
        with contextlib.ExitStack() as stack:
            found = connect(self.address, _CONNECT_SECONDS)
            connection = stack.enter_context(self._credentials.dial(found))
            stack.callback(self._sockets.pop, role, None)
            hello = self._join(connection, role)
            if role == "weights" and (near := _dial_here(hello.facts.get("local"))) is not None:
                connection.close()
                connection = stack.enter_context(near)
                hello = self._join(connection, role)
            with self._owner.changed:
                self._processes[role] = str(hello.facts.get("process"))
                self._owner.changed.notify_all()
            yield connection, hello

    def _join(self, connection: socket.socket, role: str) -> Frame:
        """Say who this is; what the sampler answers."""
        facts = {"token": self._credentials.token, "role": role, "session": self._owner.session}
        # A sampler that starts has the connection in its backlog: it answers when it is ready.
        self._sockets[role] = connection
        if self._owner.closed:
            raise LinkError("closed")
        try:
            send(connection, Frame(kind=Kind.JOIN, facts=facts))
            return receive(connection)
        except TlsError as error:
            self._owner.refused = f"the sampler at {self.address}: {error}"
            raise

    def _work(self) -> None:
        while not self._owner.closed:
            with contextlib.suppress(LinkError), self._connection("work") as (connection, _):
                self.connected = True
                while (task := self._owner.next_task()) is not None:
                    self.task = task
                    self._draw(connection, task)
                    self.task = None
            task, self.task, self.connected = self.task, None, False
            if task is not None:
                self._owner.put_back(task)
            time.sleep(0.0 if self._owner.closed else _AGAIN_SECONDS)

    def _draw(self, connection: socket.socket, task: _Task) -> None:
        send(connection, shard_frame(task.shard))
        while (frame := receive(connection)).facts.get("number") != task.shard.number:
            pass  # of a shard that nobody waits for any more
        self._take_back(frame)
        try:
            self._owner.finish(task, frame)
        except (KeyError, TypeError, ValueError) as error:
            raise LinkError(f"an answer makes no sense: {error!r}") from error

    def _send_weights(self) -> None:
        while not self._owner.closed:
            with contextlib.suppress(LinkError), self._connection("weights") as (where, hello):
                sent = {int(version) for version in hello.facts.get("versions", ())}
                while (version := self._next_version(sent)) is not None:
                    self._send_version(where, version)
                    sent.add(version)
            with self._owner.changed:
                while self._lent:
                    self._owner.pool.leave(self._lent.popitem()[1], lost=True)
            time.sleep(0.0 if self._owner.closed else _AGAIN_SECONDS)

    def _next_version(self, sent: set[int]) -> int | None:
        """The oldest version that the sampler has not and may need; None after `close`.

        Raises:
          LinkError: when another process has taken the sampler's place.
        """
        owner = self._owner
        with owner.changed:
            while not owner.closed:
                if self._processes.get("work", "") not in ("", self._processes["weights"]):
                    raise LinkError("the sampler was replaced")
                missing = sorted(owner.weights.keys() - sent)
                if missing:
                    return missing[0]
                owner.changed.wait()
        return None

    def _send_version(self, where: socket.socket, version: int) -> None:
        owner = self._owner
        with owner.changed:
            segment, keep = owner.weights.get(version), min(owner.weights, default=version)
            if segment is None:  # dropped meanwhile
                return
            segment.users += 1
            near = where.family == getattr(socket, "AF_UNIX", None)
            if near:
                self._lent[version] = segment
        try:
            if near:
                assert segment.descriptor is not None
                send(where, mapped_frame(version, segment, keep))
                _pass_on(where, segment.descriptor)
            else:
                for frame in array_frames(version, segment.arrays(), keep):
                    send(where, frame)
            answer = receive(where)
        finally:
            if not near:
                with owner.changed:
                    owner.pool.leave(segment)
        if answer.kind is not Kind.READY:
            raise LinkError(str(answer.facts.get("why")))
        self._take_back(answer)
        with owner.changed:
            owner.bytes += sum(array.nbytes for array in segment.arrays().values())

    def _take_back(self, answer: Frame) -> None:
        """Memory that the sampler says it has no more use for."""
        oldest = int(answer.facts.get("oldest", 0))
        with self._owner.changed:
            for version in [each for each in self._lent if each < oldest]:
                self._owner.pool.leave(self._lent.pop(version))


def _dial_here(name: object) -> socket.socket | None:
    """A connection to a socket of this machine; None where no such name is known."""
    if not isinstance(name, str) or sys.platform != "linux":
        return None
    made = socket.socket(socket.AF_UNIX)
    try:
        made.connect(f"\0{name}")
    except OSError:
        made.close()
        return None
    return made


def _pass_on(where: socket.socket, descriptor: int) -> None:
    try:
        socket.send_fds(where, [b"\0"], [descriptor])
    except OSError as error:
        raise LinkError(f"the other end cannot be reached: {error}") from error


def _sum(one: SamplerStats, other: SamplerStats) -> SamplerStats:
    names = [each.name for each in fields(SamplerStats)]
    return SamplerStats(**{name: getattr(one, name) + getattr(other, name) for name in names})
