"""What a function reports to its observers, and the figures of its batches."""

import logging
import time
from collections.abc import Mapping

import numpy as np

from fornax.config.errors import ServingError
from fornax.export.spec import Signature
from fornax.serving.batching import Batch
from fornax.serving.events import Events
from fornax.serving.execution.runner import Computed, Prepared
from fornax.serving.statistics import Counters
from fornax.serving.types import InferRequest, InferResult

__all__ = ["Reports"]

_log = logging.getLogger("fornax.serving")
_AGAIN_SECONDS = 10.0
"""A failure is logged once in this time: a model that fails at every request fills no disk."""


class Reports:
    """The reports of one function of a version; an observer that fails costs nobody an answer."""

    def __init__(
        self,
        model: str,
        version: str,
        signature: Signature,
        counters: Counters,
        events: Events,
    ):
        self._model, self._version, self._function = model, version, signature.name
        self._ragged = bool(signature.ragged) or signature.batch is None
        self._counters = counters
        self._events = events
        self._logged = -_AGAIN_SECONDS

    def failed(self, error: BaseException) -> None:
        """Something that no client is to blame for: the log gets where it happened."""
        now = time.monotonic()
        if now - self._logged >= _AGAIN_SECONDS:
            self._logged = now
            _log.error(
                "%s of %s %s could not be computed",
                self._function,
                self._model,
                self._version,
                exc_info=error,
            )

    def ended(self, request: InferRequest, outcome: InferResult | ServingError) -> None:
        """A request has its answer or its error."""
        if self._events.finished:
            try:
                self._events.tell_finished(request, outcome)
            except Exception:
                _log.exception("an observer of requests failed")

    def batch(self, batch: Batch, prepared: Prepared, computed: Computed) -> None:
        """A batch was computed."""
        times = (computed.input_ns, computed.infer_ns, computed.output_ns)
        if self._ragged:
            real = sum(_elements(each.inputs) for each in batch.requests)
        else:
            real = prepared.elements * batch.rows // batch.bucket
        self._counters.executed(batch.bucket, batch.rows, real, prepared.elements, times)


def _elements(inputs: Mapping[str, np.ndarray]) -> int:
    return sum(
        sum(map(len, array.ravel())) if array.dtype == object else array.size
        for array in inputs.values()
    )
