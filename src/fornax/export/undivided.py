"""Where programs run in the thread that calls them, beside the CPU device that divides them.

Dividing a program over threads costs waking them: some 50 us, more than a small program takes.
"""

import dataclasses
import threading
from typing import Any

import jax
import numpy as np

from fornax.config.environment import cpu_threads
from fornax.export import _exported
from fornax.export.placement import OneDevice
from fornax.export.weights import Weights

__all__ = ["Undivided", "share_undivided"]

_ONE = threading.Lock()
"""Several bundles load at once, and one device is made for all."""


@dataclasses.dataclass(frozen=True)
class Undivided:
    """What `Bundle.compile` takes for programs that are not divided. Delete it before the weights
    that it shares."""

    weights: Weights
    placement: OneDevice

    def delete(self) -> None:
        """Let go of the weights."""
        for array in self.weights.params.values():
            array.delete()


def share_undivided(weights: Weights) -> Undivided | None:
    """The weights of one CPU device, in their place, for programs that are not divided.

    None where there is one thread to divide over, where this jax has no such programs, or where the
    weights would be copied.
    """
    with _ONE:  # who makes the device has the environment say one thread meanwhile
        device = None if cpu_threads() == 1 else _exported.calling_device()
    if device is None:
        return None
    shared: dict[str, jax.Array] = {}
    found = Undivided(Weights(shared), OneDevice(device))
    for name, array in weights.params.items():
        host = np.asarray(array)
        aval = _exported.abstract(array.shape, array.dtype)
        sharding = jax.sharding.SingleDeviceSharding(device)
        with jax.enable_x64(True):
            shared[name] = _exported.put(aval, sharding, [host], [device])
        if host.size and _address(np.asarray(shared[name])) != _address(host):
            found.delete()
            return None
    return found


def _address(array: np.ndarray) -> Any:
    return array.__array_interface__["data"][0]
