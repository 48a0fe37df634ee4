"""What the routes share: the engine, the model's names and sizes, how busy the server is."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from fornax.diffusion.pipelines import Size
from fornax.diffusion.server.config import ImageServerConfig
from fornax.diffusion.server.engine import Engine
from fornax.diffusion.server.metrics import Metrics
from fornax.llm.server.errors import ApiError
from fornax.llm.server.limits import ConcurrencyLimit

__all__ = ["Server", "ServerDep"]

_MOST_VALUES = 4096


@dataclass(kw_only=True)
class Server:
    """The running server."""

    engine: Engine
    config: ImageServerConfig
    model: str
    """As it was given."""
    metrics: Metrics
    sizes: Mapping[str, Size]
    """By their names, the default first."""
    concurrency: ConcurrencyLimit
    created: int = field(default_factory=lambda: int(time.time()))
    adapters_left: int = 0
    """None are loaded."""
    stopping: bool = False
    """Whether the server drains."""

    @property
    def names(self) -> tuple[str, ...]:
        """The model's names; the first is the one in lists."""
        return self.config.served_model_name or (self.model,)

    def error(self) -> Exception | None:
        """Why the engine died, if it did."""
        return self.engine.error()

    def row(self, seconds: float) -> Mapping[str, object]:
        """What `server.jsonl` has of the seconds since the last call."""
        return self.metrics.row(seconds)

    def check_json(self, body: bytes) -> None:
        """400 for a body of more values than any of the API's has."""
        values = body.count(b",") + 1
        if values > _MOST_VALUES:
            raise ApiError(
                400, f"the body has {values} values by its commas; send at most {_MOST_VALUES}"
            )

    def check_model(self, name: str | None) -> None:
        """404 for a model that is not here."""
        known = (*self.names, *self.engine.pipeline.adapters)
        if name is not None and name not in known:
            raise ApiError(
                404,
                f"the model {name!r} does not exist here; this server has {', '.join(known)}",
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
                f"the model is compiling ({readiness.done} of {readiness.total} sizes done)",
                code="not_ready",
                retry_after=readiness.seconds_left or 1,
            )
        waiting = self.engine.num_unfinished - self.engine.slots
        if waiting >= max(1, self.config.max_queued_requests):
            raise self.concurrency.refusal(f"{waiting} requests wait for a slot", waiting)


async def _server(request: Request) -> Server:
    return request.app.state.server


ServerDep = Annotated[Server, Depends(_server)]
