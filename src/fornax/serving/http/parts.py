"""What the routes share."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, Request

from fornax.serving.events import Events
from fornax.serving.v2.shared_memory import SharedMemory

__all__ = ["Parts", "PartsOf"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What the routes stand on."""

    host: Any
    shared_memory: SharedMemory
    metrics: Callable[[], tuple[bytes, str]] | None
    trace_sample_rate: float
    events: Events | None


async def _parts(request: Request) -> Parts:
    return request.app.state.parts


PartsOf = Annotated[Parts, Depends(_parts)]
