"""What crosses the server's joints: a request, its result, and what a model says of itself.

Arrays are numpy arrays on the host. A BYTES tensor is an object array of `bytes`; BF16 is
`ml_dtypes.bfloat16`. Dimension 0 of every input is the rows, where the function has a batch.
"""

import dataclasses
import enum
import logging
from collections.abc import Callable, Mapping

import numpy as np

from fornax.config.errors import FornaxError, ServingCode, ServingError

__all__ = [
    "WAITING",
    "IndexEntry",
    "InferRequest",
    "InferResult",
    "ModelMetadata",
    "Rollback",
    "State",
    "TensorMetadata",
    "Timing",
    "as_serving_error",
]

_log = logging.getLogger("fornax.serving")

WAITING = "waiting for its files"
"""How the reason of a version begins that serves once its folder is complete."""


@dataclasses.dataclass(slots=True)
class InferRequest:
    """One inference as a protocol read it; names, shapes and dtypes are not yet checked."""

    model: str
    inputs: Mapping[str, np.ndarray]
    version: str = ""
    """A number or a label of the model's; empty: what its version policy makes the default."""
    function: str = ""
    """Empty: the bundle's first function."""
    id: str = ""
    """The client's name of it, which its answer repeats; empty: none."""
    outputs: tuple[str, ...] = ()
    """Names asked for, in their order; empty: all."""
    priority: int = 0
    """1 goes before 2; 0: the function's default."""
    deadline: float | None = None
    """By `time.monotonic()`: past it the request is refused, not computed."""
    parameters: Mapping[str, object] = dataclasses.field(default_factory=dict)
    received: float = 0.0
    """When its last byte had come, by `time.monotonic()`."""
    request_id: str = ""
    """Of its whole way, for logs, traces and profiles; see `fornax.config.request_id`."""
    trace: str | bytes | None = None
    """The caller's W3C `traceparent`, for spans."""
    pieces: "Callable[[InferResult], None] | None" = None
    """Takes what is answered before the last piece, by models that answer in pieces; None: the
    answer is wanted whole."""


@dataclasses.dataclass(slots=True)
class Timing:
    """Where a request's time went, in nanoseconds; the parts are those of Triton's statistics."""

    queue: int = 0
    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0


@dataclasses.dataclass(slots=True)
class InferResult:
    """An answer: arrays without padding, in the order asked for."""

    model: str
    version: str
    function: str
    id: str
    outputs: Mapping[str, np.ndarray]
    timing: Timing = dataclasses.field(default_factory=Timing)
    parameters: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorMetadata:
    """A tensor of a model as the V2 protocol names it; -1 for a size that may vary."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ModelMetadata:
    """A model, or one function of it, as the V2 protocol names it."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


class State(enum.Enum):
    """A version's state, in the V2 protocol's words."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclasses.dataclass(frozen=True, slots=True)
class IndexEntry:
    """A version in the repository's index."""

    name: str
    version: str
    """Empty for a model of which no version is known."""
    state: str
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Rollback:
    """What a rollback did."""

    name: str
    version: str
    """Which answers now."""
    previous: str
    """Which answered before; it is unloaded once it has answered what it accepted."""
    persistent: bool
    """Whether it outlasts a restart: False when the repository cannot be written."""


def as_serving_error(error: BaseException, what: str = "the request") -> ServingError:
    """The error that answers `what`; what is not an error of Fornax's is logged with its
    traceback."""
    if isinstance(error, ServingError):
        # Its frames hold the request, and what holds the error: a ring, kept until a collection.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        return error
    if isinstance(error, FornaxError):
        return ServingError(ServingCode.FAILED_PRECONDITION, str(error))
    _log.error("%s failed", what, exc_info=error)
    return ServingError(
        ServingCode.INTERNAL,
        f"the server failed on {what} ({type(error).__name__}); its log says where",
    )
