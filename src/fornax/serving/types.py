"""What crosses the server's joints: a request, its result, and what a model says of itself.

Arrays are numpy arrays on the host. A BYTES tensor is an object array of `bytes`; BF16 is
`ml_dtypes.bfloat16`. Dimension 0 of every input is the rows, where the function has a batch.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = [
    "WAITING",
    "InferRequest",
    "InferResult",
    "ModelMetadata",
    "TensorMetadata",
    "Timing",
]

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
    outputs: tuple[str, ...] = ()
    """Names asked for, in their order; empty: all."""
    priority: int = 0
    """1 goes before 2; 0: the function's default."""
    deadline: float | None = None
    """By `time.monotonic()`: past it the request is refused, not computed."""
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    received: float = 0.0
    """When its last byte had come, by `time.monotonic()`."""
    trace: Any = None
    """The caller's trace, for spans; None without tracing."""
    layout: object | None = None
    """The same object for requests whose inputs have the same names, dtypes and shapes; None: not
    known."""
    lone: bool = False
    """Whether no other request is on its way, so that it need not wait to see who else comes."""
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
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)


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
