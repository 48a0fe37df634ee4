"""What the routes share: the engine, its names, how busy the server is."""

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request

from fornax.llm.server.config import ServerConfig
from fornax.llm.server.errors import ApiError
from fornax.llm.server.limits import ConcurrencyLimit
from fornax.llm.server.metrics import Metrics
from fornax.llm.server.middleware import RequestContext
from fornax.llm.server.preprocessing import ChatRenderer, PromptEncoder
from fornax.profile import OnDemand

__all__ = ["Server", "ServerDep"]


if TYPE_CHECKING:
    from fornax.llm.async_engine import AsyncEngine


@dataclass(kw_only=True)
class Server:
    """The running server."""

    engine: "AsyncEngine"
    config: ServerConfig
    model: str
    """The model's path, as it was given."""
    metrics: Metrics
    encoder: PromptEncoder
    renderer: ChatRenderer
    concurrency: ConcurrencyLimit
    defaults: Mapping[str, Any]
    """Fields of SamplingParams for requests that do not set them."""
    captures: OnDemand | None = None
    """Profiles on demand; None: there are none."""
    created: int = field(default_factory=lambda: int(time.time()))
    ids: Iterator[int] = field(default_factory=itertools.count)
    adapters_left: int = 0
    """Adapters named at the start that are still to be loaded."""
    stopping: bool = False
    """Whether the server drains."""

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

    def check_json(self, body: bytes) -> None:
        """400 for a body of more values than the limits allow."""
        self.config.request_limits.check_json(body, self.engine.max_model_len)

    def engine_id(self, answer_id: str, context: RequestContext | None = None) -> str:
        """An id for the engine: clients may use theirs twice. `context` is that of the HTTP request
        that the generation is traced with."""
        name = f"{answer_id}-{next(self.ids)}"
        if context is not None and self.metrics.tracer is not None:
            self.metrics.tracer.began(name, context)
        return name

    def adapter(self, name: str | None) -> str | None:
        """The adapter that a request names; None for the model itself; else 404."""
        if name is None or name in self.names:
            return None
        if name in self.engine.loras():
            return name
        raise self.unknown(name)

    def unknown(self, name: str) -> ApiError:
        """404 for a model that is not here."""
        known = ", ".join([*self.names, *self.engine.loras()])
        return ApiError(
            404,
            f"the model {name!r} does not exist here; this server has {known}",
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
        if self.engine.is_sleeping:
            raise ApiError(503, "the engine sleeps; POST /wake_up wakes it", code="sleeping")
        waiting = self.engine.num_unfinished - self.engine.max_num_seqs
        if waiting >= max(1, self.config.max_queued_requests):
            raise self.concurrency.refusal(f"{waiting} completions wait for a place", waiting)


async def _server(request: Request) -> Server:
    return request.app.state.server


ServerDep = Annotated[Server, Depends(_server)]
