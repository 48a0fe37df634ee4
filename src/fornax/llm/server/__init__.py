"""The LLM engine behind OpenAI's HTTP interface (FastAPI, uvicorn)."""

from fornax.llm.server.app import REQUEST_BODIES, asgi_app, create_app, create_server
from fornax.llm.server.config import ServerConfig
from fornax.llm.server.launch import ServeConfig, serve_model
from fornax.llm.server.metrics import Metrics

__all__ = [
    "REQUEST_BODIES",
    "Metrics",
    "ServeConfig",
    "ServerConfig",
    "asgi_app",
    "create_app",
    "create_server",
    "serve_model",
]
