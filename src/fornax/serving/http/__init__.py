"""The V2 protocol over HTTP: the app, its limits, and the server that answers with it."""

from fornax.serving.http.app import http_app
from fornax.serving.http.server import http_server

__all__ = ["http_app", "http_server"]
