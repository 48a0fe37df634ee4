"""A model of the server that is not a bundle, such as an LLM engine: what it must be able to do.

`serving` does not depend on such a model, nor the model on `serving`: what crosses is plain.
The code that starts the server passes factories by the `type` that a repository folder's
serving.yaml names; `fornax.llm.host_entry` has the one for language models.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fornax.serving.types import InferRequest

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from starlette.types import ASGIApp

__all__ = ["Backend", "BackendFactory", "Piece", "StreamingBackend", "Tensor", "stream_of"]

Tensor = tuple[str, tuple[int, ...]]
"""V2 datatype and shape; -1 for a size that may vary."""

Piece = tuple[Mapping[str, np.ndarray], bool]
"""Some of an answer's outputs, and whether they are the last."""


class Backend(Protocol):
    """A model with an engine of its own. Every method is called in the event loop's thread."""

    @property
    def name(self) -> str:
        """Its name in the repository: its folder's."""

    @property
    def memory(self) -> int:
        """Bytes it takes of its device, as far as it knows before it starts."""

    async def start(self) -> None:
        """Load, compile, and return when requests are taken.

        Raises:
          FornaxError: it cannot be served; the server continues without it.
        """

    async def stop(self, drain_seconds: float) -> None:
        """Take nothing new, answer what runs for this long, give everything back."""

    def ready(self) -> bool:
        """Whether requests are taken now; asked for readiness and the index."""

    def reason(self) -> str:
        """Why it is not ready; empty when it is, or never was asked to start."""

    @property
    def platform(self) -> str:
        """What runs it, as the V2 protocol names it."""

    def inputs(self) -> Mapping[str, "Tensor"]:
        """Its inputs by name."""

    def outputs(self) -> Mapping[str, "Tensor"]:
        """Its outputs by name."""

    def config(self) -> Mapping[str, object]:
        """Its model configuration, as Triton's clients read it."""

    async def infer(self, request: InferRequest) -> Mapping[str, np.ndarray]:
        """Answer a V2 request (`serving.types.InferRequest`); cancelling aborts it.

        Raises:
          ServingError: the request is refused, or cannot be answered.
        """

    def collect(self) -> "Iterable[Metric]":
        """Its own metrics, as families of prometheus_client's."""

    def routes(self) -> "Mapping[str, ASGIApp]":
        """Apps by the path they answer under, beside V2; they exist before `start`."""


class StreamingBackend(Backend, Protocol):
    """A backend that can also answer a request in pieces: Triton calls such a model decoupled."""

    def stream(self, request: InferRequest) -> AsyncGenerator[Piece, None]:
        """The answer's pieces as they are made, one at least; closing aborts the request.

        Raises:
          ServingError: the request is refused, or cannot be answered to its end.
        """


def stream_of(backend: object) -> Callable[[InferRequest], AsyncGenerator[Piece, None]] | None:
    """A backend's `stream`; None: what it is answers whole alone."""
    return getattr(backend, "stream", None)


BackendFactory = Callable[[str, Path, Mapping[str, object]], Backend]
"""Makes a backend of its name, its folder, and what its serving.yaml says besides `type`."""
