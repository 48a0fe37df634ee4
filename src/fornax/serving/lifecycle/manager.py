"""All models of a repository: looks at it, loads side by side, switches, drains, forgets."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from fornax.config import ServingCode, ServingError
from fornax.serving.events import Events
from fornax.serving.lifecycle.copies import Copies
from fornax.serving.lifecycle.model import Model
from fornax.serving.lifecycle.plan import Plan, Situation, make_plan
from fornax.serving.lifecycle.states import Instance, Loader
from fornax.serving.repository import ModelFolder, scan, scan_model

__all__ = ["Manager"]

T = TypeVar("T")
_log = logging.getLogger("fornax.serving")


class RepositoryReader:
    """Reads a repository in one thread of its own, so that a slow disk stops nothing else.

    Args:
      root: The repository.
      types: Types of models, besides bundles, that someone else serves.
    """

    def __init__(self, root: Path, types: frozenset[str]):
        self.root = root.absolute()
        self.problem = ""
        """Why the repository could not be read at the last look; empty when it could."""
        self._types = types
        self._thread = ThreadPoolExecutor(1, "fornax-repository")

    async def all(self) -> dict[str, ModelFolder] | None:
        """Every model; None, with `problem` set, when the repository cannot be read."""
        try:
            found = await self._see(lambda: scan(self.root, self._types))
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
        return await self._see(lambda: scan_model(self.root, name, self._types))

    async def plan(self, situation: Situation) -> Plan:
        """What should be done about a model."""
        return await self._see(lambda: make_plan(situation))

    def close(self) -> None:
        """Look no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _see(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class Manager:
    """Keeps in memory what the repository and the operators want there.

    Reconciling a model makes a plan of what its folder looks like, starts the loads that it asks
    for and retires what they have replaced. Models are reconciled one after another; loads and
    drains continue beside that, and each ends by asking for it again.

    Args:
      root: The repository.
      loader: Makes a version ready to answer.
      events: Told of every change of state.
      follow: Which models' version policies are followed from the start.
      poll_seconds: Between looks at the repository; None: look only when asked to.
      names_only: A look by the clock only adds new models, unloaded, and forgets those gone.
      concurrent_loads: How many versions load at once; the others wait for their turn.
      types: Types of models, besides bundles, that someone else serves.
    """

    def __init__(
        self,
        root: Path,
        *,
        loader: Loader,
        events: Events,
        follow: Callable[[str], bool] = lambda name: True,
        poll_seconds: float | None = None,
        names_only: bool = False,
        concurrent_loads: int = 2,
        types: frozenset[str] = frozenset(),
    ):
        self.models: dict[str, Model] = {}
        self._lock = asyncio.Lock()
        self._copies = Copies(
            loader=loader,
            events=events,
            at_once=concurrent_loads,
            switch=self._settle,
            again=self._again,
        )
        self._follow = follow
        self._poll_seconds = poll_seconds
        self._names_only = names_only
        self._reader = RepositoryReader(root, types)
        self._loop_task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def root(self) -> Path:
        """The repository."""
        return self._reader.root

    async def start(self) -> None:
        """Look at the repository, begin to load what it holds, and continue watching it.

        Raises:
          ServingError: the repository cannot be read.
        """
        await self.look()
        if self._reader.problem:
            raise ServingError(ServingCode.UNAVAILABLE, self._reader.problem)
        self._loop_task = asyncio.create_task(self._watch(), name="fornax-lifecycle")

    async def stop(self, drain_seconds: float) -> None:
        """Unload everything: what was accepted is answered within `drain_seconds`."""
        self._copies.closing = True
        self._changed.set()
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        async with self.exclusive():
            for model in self.models.values():
                for instance in list(model.serving.values()):
                    self._copies.retire(model, instance, drain_seconds)
                model.reroute()
            self._publish()
        await self._copies.ended(drain_seconds)
        self._reader.close()

    async def look(self) -> None:
        """Read the whole repository and do what follows from it."""
        async with self.exclusive():
            found = await self._reader.all()
            if found is None:
                return
            for name in self.models.keys() | found.keys():
                self._see(name, found.get(name))
            for model in list(self.models.values()):
                await self.reconcile(model)

    async def _look_for_names(self) -> None:
        async with self.exclusive():
            found = await self._reader.all()
            if found is None:
                return
            for name, folder in found.items():
                if name not in self.models and folder.type == "bundle":
                    self.models[name] = Model(folder, follows_policy=False)
            for name in self.models.keys() - found.keys():
                if self.models[name].idle:
                    del self.models[name]

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Hold this while reconciling, or a command, changes what is wanted of a model."""
        try:
            async with self._lock:
                yield
        finally:
            self._changed.set()

    async def look_at(self, name: str) -> Model:
        """Read one model's folder, the lock held; it is not reconciled.

        Raises:
          ServingError: there is no such model.
        """
        folder = await self._reader.one(name)
        self._see(name, folder)
        model = self.models.get(name)
        if model is None or folder is None:
            raise ServingError(
                ServingCode.NOT_FOUND, f"the repository has no model {name!r}; check the name"
            )
        return model

    def _see(self, name: str, folder: ModelFolder | None) -> None:
        if folder is not None and folder.type != "bundle":
            folder = None
        model = self.models.get(name)
        before = "" if model is None else model.folder.problem
        if folder is not None and folder.problem not in ("", before):
            _log.error("%s: %s; what it serves is unchanged", name, folder.problem)
        if model is not None:
            model.see(folder)
        elif folder is not None:
            self.models[name] = Model(folder, follows_policy=self._follow(name))

    async def reconcile(self, model: Model) -> None:
        """Plan again and begin what the plan asks for, the lock held."""
        model.reconciling, model.due = model.due, False
        try:
            if self._copies.closing:
                return
            model.plan = await self._reader.plan(model.situation(self.root, self._copies.epoch))
        finally:
            model.reconciling = False
        model.bundles = dict(model.plan.bundles)
        for source in model.plan.loads:
            if source.version not in model.loading:
                self._copies.load(model, source)
        self._settle(model)

    def _settle(self, model: Model) -> None:
        """Switch to what is ready and release what it replaced: one step, no request between."""
        model.reroute()
        retired = model.to_retire()
        for instance in retired:
            self._copies.retire(model, instance, model.settings.timeouts.drain_seconds)
        if retired:
            model.reroute()
        if model.idle and model.gone:
            self.models.pop(model.name, None)
        shadow, problem = model.settings.shadow, model.shadow_problem()
        if shadow is not None and problem not in ("", model.warned):
            _log.warning("%s version %d: %s", model.name, shadow.version, problem)
        model.warned = problem
        self._publish()

    def _again(self, model: Model, memory: bool) -> None:
        """Have a model reconciled, and those that lack memory when some came free."""
        model.due = True
        if memory:
            for each in self.models.values():
                each.due = each.due or each.lacks_memory
        self._wake.set()
        self._publish()

    async def _watch(self) -> None:
        next_look = time.monotonic() + (self._poll_seconds or 0)
        while True:
            left = None if self._poll_seconds is None else max(0.0, next_look - time.monotonic())
            try:
                async with asyncio.timeout(left):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                if self._poll_seconds is not None and time.monotonic() >= next_look:
                    await (self._look_for_names() if self._names_only else self.look())
                    next_look = time.monotonic() + self._poll_seconds
                await self._reconcile_due()
            except Exception:
                # A fault of ours in one look must not end all looks; models stay as they are.
                _log.exception("looking at the repository failed")

    async def _reconcile_due(self) -> None:
        while due := [model for model in self.models.values() if model.due]:
            for model in due:
                async with self.exclusive():
                    if model.due and self.models.get(model.name) is model:
                        await self.reconcile(model)

    async def settled(self, model: Model | None = None) -> None:
        """Wait until nothing loads any more, of one model or of all."""
        while not self._copies.closing:
            models = list(self.models.values()) if model is None else [model]
            there = [each for each in models if self.models.get(each.name) is each]
            under_way = any(each.loading for each in models) or any(each.due for each in there)
            if not under_way and not self._lock.locked():
                return
            self._changed.clear()
            await self._changed.wait()

    async def unloaded(self, model: Model, instances: list[Instance]) -> None:
        """Wait until these copies are out of memory."""
        while any(each in model.instances() for each in instances):
            self._changed.clear()
            await self._changed.wait()

    def _publish(self) -> None:
        self._copies.publish()
        self._changed.set()
