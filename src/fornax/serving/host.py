"""The host: every model of a repository behind one set of calls, for HTTP, gRPC and operators."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from fornax.config import ServingCode, ServingError
from fornax.serving import telling
from fornax.serving.bundle_loader import BundleLoader
from fornax.serving.describe import model_config, model_metadata
from fornax.serving.entries import Entries
from fornax.serving.entry import Entry, EntryFactory
from fornax.serving.events import Events
from fornax.serving.execution.counters import ModelStatistics
from fornax.serving.host_settings import HostSettings
from fornax.serving.lifecycle import IndexEntry, Loader, Manager, Rollback, commands
from fornax.serving.naming import Naming, no_function
from fornax.serving.servable import DevicePool
from fornax.serving.types import InferRequest, InferResult, ModelMetadata
from fornax.serving.v2.parameters import function_of

__all__ = ["Host", "HostSettings"]

_log = logging.getLogger("fornax.serving")


class Host:
    """Serves the models of a repository. All methods are called in the event loop's thread.

    Args:
      config: Where the repository is, and how its models change.
      devices: What models are loaded onto.
      events: Told of states and of requests; one is made where none is given.
      entries: Factories of models that are no bundles, by the `type` in their serving.yaml.
      loader: Makes a version ready; by default opens it as a bundle and makes a Servable of it.
      concurrent_loads: How many versions load at once.

    Raises:
      ServingError: the repository cannot be read, when there are `entries`.
      FornaxError: an entry's settings are wrong.
    """

    def __init__(
        self,
        config: HostSettings,
        *,
        devices: DevicePool | None = None,
        events: Events | None = None,
        entries: Mapping[str, EntryFactory] | None = None,
        loader: Loader | None = None,
        concurrent_loads: int = 2,
    ):
        self._config = config
        self.events = Events() if events is None else events
        self.stopping = False
        """Set before requests stop coming: the server is no longer ready, and still answers."""
        self._others = Entries(config.repository, entries or {}, self.events)
        every = config.control != "explicit" or "*" in config.load
        self._wanted = lambda name: every or name in config.load
        self._manager = Manager(
            config.repository,
            loader=loader or BundleLoader(devices, self.events, config.trust_executables),
            events=self.events,
            follow=self._wanted,
            poll_seconds=None if config.control == "none" else config.poll_seconds,
            names_only=config.control == "explicit",
            concurrent_loads=concurrent_loads,
            types=frozenset(entries or {}),
        )
        self._models = self._manager.models
        self._naming = Naming(self._models, self._others.entries, lambda: self._read)
        self._read = self._started = self._stopped = False
        self._must_be_ready: frozenset[str] = frozenset()

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The models that are no bundles, by name; they are there before `start`."""
        return self._others.entries

    async def start(self) -> None:
        """Load what is to be served and return when each version is ready or has failed.

        Models answer, and can be asked for, as soon as they are ready, before this returns.

        Raises:
          ServingError: the repository cannot be read, or has no model that `load` names.
        """
        try:
            await self._manager.start()
            self._read = True
            if self._config.control == "explicit":
                self._check_names()
            self._must_be_ready = frozenset(
                name for name, model in self._models.items() if model.follows_policy
            )
            await asyncio.gather(self._manager.settled(), self._others.start(self._wanted))
        except ServingError:
            await self._manager.stop(0.0)
            raise
        self._started = True

    def _check_names(self) -> None:
        for name in self._config.load:
            if name != "*" and name not in self._others.entries:
                self._naming.model(name)

    async def stop(self, drain_seconds: float) -> None:
        """Unload everything; what was accepted is answered if that takes no longer."""
        self.stopping = self._stopped = True
        await asyncio.gather(self._manager.stop(drain_seconds), self._others.stop(drain_seconds))

    def submit(self, request: InferRequest) -> "asyncio.Future[InferResult]":
        """Take in a request; the future gets its result, or the ServingError that became of it.

        The copy of the version that accepts it answers it, whatever is deployed meanwhile.
        `model` may name a function as `name:function`, `version` may be a label.

        Raises:
          ServingError: it is refused: no such model, version or function, none ready, or what
            `Servable.submit` refuses.
        """
        model = self._models.get(request.model)
        instance = None if model is None else model.routes.get(request.version)
        if model is None or instance is None:
            return self._submit_otherwise(request)
        if request.function and request.function not in instance.servable.functions:
            error = no_function(instance, request.function)
            self.events.tell_finished(request, error)
            raise error
        answer = instance.servable.submit(request)
        shadowing = model.shadowing
        if shadowing is not None and shadowing.main is instance and shadowing.running:
            shadowing.watch(request, answer)
        return answer

    def _submit_otherwise(self, request: InferRequest) -> "asyncio.Future[InferResult]":
        try:
            if request.model in self._others.entries:
                return self._others.submit(request)
            name, function = function_of(request.model, request.function)
            self._naming.instance(name, request.version)
        except ServingError as error:
            self.events.tell_finished(request, error)
            raise
        request.model, request.function = name, function
        return self.submit(request)

    def live(self) -> bool:
        """Whether the server runs."""
        return not self._stopped

    def ready(self) -> bool:
        """Whether requests should be sent here.

        With strict readiness only while every model that was to be served at the start has a
        version that answers; a model that comes later does not count.
        """
        if not self._started or self.stopping:
            return False
        if not self._config.strict_readiness:
            return True
        models = (self._models.get(name) for name in self._must_be_ready)
        return self._others.ready() and all(
            model.default is not None for model in models if model is not None and model.to_serve
        )

    def model_ready(self, name: str, version: str = "") -> bool:
        """Whether a model, or a version or label of it, answers.

        Raises:
          ServingError: NOT_FOUND, when the repository has no such model.
        """
        if name in self._others.entries:
            return self._others.entries[name].ready() and version in ("", "1")
        name, function = function_of(name)
        instance = self._naming.model(name).routes.get(version)
        return instance is not None and (not function or function in instance.servable.functions)

    def metadata(self, name: str, version: str = "") -> ModelMetadata:
        """What a version, the default or the function of one takes and gives.

        Raises:
          ServingError: it does not answer, and why.
        """
        if name in self._others.entries:
            return self._others.models[name].metadata()
        model, instance, function = self._naming.find(name, version)
        versions = map(str, sorted(model.serving))
        return model_metadata(name, versions, instance, function)

    def config(self, name: str, version: str = "") -> dict[str, Any]:
        """A version's configuration in Triton's words.

        Raises:
          ServingError: it does not answer, and why.
        """
        if name in self._others.entries:
            return dict(self._others.entries[name].config())
        model, instance, function = self._naming.find(name, version)
        return model_config(name, instance, model.settings, function)

    def index(self, ready_only: bool = False) -> list[IndexEntry]:
        """The repository's models and their versions: what they do, and why not."""
        entries = [each for _, model in sorted(self._models.items()) for each in model.index()]
        entries += self._others.index()
        return [each for each in entries if not ready_only or each.state == "READY"]

    def statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        """Counters of the versions in memory, of all models or one.

        Raises:
          ServingError: there is no such model, or no such version of it in memory.
        """
        if name in self._others.models:
            return [self._others.models[name].statistics()]
        name = function_of(name)[0]
        if name:
            model = self._naming.model(name)
            found = telling.statistics([model], version)
            if version and not found:
                raise model.refusal(version)
            return found
        others = [each.statistics() for each in self._others.models.values()]
        return telling.statistics(self._models.values(), version) + others

    async def load(self, name: str, version: str = "") -> None:
        """Load what a model's policy picks, or one version; return when it answers.

        Raises:
          ServingError: no such model or version, control is none, or why it cannot be served.
        """
        self._may_change("loaded")
        if name in self._others.entries:
            await self._others.load(name)
        else:
            await commands.load(self._manager, name, version)

    async def unload(self, name: str, version: str = "") -> None:
        """Take a model, or one version, out of service; return when it is out of memory.

        Raises:
          ServingError: no such model or version, or control is none.
        """
        self._may_change("unloaded")
        if name in self._others.entries:
            await self._others.unload(name)
        else:
            await commands.unload(self._manager, name, version)

    async def rollback(self, name: str, version: str = "") -> Rollback:
        """Put an older version in place of the one that answers and hold the model there.

        It outlasts a restart. Without a version: the newest older one that loads.

        Raises:
          ServingError: nothing to roll back to, and why; then nothing has changed.
        """
        return await commands.rollback(self._manager, name, version)

    async def release(self, name: str) -> None:
        """End a rollback; the version policy is followed again.

        Raises:
          ServingError: no such model, or the pin cannot be removed.
        """
        await commands.release(self._manager, name)

    def shadow_report(self, name: str) -> dict[str, Any]:
        """How the answers of a model's shadow compare with the main ones, as JSON has it.

        Raises:
          ServingError: no such model, or it has no shadow.
        """
        return telling.shadow_report(self._naming.model(name))

    def shadow_reports(self) -> list[dict[str, Any]]:
        """The reports of all models that have one."""
        return [m.shadowing.report() for m in self._models.values() if m.shadowing is not None]

    async def poll(self) -> None:
        """Look at the repository now; return when what follows from it is done.

        With control=none nothing follows from anything.
        """
        if self._config.control == "none":
            _log.warning("control=none: the repository is not looked at again")
            return
        await self._manager.look()
        await self._manager.settled()

    def _may_change(self, done: str) -> None:
        if self._config.control == "none":
            raise ServingError(
                ServingCode.UNAVAILABLE,
                f"models are not {done} by request here: the server runs with control=none; start "
                "it with --control poll or explicit",
            )
