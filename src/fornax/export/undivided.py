"""Where programs run in the thread that calls them, beside the CPU device that divides them.

Dividing a program over threads costs waking them: some 50 us, more than a small program takes.
"""

import dataclasses
import threading

import jax
import numpy as np

from fornax.config.environment import cpu_threads
from fornax.export import _exported
from fornax.export.placement import OneDevice
from fornax.export.weights import Weights

__all__ = ["Undivided", "share_undivided", "undivided_device"]

_ONE = threading.Lock()
"""Several bundles load at once, and one device is made for all."""


@dataclasses.dataclass(frozen=True)
class Undivided:
    """What `Bundle.compile` takes for programs that are not divided. Delete it before the weights
    that it shares."""

    weights: Weights
    placement: OneDevice

    def delete(self) -> None:
        """Release the weights."""
        for array in self.weights.params.values():
            array.delete()


def undivided_device() -> jax.Device | None:
    """The CPU device whose programs are not divided, made by the first call.

    The first call changes the environment for a moment: make it where no other thread starts
    processes. None where there is one thread to divide over, or this jax has no such programs.
    """
    with _ONE:  # who makes the device has the environment say one thread meanwhile
        return None if cpu_threads() == 1 else _exported.calling_device()


def share_undivided(weights: Weights) -> Undivided | None:
    """The weights of one CPU device, in their place, for programs that are not divided.

    None where there is no device for them, or the weights would be copied.
    """
    place = undivided_device()
    if place is None:
        return None
    shared: dict[str, jax.Array] = {}
    found = Undivided(Weights(shared), OneDevice(place))
    sharding = jax.sharding.SingleDeviceSharding(place)
    for name, array in weights.params.items():
        host = np.asarray(array)
        with jax.enable_x64(True):
            shared[name] = jax.device_put(host, sharding)
        if host.size and _address(np.asarray(shared[name])) != _address(host):
            found.delete()
            return None
    return found


def _address(array: np.ndarray) -> object:
    return array.__array_interface__["data"][0]
