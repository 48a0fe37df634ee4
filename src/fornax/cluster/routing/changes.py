"""Calls that change replicas: they reach all of them, and those that are started later."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

from fornax.cluster.routing.pool import Phase, Replica, ReplicaPool

__all__ = ["Changes"]

A = TypeVar("A")

_ALIVE: tuple[Phase, ...] = ("ready", "unready", "draining")


class Changes:
    """The calls that changed all replicas of a pool, in order; one is made at a time."""

    def __init__(self, pool: ReplicaPool):
        self._pool = pool
        self._made: dict[Hashable, Callable[[Replica], Awaitable[object]]] = {}
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()

    async def make(
        self,
        key: Hashable,
        change: Callable[[Replica], Awaitable[A]],
        failed: Callable[[A], bool],
    ) -> tuple[Replica, A] | None:
        """Have every replica make a change, to the end even where the caller is cancelled.

        Args:
          key: of two changes with equal keys a later replica makes the latter only.
          change: asks one replica; it does not raise.
          failed: whether an answer says that the change was not made.

        Returns:
          The first failure, else the first answer, and whose it is; None without replicas.
        """
        task = asyncio.create_task(self._make(key, change, failed))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _make(
        self,
        key: Hashable,
        change: Callable[[Replica], Awaitable[A]],
        failed: Callable[[A], bool],
    ) -> tuple[Replica, A] | None:
        async with self._changing:
            replicas = [each for each in self._pool.replicas.values() if each.phase in _ALIVE]
            if not replicas:
                return None
            answers = await asyncio.gather(*(self._ask(each, change) for each in replicas))
            failures = [number for number, answer in enumerate(answers) if failed(answer)]
            if not failures:
                self._made.pop(key, None)
                self._made[key] = change
        shown = failures[0] if failures else 0
        return replicas[shown], answers[shown]

    async def admit(self, replica: Replica) -> None:
        """Make the changes that the others had, then let a new replica take requests.

        A change that fails, such as the unloading of what it has not loaded, is none it lacks.
        """
        async with self._changing:
            for change in self._made.values():
                await self._ask(replica, change)
            self._pool.enter(replica, "ready")

    async def _ask(self, replica: Replica, change: Callable[[Replica], Awaitable[A]]) -> A:
        with replica.answering():
            return await change(replica)
