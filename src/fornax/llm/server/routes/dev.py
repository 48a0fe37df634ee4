"""`/sleep`, `/wake_up`, `/is_sleeping`, `/reset_prefix_cache`: for those who train and develop."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from fornax.llm.server.body import failures
from fornax.llm.server.protocol.base import Reply
from fornax.llm.server.state import ServerOf

__all__ = ["router"]

router = APIRouter(tags=["Development"])


class Sleeping(Reply):
    """Whether the engine sleeps."""

    is_sleeping: bool


@router.post("/sleep", response_class=Response, responses=failures(400, body=False))
async def sleep(server: ServerOf, level: Annotated[int, Query(ge=1, le=2)] = 1) -> Response:
    """Free the cache; running requests start over when the engine wakes."""
    await server.engine.sleep(level)
    server.metrics.set_sleep(level)
    return Response()


@router.post("/wake_up", response_class=Response, responses=failures(body=False))
async def wake_up(server: ServerOf) -> Response:
    """Take the cache back."""
    await server.engine.wake()
    server.metrics.set_sleep(0)
    return Response()


@router.get("/is_sleeping", response_model=Sleeping, responses=failures(body=False))
async def is_sleeping(server: ServerOf) -> Sleeping:
    """Whether the engine sleeps."""
    return Sleeping(is_sleeping=server.engine.is_sleeping)


@router.post("/reset_prefix_cache", response_class=Response, responses=failures(body=False))
async def reset_prefix_cache(server: ServerOf) -> Response:
    """Forget every cached prefix."""
    await server.engine.reset_prefix_cache()
    return Response()
