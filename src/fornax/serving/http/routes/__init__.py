"""Every call but infer, by topic."""

from fastapi import FastAPI

from fornax import __version__
from fornax.serving.http.generate import generate_routes
from fornax.serving.http.openapi import describe
from fornax.serving.http.routes.memory import memory
from fornax.serving.http.routes.models import health, models
from fornax.serving.http.routes.operations import operations
from fornax.serving.http.routes.repository import repository
from fornax.serving.http.routing import ServerContext, install_errors

__all__ = ["create_routes"]


def create_routes(context: ServerContext) -> FastAPI:
    """The routes, and the OpenAPI document of these and of inference."""
    app = FastAPI(
        title="Fornax",
        version=__version__,
        summary="Models behind the V2 inference protocol.",
        docs_url=None,  # the page would take its scripts from another host
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.context = context
    install_errors(app)
    for router in (health, models, repository, memory, operations):
        app.include_router(router)
    app.router.routes.extend(generate_routes(context))
    app.openapi = lambda: describe(app)  # pyrefly: ignore[bad-assignment]
    return app
