"""The LLM engine behind OpenAI's HTTP interface (FastAPI, uvicorn)."""

from fornax.llm.server.app import create_app, create_server, guarded
from fornax.llm.server.config import ServerConfig
from fornax.llm.server.launch import ServeConfig, serve_model
from fornax.llm.server.metrics import Metrics

__all__ = [
    "Metrics",
    "ServeConfig",
    "ServerConfig",
    "create_app",
    "create_server",
    "guarded",
    "serve_model",
]
