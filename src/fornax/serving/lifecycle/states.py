"""What the life of a version is made of: its source, its copy in memory, its failure."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from fornax.config import ServingCode
from fornax.export.spec import Signature
from fornax.serving.settings import ModelSettings
from fornax.serving.statistics import ModelStatistics
from fornax.serving.types import InferRequest, InferResult

__all__ = ["Failure", "Instance", "Loader", "ServableLike", "Source"]


class ServableLike(Protocol):
    """What a version must do once it is loaded; `serving.servable.Servable` does."""

    @property
    def functions(self) -> Sequence[str]:
        """Their names, the one for requests that name none first."""

    def submit(self, request: InferRequest) -> "asyncio.Future[InferResult]":
        """Accept a request, or raise ServingError at once."""

    def signature(self, function: str = "") -> Signature:
        """The inputs and outputs of a function."""

    def statistics(self) -> ModelStatistics:
        """Counters since it was loaded."""

    async def drain(self, seconds: float) -> bool:
        """Accept nothing more and answer what was accepted; False when the time was too short."""

    async def close(self) -> None:
        """Give memory back."""


@dataclasses.dataclass(frozen=True)
class Source:
    """What a version is loaded from."""

    name: str
    version: int
    path: Path
    settings: ModelSettings
    fingerprint: str


Loader = Callable[[Source], Awaitable[ServableLike]]
"""Loads, verifies and warms; returns what can answer, or raises and leaves nothing behind."""


@dataclasses.dataclass(eq=False, slots=True)
class Instance:
    """One copy of a version in memory. A version that is reloaded has two for a moment."""

    source: Source
    servable: ServableLike

    @property
    def version(self) -> int:
        """Its number."""
        return self.source.version


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a version did not load, and what must change before it is tried again."""

    source: Source
    code: ServingCode
    reason: str
    epoch: int
    """How many copies had been unloaded by then: one refused for memory may fit after the next."""

    def holds(self, fingerprint: str, settings: ModelSettings, epoch: int) -> bool:
        """Whether another try would be the same try."""
        if self.code is ServingCode.RESOURCE_EXHAUSTED and epoch > self.epoch:
            return False
        source = self.source
        return source.fingerprint == fingerprint and not source.settings.wants_reload(settings)
