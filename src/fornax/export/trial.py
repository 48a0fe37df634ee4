"""Running a function at save: the checks, then golden inputs and what they gave."""

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import jax
import jaxlib
import numpy as np

from fornax.config.errors import BundleError
from fornax.export import buckets, checks, executables, golden
from fornax.export.bundle import Bundle
from fornax.export.manifest import Executable, Function, Golden, Manifest, Tolerance
from fornax.export.placement import OneDevice, platform_of
from fornax.export.program import Program
from fornax.export.spec import Signature
from fornax.export.trace import Flat, x64
from fornax.export.weights import Weights
from fornax.mesh.compilation import machine_key

__all__ = ["Trial", "run"]

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Trial:
    """A function that is being sealed in `work`, as a program and as jax has it."""

    work: Path
    manifest: Manifest
    name: str
    flat: Flat
    arrays: Mapping[str, jax.Array | np.ndarray]

    @cached_property
    def record(self) -> Function:
        """What the manifest says of it so far."""
        return self.manifest.functions[self.name]

    @cached_property
    def platform(self) -> str:
        """Where it is tried."""
        return platform_of(OneDevice())

    @cached_property
    def precision(self) -> float:
        """The rounding step of the coarsest numbers that it computes with."""
        held = [self.manifest.weights[name].dtype for name in self.record.weights]
        taken = [spec.dtype for spec in self.record.signature.arguments]
        return golden.coarsest([*held, *taken])

    @cached_property
    def _weights(self) -> Weights:
        device = OneDevice().devices[0]
        with x64(self.record.x64):
            return Weights({n: jax.device_put(self.arrays[n], device) for n in self.record.weights})

    @cached_property
    def _bundle(self) -> Bundle:
        return Bundle(self.work, self.manifest, hashes=False, weights_checked=True)

    @cached_property
    def _programs(self) -> dict[tuple[int, ...], Program]:
        return {}

    def program(self, dims: Mapping[str, int]) -> Program:
        """What was sealed, compiled for these sizes."""
        key = tuple(dims.values())
        if key not in self._programs:
            self._programs[key] = self._bundle.compile(self.name, dims, self._weights)
        return self._programs[key]

    def sealed(self, dims: Mapping[str, int], inputs: Arrays) -> dict[str, np.ndarray]:
        """Run what was sealed; on a platform that it was not sealed for, the function itself."""
        if self.platform not in self.record.programs:
            return self.original(dims, inputs)
        return {n: np.asarray(v) for n, v in self.program(dims)(inputs).items()}

    def write_executables(self) -> list[Executable]:
        """Add the programs of all buckets, compiled for this machine.

        Raises:
          BundleError: when this machine's platform is not the bundle's.
        """
        if self.platform not in self.record.programs:
            raise BundleError(
                f"executables=True compiles for this machine, which is {self.platform}, and "
                f"platforms has {', '.join(self.record.programs)} only"
            )
        shapes = self.record.signature.shapes
        key = machine_key(OneDevice().devices[0])
        found = []
        for name, number, file in executables.names(key, {self.name: len(shapes)}):
            target = self.work / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self.program(shapes[number]).executable.serialize())
            found.append(Executable(file=file, function=name, dims=shapes[number], key=key))
        return found

    def original(self, dims: Mapping[str, int], inputs: Arrays) -> dict[str, np.ndarray]:
        """Run the function as jax would."""
        del dims
        record = self.record
        with x64(record.x64):
            outputs = jax.jit(self.flat)(
                *self.arrays.values(), *(inputs[s.name] for s in record.signature.arguments)
            )
            return {
                n: np.asarray(v) for n, v in zip(record.signature.outputs, outputs, strict=True)
            }


def run(
    trial: Trial,
    *,
    given_inputs: Mapping[str, object] | None,
    tolerance: float | Tolerance | Mapping[str, float | Tolerance] | None,
    seed: int,
) -> Function:
    """Check a function, write its golden file, and say what the manifest says of it.

    Raises:
      BundleError: for a function that a server must not have.
    """
    signature = trial.record.signature
    dims, requests = _requests(signature, given_inputs, seed)
    inputs = buckets.assemble(signature, dims, requests)
    outputs = trial.sealed(dims, inputs)
    checks.check_finite(signature, buckets.take(signature, dims, outputs, requests))
    given = _given(signature, tolerance)
    record = _write(trial, dims, requests, inputs, outputs)
    allowed = _allowed(trial, outputs, given, elsewhere=False)
    _check_same(trial, record, allowed, outputs, inputs)
    bucket = golden.dims_for(signature)
    checks.check_rows(signature, bucket, trial.sealed)
    checks.check_padding(
        signature,
        bucket,
        trial.sealed,
        given,
        open_sizes=_takes_any(trial.record.constraints),
        precision=trial.precision,
    )
    return dataclasses.replace(
        trial.record,
        tolerance=allowed,
        elsewhere=_allowed(trial, outputs, given, elsewhere=True),
        golden=record,
    )


def _allowed(
    trial: Trial, outputs: Arrays, given: Mapping[str, Tolerance], *, elsewhere: bool
) -> dict[str, Tolerance]:
    return {
        name: given.get(name)
        or golden.default_tolerance(array, elsewhere=elsewhere, precision=trial.precision)
        for name, array in outputs.items()
    }


def _takes_any(constraints: tuple[str, ...]) -> bool:
    """Whether any size up to the largest bucket's is one that the function was traced for."""
    return all(" <= " in constraint for constraint in constraints)


def _requests(
    signature: Signature, given: Mapping[str, object] | None, seed: int
) -> tuple[Mapping[str, int], list[Arrays]]:
    if given is None:
        dims = golden.dims_for(signature)
        return dims, list(golden.examples(signature, dims, seed))
    request = buckets.as_arrays(signature, given)
    own = buckets.measure(signature, request)
    rows = own.get(signature.batch) if signature.batch else None
    return buckets.choose(signature, rows, own), [request]


def _given(
    signature: Signature, tolerance: float | Tolerance | Mapping[str, float | Tolerance] | None
) -> dict[str, Tolerance]:
    if tolerance is None:
        return {}
    if not isinstance(tolerance, Mapping):
        tolerance = dict.fromkeys(signature.outputs, tolerance)
    return {
        name: t if isinstance(t, Tolerance) else Tolerance(relative=float(t), absolute=float(t))
        for name, t in tolerance.items()
        if name in signature.outputs
    }


def _write(
    trial: Trial,
    dims: Mapping[str, int],
    requests: list[Arrays],
    inputs: Arrays,
    outputs: Arrays,
) -> Golden:
    file = f"golden/{trial.name}.safetensors"
    (trial.work / "golden").mkdir(exist_ok=True)
    named = {f"input.{n}": a for n, a in inputs.items()}
    named |= {f"output.{n}": a for n, a in outputs.items()}
    (trial.work / file).write_bytes(golden.pack(named))
    return golden.record(
        trial.record.signature, dims, requests, file, trial.platform, jaxlib.__version__
    )


def _check_same(
    trial: Trial,
    record: Golden,
    allowed: Mapping[str, Tolerance],
    outputs: Arrays,
    inputs: Arrays,
) -> None:
    if trial.platform not in trial.record.programs:
        return
    original = trial.original(record.dims, inputs)
    try:
        golden.compare(trial.record.signature, record, allowed, outputs, original, trial.platform)
    except BundleError as error:
        raise BundleError(
            f"what was sealed of {trial.name!r} gives other results than the function itself: "
            f"{error}"
        ) from None
