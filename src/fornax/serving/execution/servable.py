"""One loaded version of a model: on its devices, ready, and answering requests."""

import asyncio
import logging
import time

from fornax.config.errors import ServingCode, ServingError
from fornax.export.bundle import Bundle, open_bundle
from fornax.export.spec import Signature
from fornax.mesh.startup import use_compilation_cache
from fornax.serving.batching import Limit
from fornax.serving.events import Events
from fornax.serving.execution import loading
from fornax.serving.execution.devices import DevicePool, Reservation
from fornax.serving.execution.function import Function
from fornax.serving.execution.loading import Copy
from fornax.serving.lifecycle import ServableLike, Source
from fornax.serving.settings import ModelSettings
from fornax.serving.statistics import ModelStatistics
from fornax.serving.types import InferRequest, InferResult

__all__ = ["BundleLoader", "Servable"]

_log = logging.getLogger("fornax.serving")


class Servable:
    """A version of a model that is ready; make one with `create`.

    Methods are called in the event loop's thread.
    """

    def __init__(
        self,
        name: str,
        version: str,
        copies: list[Copy],
        reservation: Reservation,
        settings: ModelSettings,
        events: Events,
    ):
        self.name, self.version = name, version
        self._copies = copies
        self._reservation = reservation
        limits = [Limit(settings.concurrency) for _ in copies]
        self._functions = {
            function: Function(
                name,
                version,
                copies[0].runners[function].signature,
                [
                    (copy.place.scheduler, limit, copy.runners[function])
                    for copy, limit in zip(copies, limits, strict=True)
                ],
                settings,
                events,
            )
            for function in copies[0].runners
        }
        self._first = next(iter(self._functions.values()))

    @classmethod
    async def create(
        cls,
        bundle: Bundle,
        settings: ModelSettings,
        devices: DevicePool,
        events: Events,
        *,
        name: str = "",
        version: str = "",
    ) -> "Servable":
        """Load a bundle: memory, weights, every bucket compiled, golden outputs, warm-up.

        Raises:
          BundleError: for a bundle that is damaged, cannot run here, or computes something else.
          ServingError: RESOURCE_EXHAUSTED when it does not fit, with figures;
            INVALID_ARGUMENT for settings that the bundle or the devices do not allow.
        """
        _check(bundle, settings)
        use_compilation_cache(least_seconds=0)
        total = loading.weight_bytes(bundle)
        places = devices.places(settings.devices, total)
        label = f"{name} version {version}" if version else name or str(bundle.path)
        if devices.several and all(place.others is None for place in places):
            _log.info("%s is on devices of process 0 alone; a mesh is over all", label)
        wanted: dict[str, int] = {}
        for place in places:
            for account, count in place.spread(total).items():
                wanted[account] = wanted.get(account, 0) + count
        reservation = devices.memory.reserve(label, wanted, f"weights {total:,} B")
        try:
            copies = await asyncio.to_thread(
                loading.load,
                bundle,
                places,
                reservation,
                settings.concurrency,
                settings.compiler_options,
            )
            return cls(name, version, copies, reservation, settings, events)
        except BaseException:
            reservation.release()
            raise

    @property
    def functions(self) -> tuple[str, ...]:
        """Their names; the first answers requests that name none."""
        return tuple(self._functions)

    def signature(self, function: str = "") -> Signature:
        """What a function takes and gives.

        Raises:
          ServingError: NOT_FOUND.
        """
        return self._function(function).signature

    def submit(self, request: InferRequest) -> "asyncio.Future[InferResult]":
        """Take in a request; the future gets an `InferResult`, or a `ServingError`.

        Cancel the future when the answer is not wanted any more: what is not being computed yet
        is not computed.

        Raises:
          ServingError: when the request is refused.
        """
        if not request.function:
            return self._first.submit(request)
        return self._function(request.function).submit(request)

    def statistics(self) -> ModelStatistics:
        """What was done since the version was loaded, as of now."""
        whole = ModelStatistics(
            name=self.name, version=self.version, memory_bytes=self._reservation.total
        )
        for name, function in self._functions.items():
            whole.add(function.statistics(name))
        return whole

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and answer those accepted.

        Returns:
          False if some still waited after `seconds` and were refused with UNAVAILABLE.
        """
        until = time.monotonic() + seconds
        functions = list(self._functions.values())
        for function in functions:
            function.draining = True
        done = True
        for function in functions:
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await function.drained()
            except TimeoutError:
                done = False
                function.fail_waiting(
                    ServingError(
                        ServingCode.UNAVAILABLE,
                        f"version {self.version} of {self.name!r} was unloaded before the "
                        "request's turn came; send again",
                    )
                )
        return done

    async def close(self) -> None:
        """Refuse what waits, wait for what is being computed, and give the memory back."""
        await self.drain(0.0)
        for function in self._functions.values():
            await function.drained()
            await function.quiet()
            function.close()
        for copy in self._copies:
            copy.delete()
        self._copies.clear()
        self._reservation.release()

    def _function(self, name: str) -> Function:
        if not name:
            return self._first
        found = self._functions.get(name)
        if found is None:
            raise ServingError(
                ServingCode.NOT_FOUND,
                f"{self.name!r} has no function {name!r}; it has {', '.join(self._functions)}",
            )
        return found


def _check(bundle: Bundle, settings: ModelSettings) -> None:
    """Settings that the bundle cannot follow."""
    for name in settings.functions:
        bundle.signature(name)
    for name in bundle.manifest.functions:
        signature = bundle.signature(name)
        batching = settings.batching_of(name)
        buckets = () if signature.batch is None else signature.buckets[signature.batch]
        wrong = [size for size in batching.preferred_sizes if size not in buckets]
        if wrong:
            raise ServingError(
                ServingCode.INVALID_ARGUMENT,
                f"preferred_sizes has {wrong[0]}, which is not a batch bucket of {name!r}; its "
                f"buckets are {', '.join(map(str, buckets)) or 'none: it has no batch'}",
            )


class BundleLoader:
    """A `lifecycle.Loader` of bundles.

    Args:
      devices: What they are loaded onto; None: all devices, found at the first load.
      events: Told of the requests of what is loaded.
      trust_executables: Whether native code in bundles may be run.
    """

    def __init__(self, devices: DevicePool | None, events: Events, trust_executables: bool):
        self._devices = devices
        self._events = events
        self._trust_executables = trust_executables

    async def __call__(self, source: Source) -> ServableLike:
        """Load a version, or raise and leave nothing behind."""
        bundle = await asyncio.to_thread(
            open_bundle,
            source.path,
            verify="as-read",
            trust_executables=self._trust_executables,
        )
        if self._devices is None:
            self._devices = DevicePool()
        return await Servable.create(
            bundle,
            source.settings,
            self._devices,
            self._events,
            name=source.name,
            version=str(source.version),
        )
