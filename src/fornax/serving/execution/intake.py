"""What a function accepts: the checks of a request before it enters a queue."""

from fornax.config.errors import BundleError, ServingCode, ServingError
from fornax.export.buckets import measure
from fornax.export.spec import Signature
from fornax.serving.batching import Key
from fornax.serving.execution.answers import refuse_nonfinite
from fornax.serving.execution.shapes import Shapes
from fornax.serving.settings import ModelSettings
from fornax.serving.types import InferRequest

__all__ = ["Intake"]

_REMEMBERED = 256


class Intake:
    """The checks of one function."""

    def __init__(self, model: str, signature: Signature, shapes: Shapes, settings: ModelSettings):
        self._model = model
        self._signature = signature
        self._shapes = shapes
        self._batching = settings.batching_of(signature.name)
        self._seconds = settings.timeouts.request_seconds
        self._refuse_nonfinite = settings.nan.inputs == "refuse"
        self._placed: dict[object, tuple[int, Key]] = {}
        """By layout: what was looked at once need not be looked at again."""

    def read(self, request: InferRequest, now: int) -> tuple[int, Key, int, float | None]:
        """Rows, padded shape, priority and deadline of a request that came `now` (monotonic ns).

        Raises:
          ServingError: for what the function cannot take, with the reason.
        """
        layout = request.layout
        placed = None if layout is None else self._placed.get(layout)
        if placed is None:
            placed = self._place(request)
            if layout is not None:
                if len(self._placed) >= _REMEMBERED:
                    self._placed.clear()
                self._placed[layout] = placed
        rows, key = placed
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
