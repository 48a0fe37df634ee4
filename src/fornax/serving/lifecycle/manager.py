"""All models of a repository: looks at it, loads side by side, switches, drains, forgets."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from fornax.config import ServingCode, ServingError
from fornax.serving.events import Events
from fornax.serving.lifecycle.copies import Copies
from fornax.serving.lifecycle.eyes import Eyes
from fornax.serving.lifecycle.model import Model
from fornax.serving.lifecycle.states import Instance, Loader
from fornax.serving.repository import ModelFolder

__all__ = ["Manager"]

_log = logging.getLogger("fornax.serving")


class Manager:
    """Keeps in memory what the repository and the operators want there.

    One turn of a model makes a plan of what its folder looks like, starts the loads that it asks
    for and retires what they have replaced. Turns of all models come one after another; loads and
    drains go on beside them, and each ends with another turn.

    Args:
      root: The repository; None for none.
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
        root: Path | None,
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
        self._eyes = Eyes(root, types)
        self._loop_task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def root(self) -> Path | None:
        """The repository."""
        return self._eyes.root

    async def start(self) -> None:
        """Look at the repository, begin to load what it holds, and go on watching it.

        Raises:
          ServingError: the repository cannot be read.
        """
        await self.look()
        if self._eyes.problem:
            raise ServingError(ServingCode.UNAVAILABLE, self._eyes.problem)
        self._loop_task = asyncio.create_task(self._watch(), name="fornax-lifecycle")

    async def stop(self, drain_seconds: float) -> None:
        """Unload everything: what was accepted is answered within `drain_seconds`."""
        self._copies.closing = True
        self._changed.set()
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        async with self.alone():
            for model in self.models.values():
                for instance in list(model.serving.values()):
                    self._copies.retire(model, instance, drain_seconds)
                model.reroute()
            self._publish()
        await self._copies.ended(drain_seconds)
        self._eyes.close()

    async def look(self) -> None:
        """Read the whole repository and do what follows from it."""
        async with self.alone():
            found = await self._eyes.all()
            if found is None:
                return
            for name in self.models.keys() | found.keys():
                self._see(name, found.get(name))
            for model in list(self.models.values()):
                await self.turn(model)

    async def _look_for_names(self) -> None:
        async with self.alone():
            found = await self._eyes.all()
            if found is None:
                return
            for name, folder in found.items():
                if name not in self.models and folder.type == "bundle":
                    self.models[name] = Model(folder, follows_policy=False)
            for name in self.models.keys() - found.keys():
                if self.models[name].idle:
                    del self.models[name]

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Hold this while a turn, or a command, changes what is wanted of a model."""
        try:
            async with self._lock:
                yield
        finally:
            self._changed.set()

    async def look_at(self, name: str) -> Model:
        """Read one model's folder, the lock held; no turn follows.

        Raises:
          ServingError: there is no such model.
        """
        folder = await self._eyes.one(name)
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
            _log.error("%s: %s; what it serves goes on as it was", name, folder.problem)
        if model is not None:
            model.see(folder)
        elif folder is not None:
            self.models[name] = Model(folder, follows_policy=self._follow(name))

    async def turn(self, model: Model) -> None:
        """Plan anew and begin what the plan asks for, the lock held."""
        model.turning, model.due = model.due, False
        try:
            if self.root is None or self._copies.closing:
                return
            model.plan = await self._eyes.plan(model.situation(self.root, self._copies.epoch))
        finally:
            model.turning = False
        model.bundles = dict(model.plan.bundles)
        for source in model.plan.loads:
            if source.version not in model.loading:
                self._copies.load(model, source)
        self._settle(model)

    def _settle(self, model: Model) -> None:
        """Switch to what is ready and let go what it replaced: one step, no request between."""
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
        """Ask for another turn of a model, and of those that lack memory when some came free."""
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
                await self._turns()
            except Exception:
                # A fault of ours in one look must not end all looks; models stay as they are.
                _log.exception("looking at the repository failed")

    async def _turns(self) -> None:
        while due := [model for model in self.models.values() if model.due]:
            for model in due:
                async with self.alone():
                    if model.due and self.models.get(model.name) is model:
                        await self.turn(model)

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
