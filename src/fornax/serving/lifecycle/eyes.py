"""Looking at the repository from one thread of its own, so that a slow disk stops nothing else."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from fornax.config import ServingError
from fornax.serving.lifecycle.plan import Plan, Situation, make_plan
from fornax.serving.repository import ModelFolder, scan, scan_model

__all__ = ["Eyes"]

T = TypeVar("T")
_log = logging.getLogger("fornax.serving")


class Eyes:
    """What can be seen of a repository; `root` None is one without models.

    `types` are those of models, besides bundles, that someone else serves.
    """

    def __init__(self, root: Path | None, types: frozenset[str]):
        self.root = None if root is None else root.absolute()
        self.problem = ""
        """Why the repository could not be read at the last look; empty when it could."""
        self._types = types
        self._thread = ThreadPoolExecutor(1, "fornax-repository")

    async def all(self) -> dict[str, ModelFolder] | None:
        """Every model; None, with `problem` set, when the repository cannot be read."""
        root = self.root
        if root is None:
            return {}
        try:
            found = await self._see(lambda: scan(root, self._types))
        except ServingError as error:
            if self.problem != str(error):
                _log.error("%s", error)
            self.problem = str(error)
            return None
        self.problem = ""
        return found

    async def one(self, name: str) -> ModelFolder | None:
        """One model; None when there is none.

        Raises:
          ServingError: the name is none, or the repository cannot be read.
        """
        root = self.root
        if root is None:
            return None
        return await self._see(lambda: scan_model(root, name, self._types))

    async def plan(self, situation: Situation) -> Plan:
        """What should be done about a model."""
        return await self._see(lambda: make_plan(situation))

    def close(self) -> None:
        """Look no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _see(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
