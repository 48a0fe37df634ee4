"""How the host makes a version ready: opened as a bundle, laid onto the devices, warmed."""

import asyncio

from fornax.export.bundle import open_bundle
from fornax.serving.events import Events
from fornax.serving.lifecycle import ServableLike, Source
from fornax.serving.servable import DevicePool, Servable

__all__ = ["BundleLoader"]


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
            name=source.name,
            version=str(source.version),
            events=self._events,
        )
