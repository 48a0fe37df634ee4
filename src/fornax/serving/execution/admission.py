"""What a function accepts: the checks of a request before it is queued, and its padded shape."""

import math
from collections.abc import Mapping

import numpy as np

from fornax.config.errors import BundleError, ServingCode, ServingError
from fornax.export.buckets import choose, measure
from fornax.export.spec import Signature
from fornax.serving.batching import Key
from fornax.serving.settings import ModelSettings
from fornax.serving.types import InferRequest

__all__ = ["Admission", "Shapes", "refuse_nonfinite"]

_SIZES_KEPT = 4096


class Shapes:
    """The padded shapes of a function apart from its rows; `rows` has each one's batch buckets."""

    def __init__(self, signature: Signature):
        self.signature = signature
        self.batch = signature.batch
        self.names = tuple(name for name in signature.dims if name != signature.batch)
        self.rows: dict[Key, tuple[int, ...]] = {}
        for dims in signature.shapes:
            rows, key = self.bucket(dims)
            self.rows[key] = tuple(sorted({*self.rows.get(key, ()), rows}))
        self._exact = tuple(name in signature.exact for name in self.names)
        self._found: dict[tuple[int, ...], Key] = {}

    def key(self, dims: Mapping[str, int]) -> Key:
        """The padded shape in these dimensions."""
        return tuple([dims[name] for name in self.names])

    def bucket(self, dims: Mapping[str, int]) -> tuple[int, Key]:
        """Rows (1 without a batch) and padded shape in these dimensions."""
        return (1 if self.batch is None else dims[self.batch]), self.key(dims)

    def place(self, dims: Mapping[str, int]) -> tuple[int, Key]:
        """Rows and padded shape of a request of these sizes.

        Raises:
          BundleError: when no bucket holds it, or it has no rows.
        """
        rows = 1 if self.batch is None else dims[self.batch]
        if rows == 0:
            raise BundleError(
                f"the request to {self.signature.name!r} has 0 rows ({self.batch}=0); send one "
                "or more"
            )
        if not self.names:
            return rows, ()
        sizes = tuple([dims[name] for name in self.names])
        key = self._found.get(sizes)
        if key is None:
            key = self.key(choose(self.signature, None, dims))
            if len(self._found) >= _SIZES_KEPT:
                self._found.clear()
            self._found[sizes] = key
        return rows, key

    def fits(self, small: Key, large: Key) -> bool:
        """Whether requests of one padded shape may be computed in the other."""
        return all(
            a == b if exact else a <= b
            for a, b, exact in zip(small, large, self._exact, strict=True)
        )


class Admission:
    """The checks of one function."""

    def __init__(self, model: str, signature: Signature, shapes: Shapes, settings: ModelSettings):
        self._model = model
        self._signature = signature
        self._shapes = shapes
        self._batching = settings.batching_of(signature.name)
        self._seconds = settings.timeouts.request_seconds
        self._refuse_nonfinite = settings.nan.inputs == "refuse"

    def read(self, request: InferRequest, now: int) -> tuple[int, Key, int, float | None]:
        """Rows, padded shape, priority and deadline of a request that came `now` (monotonic ns).

        Raises:
          ServingError: for what the function cannot take, with the reason.
        """
        rows, key = self._place(request)
        if request.outputs or request.parameters:
            self._check(request)
        if self._refuse_nonfinite:
            refuse_nonfinite(request.inputs, ServingCode.INVALID_ARGUMENT, "input")
        return rows, key, self._priority(request.priority), self._deadline(request.deadline, now)

    def _place(self, request: InferRequest) -> tuple[int, Key]:
        try:
            return self._shapes.place(measure(self._signature, request.inputs))
        except BundleError as error:
            raise ServingError(ServingCode.INVALID_ARGUMENT, str(error)) from None

    def _check(self, request: InferRequest) -> None:
        for name in request.outputs:
            if name not in self._signature.outputs:
                raise ServingError(
                    ServingCode.INVALID_ARGUMENT,
                    f"{self._signature.name!r} has no output {name!r}; it has "
                    f"{', '.join(self._signature.outputs)}",
                )
        if request.parameters:
            raise ServingError(
                ServingCode.INVALID_ARGUMENT,
                f"parameter {next(iter(request.parameters))!r} means nothing to "
                f"{self._model!r}; leave it out",
            )

    def _priority(self, wanted: int) -> int:
        if wanted == 0:
            return self._batching.default_priority
        if not 1 <= wanted <= self._batching.priority_levels:
            raise ServingError(
                ServingCode.INVALID_ARGUMENT,
                f"priority {wanted} is not one of {self._model!r}'s; choose 1 to "
                f"{self._batching.priority_levels}, or 0 for its default",
            )
        return wanted

    def _deadline(self, deadline: float | None, now: int) -> float | None:
        if self._seconds is not None:
            latest = now * 1e-9 + self._seconds
            deadline = latest if deadline is None else min(deadline, latest)
        if deadline is not None and deadline <= now * 1e-9:
            raise ServingError(
                ServingCode.DEADLINE_EXCEEDED,
                "the request's deadline had passed when it came; allow more time",
            )
        return deadline


def refuse_nonfinite(arrays: Mapping[str, np.ndarray], code: ServingCode, what: str) -> None:
    """Look for NaN and infinity.

    Raises:
      ServingError: with `code`, naming the tensor.
    """
    for name, array in arrays.items():
        if array.dtype.kind in "fV" and not _finite(array):
            raise ServingError(
                code,
                f"{what} {name!r} has NaN or infinity, which this model's nan.{what}s=refuse "
                "forbids; send finite values or change its serving.yaml",
            )


def _finite(array: np.ndarray) -> bool:
    if array.dtype in (np.float32, np.float64) and array.flags.c_contiguous:
        flat = array.reshape(-1)
        with np.errstate(all="ignore"):
            if math.isfinite(flat.dot(flat)):  # one pass, no temporaries; a sum may overflow
                return True
    return bool(np.isfinite(array).all())
