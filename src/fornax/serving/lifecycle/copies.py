"""Copies of versions on their way into memory and out of it: loaded in turn, drained, closed."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine

from fornax.config import FornaxError, ServingCode, ServingError
from fornax.serving.events import Events, StateChange
from fornax.serving.lifecycle.model import Model
from fornax.serving.lifecycle.states import Failure, Instance, Loader, Source
from fornax.serving.types import State

__all__ = ["Copies"]

_log = logging.getLogger("fornax.serving")
_LAST_SECONDS = 10.0


class Copies:
    """Loads and drains of models; each ends by having its model reconciled.

    Args:
      loader: Makes a version ready to answer.
      events: Told of every change of state.
      at_once: How many versions load at once; the others wait for their turn.
      switch: Called when the copies of a model have changed.
      again: Has a model reconciled; those that lack memory too, where some came free.
    """

    def __init__(
        self,
        *,
        loader: Loader,
        events: Events,
        at_once: int,
        switch: Callable[[Model], None],
        again: Callable[[Model, bool], None],
    ):
        self.epoch = 0
        """How many copies have left memory."""
        self.closing = False
        """Whether nothing is wanted any more."""
        self._loader = loader
        self._events = events
        self._room = asyncio.Semaphore(at_once)
        self._switch = switch
        self._again = again
        self._tasks: set[asyncio.Task[None]] = set()
        self._news: list[StateChange] = []

    async def ended(self, seconds: float) -> None:
        """Wait for all that is under way, and this long at most for what is drained."""
        while self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=seconds + _LAST_SECONDS)
            for task in late:
                _log.error("%s did not end; leaving it", task.get_name())
                task.cancel()

    def load(self, model: Model, source: Source) -> None:
        """Begin to load a version; it waits for its turn."""
        model.loading[source.version] = source
        self._tell(source, State.LOADING)
        self._spawn(self._load_in_turn(model, source))

    async def _load_in_turn(self, model: Model, source: Source) -> None:
        async with self._room:
            started = time.monotonic()
            try:
                if self.closing or source.version not in model.plan.wanted:
                    raise ServingError(ServingCode.CANCELLED, "it was no longer wanted")
                servable = await self._loader(source)
            except Exception as error:
                del model.loading[source.version]
                self._failed(model, source, error)
            else:
                del model.loading[source.version]
                self._loaded(model, Instance(source, servable), started)
        self._again(model, False)

    def _failed(self, model: Model, source: Source, error: Exception) -> None:
        code = ServingCode.INTERNAL
        if isinstance(error, FornaxError):
            code = getattr(error, "code", ServingCode.FAILED_PRECONDITION)
        if self.closing or source.version not in model.plan.wanted:
            self._tell(source, State.UNAVAILABLE, str(error))
            return
        reason = str(error)
        if not isinstance(error, FornaxError):
            reason = f"{type(error).__name__}: {error}"
            _log.error("%s version %d", source.name, source.version, exc_info=error)
        model.failures[source.version] = Failure(source, code, reason, self.epoch)
        self._tell(source, State.UNAVAILABLE, reason)

    def _loaded(self, model: Model, instance: Instance, started: float) -> None:
        version = instance.version
        model.failures.pop(version, None)
        before = model.serving.get(version)
        unwanted = self.closing or version not in model.plan.wanted
        if unwanted and before is not None:
            # It answers until what replaces the version is ready; a new copy is not needed.
            self.retire(model, instance, 0.0)
            self._switch(model)
            return
        model.serving[version] = instance
        if unwanted:
            self.retire(model, instance, 0.0)
        else:
            self._tell(instance.source, State.READY, seconds=time.monotonic() - started)
        if before is not None:
            self.retire(model, before, model.settings.timeouts.drain_seconds)
        self._switch(model)

    def retire(self, model: Model, instance: Instance, seconds: float) -> None:
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
            self.epoch += 1
            if instance.version not in model.serving:
                self._tell(instance.source, State.UNAVAILABLE, "unloaded")
            self._again(model, True)

    def _tell(self, source: Source, state: State, reason: str = "", seconds: float = 0.0) -> None:
        version = str(source.version)
        self._news.append(StateChange(source.name, version, state.value, reason, seconds))

    def publish(self) -> None:
        """Tell listeners, who may ask what is ready: only once the routes say so."""
        news, self._news = self._news, []
        for change in news:
            try:
                self._events.tell_state(change)
            except Exception:
                _log.exception("a listener failed at a change of state")

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
