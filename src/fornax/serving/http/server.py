"""The app at an address: stock uvicorn with bounded connections and TLS."""

from starlette.types import ASGIApp

from fornax.config.credentials import Credentials
from fornax.config.http_server import HttpServer, listen, server_config
from fornax.serving.access import Limits, Tls
from fornax.serving.config import Address
from fornax.serving.http.responses import error_body

__all__ = ["http_server"]


def http_server(
    app: ASGIApp,
    address: Address,
    limits: Limits,
    tls: Tls | None = None,
    credentials: Credentials | None = None,
) -> HttpServer:
    """A server of `app`, whose `start` takes the address.

    Args:
      credentials: see `server_config`.
    """
    config = server_config(
        app,
        limits,
        lambda _, message: error_body(message),
        keep_alive=limits.keep_alive,
        certificate=None if tls is None else tls.cert,
        key=None if tls is None else tls.key,
        client_ca=None if tls is None else tls.client_ca,
        credentials=credentials,
    )
    return HttpServer(config, lambda: listen(address.host, address.port, limits.send_timeout))
