"""One request on its way: whole, or in parts where it has more rows than the largest bucket."""

import asyncio
import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from fornax.config.errors import ServingCode, ServingError
from fornax.serving.execution.runner import Computed
from fornax.serving.types import InferRequest, Timing

__all__ = ["Answer", "abandoned", "refuse_nonfinite"]

Outputs = Mapping[str, np.ndarray]


@dataclasses.dataclass(slots=True, eq=False)
class Answer:
    """A request and the future its sender waits for."""

    request: InferRequest
    future: asyncio.Future
    arrived: int
    """By `time.monotonic_ns()`."""
    rows: int
    parts: list[Outputs | None]
    missing: int
    timing: Timing = dataclasses.field(default_factory=Timing)
    ended: bool = False

    def take(self, part: int, outputs: Outputs, started: int, computed: Computed) -> None:
        """One part has its outputs, of a batch that was begun at `started`."""
        self.parts[part] = outputs
        self.missing -= 1
        timing, waited = self.timing, started - self.arrived
        if waited > timing.queue:
            timing.queue = waited
        timing.compute_input += computed.input_ns
        timing.compute_infer += computed.infer_ns
        timing.compute_output += computed.output_ns


def abandoned(part: "tuple[Answer, int]") -> bool:
    """Whether nobody waits for a request any more, or it has failed already."""
    return part[0].ended or part[0].future.done()


def refuse_nonfinite(arrays: Outputs, code: ServingCode, what: str) -> None:
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
