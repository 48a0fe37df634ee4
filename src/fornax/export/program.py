"""A function compiled for one bucket: arrays of exactly its sizes in, arrays out, at once."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fornax.config.errors import BundleError
from fornax.export.dtypes import is_wide, numpy_dtype
from fornax.export.placement import Placement
from fornax.export.spec import Signature

__all__ = ["Memory", "Program", "Together"]

Together = Callable[[Sequence[np.ndarray], Callable[[], list[jax.Array]]], list[jax.Array]]
"""(host arrays, run): has the other processes run the program on these arrays too, and runs it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a program on each device; `arguments` includes the weights."""

    arguments: int
    outputs: int
    temporaries: int
    code: int


class Program:
    """A function compiled for `dims`. Calls are asynchronous and safe from several threads.

    The arrays given must not change until an output is ready: a host array may be used in place.
    `ahead` says whether the program came compiled in the bundle.
    """

    def __init__(
        self,
        *,
        executable: Any,
        call: Callable[[list[jax.Array | np.ndarray]], list[jax.Array]],
        signature: Signature,
        dims: Mapping[str, int],
        weights: Sequence[jax.Array],
        placement: Placement,
        memory: Memory,
        x64: bool,
        ahead: bool,
    ):
        self.signature = signature
        self.dims = dict(dims)
        self.memory = memory
        self.ahead = ahead
        self.inputs = tuple(spec.name for spec in signature.arguments)
        self.outputs = tuple(signature.outputs)
        self.shapes = {s.name: s.sizes(dims) for s in signature.arguments}
        self.dtypes = {s.name: numpy_dtype(s.dtype) for s in signature.arguments}
        self._weights = list(weights)
        self.executable = executable
        self.together: Together | None = None
        """In the process that decides, of those over whose devices the program is divided."""
        self._call = call
        self._x64 = x64 and any(is_wide(s.dtype) for s in signature.arguments)
        self._shardings = [
            placement.spread(self.shapes[spec.name], spec.axes, signature.rows_of(spec))
            for spec in signature.arguments
        ]
        # On a CPU a compiled function takes host arrays as they are: sooner than `device_put`.
        on_host = [device.platform for device in placement.devices] == ["cpu"]
        self._as_they_are = on_host and not ahead and not self._x64

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Outputs by name for arrays of exactly the bucket's sizes, lengths included.

        Raises:
          BundleError: naming an array that is missing or of another shape or dtype.
        """
        return dict(zip(self.outputs, self.run(self.put(inputs)), strict=True))

    def put(self, inputs: Mapping[str, np.ndarray]) -> Sequence[jax.Array | np.ndarray]:
        """Start moving arrays to the devices; the result is what `run` takes."""
        shapes, dtypes = self.shapes, self.dtypes
        arrays = []
        for name in self.inputs:
            try:
                array = inputs[name]
            except KeyError:
                raise BundleError(
                    f"{self.signature.name!r} lacks input {name!r}; it takes "
                    f"{', '.join(self.inputs)}"
                ) from None
            if array.shape != shapes[name] or array.dtype != dtypes[name]:
                raise BundleError(
                    f"input {name!r} of {self.signature.name!r} is {array.dtype}{array.shape}; "
                    f"this program takes {dtypes[name]}{shapes[name]}"
                )
            arrays.append(array)
        return arrays if self._as_they_are or self.together is not None else self._moved(arrays)

    def _moved(self, arrays: Sequence[np.ndarray]) -> list[jax.Array]:
        with jax.enable_x64(self._x64):
            return [_put(*pair) for pair in zip(arrays, self._shardings, strict=True)]

    def run(self, buffers: Sequence[jax.Array | np.ndarray]) -> list[jax.Array]:
        """Start the computation on arrays from `put`; outputs in the signature's order."""
        if self.together is None:
            return self._call([*self._weights, *buffers])
        arrays = [np.asarray(each) for each in buffers]
        moved = self._moved(
            arrays
        )  # before the others begin, so that they do not wait for what fails here
        return self.together(arrays, lambda: self._call([*self._weights, *moved]))


def _put(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """On the devices, or the part of this process on its own."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
