"""Calling a bundle's functions: any sizes in, padded to a bucket, run, and unpadded."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from fornax.config.errors import BundleError
from fornax.export import buckets
from fornax.export.bundle import Bundle, open_bundle
from fornax.export.placement import OneDevice, OnMesh, Placement
from fornax.export.program import Program
from fornax.export.weights import Weights

__all__ = ["Callable", "Loaded", "load"]


class Callable:
    """A function of a loaded bundle: named arrays of any size in, numpy arrays out.

    Inputs are padded to a bucket and outputs unpadded; more rows than the largest bucket holds
    are run in parts. A bucket is compiled when it is first needed.
    """

    def __init__(self, bundle: Bundle, function: str, weights: Weights, placement: Placement):
        self.signature = bundle.signature(function)
        self._bundle = bundle
        self._weights = weights
        self._placement = placement
        self._programs: dict[tuple[tuple[str, int], ...], Program] = {}

    def __repr__(self) -> str:
        inputs = ", ".join(f"{s.name}: {s.dtype}{s.shape}" for s in self.signature.inputs.values())
        return f"<{self.signature.name}({inputs}) of {self._bundle.path}>"

    def __call__(self, **inputs: object) -> dict[str, np.ndarray]:
        """The outputs by name.

        Raises:
          BundleError: naming an input that is missing, unknown, of a wrong dtype or shape, or
            larger than any bucket.
        """
        request = buckets.as_arrays(self.signature, inputs)
        own, batch = buckets.measure(self.signature, request), self.signature.batch
        if batch is None or own[batch] <= self.signature.buckets[batch][-1]:
            return self._run(request)
        cut = buckets.split(self.signature, request, own[batch], self.signature.buckets[batch][-1])
        return dict(buckets.join(self.signature, [self._run(part) for _, part in cut]))

    def program(self, dims: Mapping[str, int]) -> Program:
        """The program of a bucket, compiled if it was not yet."""
        key = tuple(sorted(dims.items()))
        if key not in self._programs:
            self._programs[key] = self._bundle.compile(
                self.signature.name, dims, self._weights, self._placement
            )
        return self._programs[key]

    def _run(self, request: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        signature = self.signature
        own = buckets.measure(signature, request)
        rows = own.get(signature.batch) if signature.batch else None
        dims = buckets.choose(signature, rows, own)
        outputs = self.program(dims)(buckets.assemble(signature, dims, [request]))
        host = {name: np.asarray(value) for name, value in outputs.items()}
        return buckets.take(signature, dims, host, [request])[0]


class Loaded(Mapping[str, Callable]):
    """The functions of a bundle, ready to call, by name."""

    def __init__(self, bundle: Bundle, weights: Weights, placement: Placement):
        self.bundle = bundle
        self.weights = weights
        self.placement = placement
        self._functions = {
            name: Callable(bundle, name, weights, placement) for name in bundle.manifest.functions
        }

    def __getitem__(self, name: str) -> Callable:
        if name not in self._functions:
            self.bundle.signature(name)
        return self._functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)


def load(
    path: str | Path,
    *,
    mesh: jax.sharding.Mesh | None = None,
    rules: Mapping[str, tuple[str, ...]] | None = None,
    device: jax.Device | None = None,
    verify: bool = True,
    trust_executables: bool = False,
) -> Loaded:
    """Load a bundle: verify, put the weights on a device, run the golden inputs and compare.

    Args:
      path: the bundle.
      mesh: several devices to lay it on, by the axes that it names.
      rules: logical axis to axes of the mesh, over `fornax.mesh.DEFAULT_RULES`.
      device: one device, without a mesh; None is jax's first.
      verify: whether hashes and golden outputs are compared.
      trust_executables: whether to run native code that the bundle brings, which can do anything,
        instead of compiling here; where it was made for another machine, it is compiled.

    Raises:
      BundleError: when the bundle is damaged or does not compute here what it computed.
      ShardingError: an axis without a rule, or a weight that does not divide over the mesh.
    """
    placement: Placement = OneDevice(device)
    if mesh is not None:
        placement = OnMesh(mesh, rules)
    elif rules is not None:
        raise BundleError("rules lay a bundle on a mesh, and load was given none; pass mesh=")
    bundle = open_bundle(
        path, verify="as-read" if verify else "none", trust_executables=trust_executables
    )
    loaded = Loaded(bundle, bundle.load_weights(placement), placement)
    if verify:
        for name, function in loaded.items():
            dims = bundle.manifest.functions[name].golden
            if dims is not None:
                program = function.program(dims.dims)
                bundle.check_golden(name, loaded.weights, placement, program)
    return loaded
