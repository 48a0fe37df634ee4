"""All models of a repository: looks at it, loads side by side, switches, drains, forgets."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

from fornax.config import FornaxError, ServingCode, ServingError
from fornax.serving.events import Events, StateChange
from fornax.serving.lifecycle.eyes import Eyes
from fornax.serving.lifecycle.model import Model
from fornax.serving.lifecycle.states import Failure, Instance, Loader, Source, State
from fornax.serving.repository import ModelFolder

__all__ = ["Manager"]

_log = logging.getLogger("fornax.serving")
_LAST_SECONDS = 10.0


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
        self.events = events
        self.models: dict[str, Model] = {}
        self._lock = asyncio.Lock()
        self._loader = loader
        self._follow = follow
        self._poll_seconds = poll_seconds
        self._names_only = names_only
        self._room = asyncio.Semaphore(concurrent_loads)
        self._eyes = Eyes(root, types)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop_task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._news: list[StateChange] = []
        self._epoch = 0
        self._closing = False

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
        self._closing = True
        self._changed.set()
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        async with self.alone():
            for model in self.models.values():
                for instance in list(model.serving.values()):
                    self._retire(model, instance, drain_seconds)
                model.reroute()
            self._publish()
        while self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=drain_seconds + _LAST_SECONDS)
            for task in late:
                _log.error("%s did not end; leaving it", task.get_name())
                task.cancel()
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
            if self.root is None or self._closing:
                return
            model.plan = await self._eyes.plan(model.situation(self.root, self._epoch))
        finally:
            model.turning = False
        model.bundles = dict(model.plan.bundles)
        for source in model.plan.loads:
            if source.version not in model.loading:
                self._load(model, source)
        self._settle(model)

    def _settle(self, model: Model) -> None:
        """Switch to what is ready and let go what it replaced: one step, no request between."""
        model.reroute()
        retired = model.to_retire()
        for instance in retired:
            self._retire(model, instance, model.settings.timeouts.drain_seconds)
        if retired:
            model.reroute()
        if model.idle and model.gone:
            self.models.pop(model.name, None)
        shadow, problem = model.settings.shadow, model.shadow_problem()
        if shadow is not None and problem not in ("", model.warned):
            _log.warning("%s version %d: %s", model.name, shadow.version, problem)
        model.warned = problem
        self._publish()

    def _load(self, model: Model, source: Source) -> None:
        model.loading[source.version] = source
        self._tell(source, State.LOADING)
        self._spawn(self._load_in_turn(model, source))

    async def _load_in_turn(self, model: Model, source: Source) -> None:
        async with self._room:
            started = time.monotonic()
            try:
                if self._closing or source.version not in model.plan.wanted:
                    raise ServingError(ServingCode.CANCELLED, "it was no longer wanted")
                servable = await self._loader(source)
            except Exception as error:
                del model.loading[source.version]
                self._failed(model, source, error)
            else:
                del model.loading[source.version]
                self._loaded(model, Instance(source, servable, time.time()), started)
        self._again(model)

    def _failed(self, model: Model, source: Source, error: Exception) -> None:
        code = ServingCode.INTERNAL
        if isinstance(error, FornaxError):
            code = getattr(error, "code", ServingCode.FAILED_PRECONDITION)
        if self._closing or source.version not in model.plan.wanted:
            self._tell(source, State.UNAVAILABLE, str(error))
            return
        reason = str(error)
        if not isinstance(error, FornaxError):
            reason = f"{type(error).__name__}: {error}"
            _log.error("%s version %d", source.name, source.version, exc_info=error)
        model.failures[source.version] = Failure(source, code, reason, self._epoch)
        self._tell(source, State.UNAVAILABLE, reason)

    def _loaded(self, model: Model, instance: Instance, started: float) -> None:
        version = instance.version
        model.failures.pop(version, None)
        before = model.serving.get(version)
        unwanted = self._closing or version not in model.plan.wanted
        if unwanted and before is not None:
            # It answers until what replaces the version is ready; a new copy is not needed.
            self._retire(model, instance, 0.0)
            self._settle(model)
            return
        model.serving[version] = instance
        if unwanted:
            self._retire(model, instance, 0.0)
        else:
            self._tell(instance.source, State.READY, seconds=time.monotonic() - started)
        if before is not None:
            self._retire(model, before, model.settings.timeouts.drain_seconds)
        self._settle(model)

    def _retire(self, model: Model, instance: Instance, seconds: float) -> None:
        """Take a copy out of service; what it accepted is still answered by it."""
        if model.serving.get(instance.version) is instance:
            del model.serving[instance.version]
            self._tell(instance.source, State.UNLOADING)
        model.draining.append(instance)
        self._spawn(self._drain(model, instance, seconds))

    async def _drain(self, model: Model, instance: Instance, seconds: float) -> None:
        name = f"{model.name} version {instance.version}"
        try:
            if not await instance.servable.drain(seconds):
                _log.warning("%s had requests left after %g s of draining", name, seconds)
            await instance.servable.close()
        except Exception:
            _log.exception("%s could not be unloaded cleanly", name)
        finally:
            model.draining.remove(instance)
            self._epoch += 1
            if instance.version not in model.serving:
                self._tell(instance.source, State.UNAVAILABLE, "unloaded")
            self._again(model, memory=True)

    def _again(self, model: Model, *, memory: bool = False) -> None:
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
        while not self._closing:
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

    def _tell(self, source: Source, state: State, reason: str = "", seconds: float = 0.0) -> None:
        version = str(source.version)
        self._news.append(StateChange(source.name, version, state.value, reason, seconds))

    def _publish(self) -> None:
        """Tell listeners, who may ask what is ready: only once the routes say so."""
        news, self._news = self._news, []
        for change in news:
            try:
                self.events.tell_state(change)
            except Exception:
                _log.exception("a listener failed at a change of state")
        self._changed.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
