"""What a server of any model says of itself, and when it takes requests."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from fornax.llm.server.errors import ApiError
from fornax.llm.server.limits import ConcurrencyLimit
from fornax.llm.stats import Readiness

__all__ = ["BaseServer"]


class _Engine(Protocol):
    @property
    def num_unfinished(self) -> int: ...

    def error(self) -> BaseException | None: ...

    def readiness(self) -> Readiness: ...


class _Metrics(Protocol):
    def row(self, seconds: float) -> Mapping[str, object]: ...


class _Config(Protocol):
    @property
    def served_model_name(self) -> tuple[str, ...]: ...

    @property
    def max_queued_requests(self) -> int: ...


EngineT = TypeVar("EngineT", bound=_Engine)
ConfigT = TypeVar("ConfigT", bound=_Config)
MetricsT = TypeVar("MetricsT", bound=_Metrics)


@dataclass(kw_only=True)
class BaseServer(ABC, Generic[EngineT, ConfigT, MetricsT]):
    """A running server."""

    engine: EngineT
    config: ConfigT
    model: str
    """The model's path, as it was given."""
    metrics: MetricsT
    concurrency: ConcurrencyLimit
    created: int = field(default_factory=lambda: int(time.time()))
    adapters_left: int = 0
    """Adapters named at the start that are still to be loaded."""
    stopping: bool = False
    """Whether the server drains."""

    @property
    @abstractmethod
    def places(self) -> int:
        """Requests that the engine runs at once."""

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names; the first is the one in answers."""
        return self.config.served_model_name or (self.model,)

    def error(self) -> BaseException | None:
        """Why the engine died, if it did."""
        return self.engine.error()

    def row(self, seconds: float) -> Mapping[str, object]:
        """What `server.jsonl` has of the seconds since the last call."""
        return self.metrics.row(seconds)

    def unknown(self, name: str, adapters: Iterable[str]) -> ApiError:
        """404 for a model that is not here."""
        return ApiError(
            404,
            f"the model {name!r} does not exist here; this server has "
            f"{', '.join([*self.names, *adapters])}",
            param="model",
            code="model_not_found",
        )

    def require_ready(self) -> None:
        """503 unless the engine takes requests; 429 when too many wait already."""
        if self.engine.error() is not None:
            raise ApiError(503, "the engine died; the server is stopping", code="engine_dead")
        if self.stopping:
            raise ApiError(503, "the server is stopping", code="stopping", retry_after=5)
        readiness = self.engine.readiness()
        if not readiness.ready:
            raise ApiError(
                503,
                f"the engine is compiling ({readiness.done} of {readiness.total} programs done)",
                code="not_ready",
                retry_after=readiness.seconds_left or 1,
            )
        if self.adapters_left:
            raise ApiError(
                503,
                f"{self.adapters_left} adapters are still to be loaded",
                code="not_ready",
                retry_after=1,
            )
        waiting = self.engine.num_unfinished - self.places
        if waiting >= max(1, self.config.max_queued_requests):
            raise self.concurrency.refusal(f"{waiting} requests wait for a place", waiting)
