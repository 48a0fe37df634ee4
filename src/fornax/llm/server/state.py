"""What the routes share: the engine, its names, how busy the server is."""

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request

from fornax.llm.server.chat_prompt import ChatPrompts
from fornax.llm.server.config import ServerConfig
from fornax.llm.server.engine import Engine
from fornax.llm.server.errors import ApiError
from fornax.llm.server.metrics import Metrics
from fornax.llm.server.prompts import Encoder
from fornax.llm.server.record import Record

__all__ = ["Load", "RecordOf", "Server", "ServerOf"]


@dataclass(slots=True)
class Load:
    """How many requests are being answered, and how fast they finish."""

    most: int
    """Requests at once; more are refused."""
    running: int = 0
    finishes: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request while it runs; 429 when there are too many."""
        if self.running >= self.most:
            raise self.refusal(f"{self.running} requests are being answered", 1)
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self.finishes.append(time.monotonic())

    def refusal(self, why: str, ahead: int) -> ApiError:
        """429, with the time until about `ahead` requests will have finished."""
        seconds = 1.0
        if len(self.finishes) > 1:
            span = self.finishes[-1] - self.finishes[0]
            seconds = min(60.0, max(1.0, ahead * span / (len(self.finishes) - 1)))
        return ApiError(
            429,
            f"{why}, which is all this server takes; try again later",
            code="rate_limit_exceeded",
            retry_after=seconds,
        )


@dataclass(kw_only=True)
class Server:
    """The running server."""

    engine: Engine
    config: ServerConfig
    model: str
    """The model's path, as it was given."""
    metrics: Metrics
    encoder: Encoder
    chats: ChatPrompts
    load: Load
    defaults: Mapping[str, Any]
    """Fields of SamplingParams for requests that do not set them."""
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

    def engine_id(self, answer_id: str) -> str:
        """An id for the engine: clients may use theirs twice."""
        return f"{answer_id}-{next(self.ids)}"

    def names_tokens_by_id(self, asked: bool | None) -> bool:
        """Whether log probabilities name tokens as token_id:N: as a request asks, or the config."""
        return bool(self.config.return_tokens_as_token_ids if asked is None else asked)

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
            raise self.load.refusal(f"{waiting} completions wait for a place", waiting)


async def _server(request: Request) -> Server:
    return request.app.state.server


async def _record(request: Request) -> Record:
    return request.state.record


ServerOf = Annotated[Server, Depends(_server)]
RecordOf = Annotated[Record, Depends(_record)]
