"""The host: every model of a repository behind one set of calls, for HTTP, gRPC and operators."""

import asyncio
import logging
from collections.abc import Mapping

from fornax.config import ServingCode, ServingError, did_you_mean
from fornax.serving.backend import Backend, BackendFactory
from fornax.serving.backends import Backends
from fornax.serving.config import HostConfig
from fornax.serving.events import Events
from fornax.serving.execution.servable import BundleLoader, DevicePool
from fornax.serving.lifecycle import Instance, Loader, Manager, commands
from fornax.serving.lifecycle.model import Model
from fornax.serving.lifecycle.shadow import Shadowing
from fornax.serving.statistics import ModelStatistics
from fornax.serving.types import IndexEntry, InferRequest, InferResult, ModelMetadata, Rollback
from fornax.serving.v2.documents import model_config, signature_metadata
from fornax.serving.v2.parameters import function_of

__all__ = ["Host"]

_log = logging.getLogger("fornax.serving")


class Host:
    """Serves the models of a repository. All methods are called in the event loop's thread.

    Args:
      config: Where the repository is, and how its models change.
      devices: What models are loaded onto.
      events: Told of states and of requests; one is made where none is given.
      backends: Factories of models that are not bundles, by the `type` in their serving.yaml.
      loader: Makes a version ready; by default opens it as a bundle and makes a Servable of it.
      concurrent_loads: How many versions load at once.

    Raises:
      ServingError: the repository cannot be read, when there are `backends`.
      FornaxError: a backend's settings are wrong.
    """

    def __init__(
        self,
        config: HostConfig,
        *,
        devices: DevicePool | None = None,
        events: Events | None = None,
        backends: Mapping[str, BackendFactory] | None = None,
        loader: Loader | None = None,
        concurrent_loads: int = 2,
    ):
        self._config = config
        self.events = Events() if events is None else events
        self.stopping = False
        """Set before requests stop coming: the server is no longer ready, and still answers."""
        root = config.folder()
        self._others = Backends(root, backends or {}, self.events)
        every = config.control != "explicit" or "*" in config.load
        self._wanted = lambda name: every or name in config.load
        self._manager = Manager(
            root,
            loader=loader or BundleLoader(devices, self.events, config.trust_executables),
            events=self.events,
            follow=self._wanted,
            poll_seconds=None if config.control == "none" else config.poll_seconds,
            names_only=config.control == "explicit",
            concurrent_loads=concurrent_loads,
            types=frozenset(backends or {}),
        )
        self._models = self._manager.models
        self._read = self._started = self._stopped = False
        self._must_be_ready: frozenset[str] = frozenset()

    @property
    def backends(self) -> Mapping[str, Backend]:
        """The models that are not bundles, by name; they are there before `start`."""
        return self._others.backends

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
            if name != "*" and name not in self._others.backends:
                self._model(name)

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
            error = _no_function(instance, request.function)
            self.events.tell_finished(request, error)
            raise error
        answer = instance.servable.submit(request)
        shadowing = model.shadowing
        if shadowing is not None and shadowing.main is instance and shadowing.running:
            shadowing.watch(request, answer)
        return answer

    def _submit_otherwise(self, request: InferRequest) -> "asyncio.Future[InferResult]":
        try:
            if request.model in self._others.backends:
                return self._others.submit(request)
            name, function = function_of(request.model, request.function)
            self._instance(name, request.version)
        except ServingError as error:
            self.events.tell_finished(request, error)
            raise
        request.model, request.function = name, function
        return self.submit(request)

    def _model(self, name: str) -> Model:
        """A model by its own name, without a function.

        Raises:
          ServingError: NOT_FOUND, with the nearest name; UNAVAILABLE before names are known.
        """
        model = self._models.get(name)
        if model is None:
            if not self._read:
                raise ServingError(
                    ServingCode.UNAVAILABLE,
                    "the server is starting and has not read its repository yet; try again",
                )
            known = [*self._models, *self._others.backends]
            hint = did_you_mean(name, known, "GET /v2/repository/index lists all")
            raise ServingError(
                ServingCode.NOT_FOUND, f"the repository has no model {name!r}; {hint}"
            )
        return model

    def _instance(self, name: str, version: str) -> Instance:
        """What answers to a model's name and a version, a label or "".

        Raises:
          ServingError: nothing does, and why.
        """
        model = self._model(name)
        if version not in model.routes:
            raise model.refusal(version)
        return model.routes[version]

    def _find(self, name: str, version: str) -> tuple[Model, Instance, str]:
        """A model, what answers, and the function, from a name that may have both.

        Raises:
          ServingError: nothing answers, and why.
        """
        name, function = function_of(name)
        return self._model(name), self._instance(name, version), function

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
        if name in self._others.backends:
            return self._others.backends[name].ready() and version in ("", "1")
        name, function = function_of(name)
        instance = self._model(name).routes.get(version)
        return instance is not None and (not function or function in instance.servable.functions)

    def metadata(self, name: str, version: str = "") -> ModelMetadata:
        """What a version, the default or the function of one takes and gives.

        Raises:
          ServingError: it does not answer, and why.
        """
        if name in self._others.backends:
            return self._others.models[name].metadata()
        model, instance, function = self._find(name, version)
        versions = map(str, sorted(model.serving))
        return signature_metadata(name, versions, instance.servable.signature(function))

    def config(self, name: str, version: str = "") -> dict[str, object]:
        """A version's configuration in Triton's words.

        Raises:
          ServingError: it does not answer, and why.
        """
        if name in self._others.backends:
            return dict(self._others.backends[name].config())
        model, instance, function = self._find(name, version)
        servable = instance.servable
        signature = servable.signature(function)
        loaded = instance.source.settings
        return model_config(name, signature, servable.functions, model.settings, loaded)

    def index(self, ready_only: bool = False) -> list[IndexEntry]:
        """The repository's models and their versions: what they do, and why not."""
        lines = [each for _, model in sorted(self._models.items()) for each in model.index()]
        lines += self._others.index()
        return [each for each in lines if not ready_only or each.state == "READY"]

    def statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        """Counters of the versions in memory, of all models or one.

        Raises:
          ServingError: there is no such model, or no such version of it in memory.
        """
        if name in self._others.models:
            return [self._others.models[name].statistics()]
        name = function_of(name)[0]
        if name:
            model = self._model(name)
            found = model.statistics(version)
            if version and not found:
                raise model.refusal(version)
            return found
        others = [each.statistics() for each in self._others.models.values()]
        return [s for model in self._models.values() for s in model.statistics(version)] + others

    async def load(self, name: str, version: str = "") -> None:
        """Load what a model's policy picks, or one version; return when it answers.

        Raises:
          ServingError: no such model or version, control is none, or why it cannot be served.
        """
        self._may_change("loaded")
        if name in self._others.backends:
            await self._others.load(name)
        else:
            await commands.load(self._manager, name, version)

    async def unload(self, name: str, version: str = "") -> None:
        """Take a model, or one version, out of service; return when it is out of memory.

        Raises:
          ServingError: no such model or version, or control is none.
        """
        self._may_change("unloaded")
        if name in self._others.backends:
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

    def shadow_report(self, name: str) -> dict[str, object]:
        """How the answers of a model's shadow compare with the main ones, as JSON has it.

        Raises:
          ServingError: no such model, or it has no shadow.
        """
        return self._model(name).shadow_report()

    def shadows(self) -> list[Shadowing]:
        """The comparisons of all models that have one."""
        return [m.shadowing for m in self._models.values() if m.shadowing is not None]

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


def _no_function(instance: Instance, function: str) -> ServingError:
    """The refusal of a function that a version does not have."""
    known = instance.servable.functions
    hint = did_you_mean(function, known, f"it has {', '.join(known)}")
    return ServingError(
        ServingCode.NOT_FOUND,
        f"version {instance.version} of {instance.source.name} has no function {function!r}; "
        f"{hint}",
    )
