"""Files of memory without a name: an agent makes them, and the launch holds them open besides.

So what is in them outlives agent and controller, and is gone with the launch. Processes of one
machine find each other's files by `/proc/PID/fd/N`; the inode says that it still is the same file.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fornax.config.snapshot_file import SnapshotFile

__all__ = ["KeptMemory", "adopt", "memory_files", "name_of", "path_of", "whole_steps"]

_COUNT = 2


def memory_files(name: str) -> list[int]:
    """Descriptors of two files without a name: nothing is left of them after those that hold them.
    None where the system has no such files."""
    if not hasattr(os, "memfd_create"):
        return []
    return [os.memfd_create(f"{name}-{number}") for number in range(_COUNT)]


def path_of(descriptor: int) -> str:
    """Where other processes of this machine find a file of this one."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def name_of(descriptor: int) -> list[Any]:
    """Path and inode of a file, for `KeptMemory`."""
    return [path_of(descriptor), os.fstat(descriptor).st_ino]


def adopt(memory: list[int], paths: Sequence[str]) -> list[int]:
    """Let the two newest snapshots that lie in some files take the places in `memory`.

    Args:
      memory: descriptors, which are closed where another file takes the place.
      paths: of the files; those that are gone are left out.

    Returns:
      `memory`, of two files again where it was empty.
    """
    found: dict[int, int] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            whole = SnapshotFile(descriptor).found()
            if whole is None or whole.step in found:
                os.close(descriptor)
            else:
                found[whole.step] = descriptor
    newest = sorted(found)[-_COUNT:]
    for step in found.keys() - set(newest):
        os.close(found[step])
    memory += [] if memory else memory_files("fornax")
    for place, step in enumerate(newest):
        os.close(memory[place])
        memory[place] = found[step]
    return memory


def whole_steps(memory: Sequence[int]) -> list[int]:
    """The steps of the snapshots in some files, by their markers."""
    found = (SnapshotFile(each).found() for each in memory)
    return sorted(each.step for each in found if each is not None)


@dataclass(frozen=True, kw_only=True)
class _Held:
    """What one agent has, through descriptors of this process."""

    rank: int
    files: list[int]
    programs: int | None


@dataclass
class KeptMemory:
    """The files of a run's agents, as the launch holds them."""

    _agents: dict[int, _Held] = field(default_factory=dict)  # by process, the newest last
    _stale: set[int] = field(default_factory=set)
    _since: int = 0

    def hold(self, rank: int, agent: int, files: Sequence[Any], programs: Any) -> None:
        """Open what an agent has, by `name_of`; nothing where it is gone already."""
        held = [each for each in map(_opened, files) if each is not None]
        self.drop([agent])
        opened = None if programs is None else _opened(programs)
        self._agents[agent] = _Held(rank=rank, files=held, programs=opened)

    def settle(self, agents: Sequence[int], hosts: int, step: int) -> None:
        """A group makes steps from `step` on: what agents have that are not in it goes; that of
        ranks which it has no more, once it has snapshots of its own."""
        gone = self._agents.keys() - set(agents)
        self._stale = {each for each in gone if self._agents[each].rank >= hosts}
        self.drop(sorted(gone - self._stale))
        self._since = step

    def prune(self) -> None:
        """Give up what is no longer useful; to be called now and then."""
        if not self._stale:
            return
        current = [held for agent, held in self._agents.items() if agent not in self._stale]
        newest = [max(whole_steps(held.files), default=-1) for held in current]
        if newest and min(newest) >= self._since:
            self.drop(sorted(self._stale))

    def places(self) -> dict[int, dict[str, Any]]:
        """By rank, where an agent that starts finds what there was."""
        found: dict[int, dict[str, Any]] = {}
        for held in self._agents.values():
            place = found.setdefault(held.rank, {"files": [], "programs": None})
            place["files"] += map(path_of, held.files)
            newer = held.programs is not None and os.fstat(held.programs).st_size
            if held.programs is not None and (newer or place["programs"] is None):
                place["programs"] = path_of(held.programs)
        return found

    def drop(self, agents: Sequence[int]) -> None:
        """Close the files of some agents."""
        for agent in agents:
            held = self._agents.pop(agent, None)
            self._stale.discard(agent)
            if held is not None:
                for each in [*held.files, held.programs]:
                    if each is not None:
                        os.close(each)

    def close(self) -> None:
        """Close all files."""
        self.drop(list(self._agents))


def _opened(name: Sequence[Any]) -> int | None:
    path, inode = name
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(descriptor).st_ino == inode:
            return descriptor
        os.close(descriptor)
    return None
