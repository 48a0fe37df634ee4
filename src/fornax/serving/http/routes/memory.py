"""Shared memory that clients of this machine register for their tensors."""

from fastapi import APIRouter, Response

from fornax.config import ServingCode, ServingError
from fornax.serving.http import schemas
from fornax.serving.http.routing import Context, DocumentedRoute, failures, respond
from fornax.serving.v2 import documents
from fornax.serving.v2.shared_memory import CUDA_REFUSED

__all__ = ["memory"]

memory = APIRouter(tags=["Shared memory"], route_class=DocumentedRoute)

_SYSTEM = "/v2/systemsharedmemory"
_CUDA = "/v2/cudasharedmemory"
_REGION = "/region/{region}"
_REGIONS = list[schemas.RegionAnswer]


@memory.get(_SYSTEM + "/status", response_model=_REGIONS, responses=failures())
async def regions(context: Context) -> Response:
    """The registered regions."""
    return respond(documents.regions(context.shared_memory.regions()))


@memory.get(_SYSTEM + _REGION + "/status", response_model=_REGIONS, responses=failures())
async def region_status(context: Context, region: str) -> Response:
    """One of them."""
    return respond(documents.regions(context.shared_memory.regions(region)))


@memory.post(
    _SYSTEM + _REGION + "/register",
    response_model=schemas.Empty,
    responses=failures(409, 429, 501),
)
async def register(context: Context, region: str, body: schemas.RegisterBody) -> Response:
    """Name a span of system shared memory."""
    context.shared_memory.register(region, body.key, body.byte_size, body.offset)
    return respond({})


@memory.post(_SYSTEM + "/unregister", response_model=schemas.Empty, responses=failures())
async def unregister_all(context: Context) -> Response:
    """Forget every region."""
    context.shared_memory.unregister()
    return respond({})


@memory.post(_SYSTEM + _REGION + "/unregister", response_model=schemas.Empty, responses=failures())
async def unregister(context: Context, region: str) -> Response:
    """Forget a region; one that is not registered is not an error."""
    context.shared_memory.unregister(region)
    return respond({})


@memory.get(_CUDA + "/status", response_model=_REGIONS, responses=failures())
async def cuda_regions() -> Response:
    """No region: CUDA shared memory is not served."""
    return respond([])


@memory.get(_CUDA + _REGION + "/status", response_model=_REGIONS, responses=failures(501))
async def cuda_region_status(region: str) -> Response:
    """Refused: CUDA shared memory is not served."""
    raise ServingError(ServingCode.UNIMPLEMENTED, CUDA_REFUSED)


@memory.post(_CUDA + _REGION + "/register", response_model=schemas.Empty, responses=failures(501))
async def register_cuda(region: str) -> Response:
    """Refused: CUDA shared memory is not served."""
    raise ServingError(ServingCode.UNIMPLEMENTED, CUDA_REFUSED)


@memory.post(_CUDA + "/unregister", response_model=schemas.Empty, responses=failures())
async def unregister_all_cuda() -> Response:
    """Nothing is registered, so there is nothing to forget."""
    return respond({})


@memory.post(_CUDA + _REGION + "/unregister", response_model=schemas.Empty, responses=failures())
async def unregister_cuda(region: str) -> Response:
    """Nothing is registered, so there is nothing to forget."""
    return respond({})
