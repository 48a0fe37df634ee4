"""Metrics, and the settings of logs and traces."""

from fastapi import APIRouter, Response

from fornax.config import ServingCode, ServingError
from fornax.serving.http import schemas
from fornax.serving.http.routing import Context, DocumentedRoute, failures, respond
from fornax.serving.v2 import settings

__all__ = ["operations"]

operations = APIRouter(tags=["Operations"], route_class=DocumentedRoute)

_TRACES = "/v2/trace/setting"
_MODEL_TRACES = "/v2/models/{model}/trace/setting"


@operations.get(_TRACES, response_model=schemas.TraceSettings, responses=failures())
async def trace_settings(context: Context) -> Response:
    """How requests are traced."""
    return respond(settings.trace_settings(context.trace_sample_rate))


@operations.get(_MODEL_TRACES, response_model=schemas.TraceSettings, responses=failures(404, 503))
async def model_trace_settings(context: Context, model: str) -> Response:
    """How requests for a model are traced: as all are."""
    context.host.metadata(model)
    return respond(settings.trace_settings(context.trace_sample_rate))


@operations.post(_TRACES, response_model=schemas.TraceSettings, responses=failures(501))
async def update_trace_settings(context: Context, body: dict[str, object]) -> Response:
    """Refused, unless it changes nothing: traces are set up when the server starts."""
    return respond(settings.update_trace_settings(body, context.trace_sample_rate))


@operations.post(
    _MODEL_TRACES, response_model=schemas.TraceSettings, responses=failures(404, 501, 503)
)
async def update_model_trace_settings(
    context: Context, model: str, body: dict[str, object]
) -> Response:
    """Refused, unless it changes nothing: traces are set up when the server starts."""
    context.host.metadata(model)
    return respond(settings.update_trace_settings(body, context.trace_sample_rate))


@operations.get("/v2/logging", response_model=schemas.LogSettings, responses=failures())
async def log_settings() -> Response:
    """What is logged."""
    return respond(settings.log_settings())


@operations.post("/v2/logging", response_model=schemas.LogSettings, responses=failures(501))
async def update_log_settings(body: dict[str, object]) -> Response:
    """Log more or less: log_error, log_warning, log_info, log_verbose_level."""
    return respond(settings.update_log_settings(body))


@operations.get(
    "/metrics",
    response_class=Response,
    responses={
        **failures(404),
        200: {"description": "Prometheus' text.", "content": {"text/plain": {}}},
    },
)
async def metrics(context: Context) -> Response:
    """Metrics, for Prometheus."""
    if context.metrics is None:
        raise ServingError(ServingCode.NOT_FOUND, "this server has no metrics")
    body, content_type = context.metrics()
    return Response(body, headers={"content-type": content_type})
