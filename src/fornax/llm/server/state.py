"""What the routes share: the engine, its names, how busy the server is."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from fastapi import Depends, Request

from fornax.llm.server.base import BaseServer
from fornax.llm.server.config import ServerConfig
from fornax.llm.server.errors import ApiError
from fornax.llm.server.metrics import Metrics
from fornax.llm.server.middleware import RequestContext
from fornax.llm.server.preprocessing import ChatRenderer, PromptEncoder
from fornax.profile import OnDemand

__all__ = ["Server", "ServerDep"]


if TYPE_CHECKING:
    from fornax.llm.async_engine import AsyncEngine

_Engine: TypeAlias = "AsyncEngine"


@dataclass(kw_only=True)
class Server(BaseServer[_Engine, ServerConfig, Metrics]):
    """The running server."""

    encoder: PromptEncoder
    renderer: ChatRenderer
    defaults: Mapping[str, Any]
    """Fields of SamplingParams for requests that do not set them."""
    captures: OnDemand | None = None
    """Profiles on demand; None: there are none."""
    ids: Iterator[int] = field(default_factory=itertools.count)

    @property
    def places(self) -> int:
        """Requests that the engine runs at once."""
        return self.engine.max_num_seqs

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
        raise self.unknown(name, self.engine.loras())

    def require_ready(self) -> None:
        """503 unless the engine takes requests and is awake; 429 when too many wait already."""
        super().require_ready()
        if self.engine.is_sleeping:
            raise ApiError(503, "the engine sleeps; POST /wake_up wakes it", code="sleeping")


async def _server(request: Request) -> Server:
    return request.app.state.server


ServerDep = Annotated[Server, Depends(_server)]
