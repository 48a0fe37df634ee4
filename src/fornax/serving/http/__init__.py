"""The V2 protocol over HTTP: the app, its limits, and the server that answers with it."""

from fornax.serving.http.app import http_app
from fornax.serving.http.server import HttpServer

__all__ = ["HttpServer", "http_app"]
