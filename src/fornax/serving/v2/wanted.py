"""How a client wants its answer: which outputs, and each in JSON, in binary or in shared memory."""

import dataclasses

from fornax.serving.v2.parameters import SharedSpan
from fornax.serving.v2.shared_memory import Region

__all__ = ["Output", "Wanted"]


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """How the client wants one output."""

    name: str
    binary: bool
    classes: int = 0
    """Over 0: this many classes in its stead."""
    span: SharedSpan | None = None
    region: Region | None = None
    """Where it goes, if not into the answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """How the client wants the answer."""

    binary: bool
    """For all outputs, where none is named."""
    outputs: tuple[Output, ...] = ()
    id: str = ""
    """The request's, which the answer repeats."""
