"""Who may call what over HTTP: the tokens of clients and of the administrator, by path."""

import re

from starlette.types import Scope

from fornax.config import ServingCode, ServingError
from fornax.serving.access import Auth

__all__ = ["Gate", "changes_server", "path_of"]

_OPEN = re.compile(r"/v2/health/(live|ready)|/v2/models/[^/]+(/versions/[^/]+)?/ready")
"""What needs no token."""
_ADMIN = (
    "/v2/repository/models/",
    "/v2/systemsharedmemory/",
    "/v2/cudasharedmemory/",
    "/v2/profile",
)
_ADMIN_WRITES = ("/v2/logging", "/v2/trace/setting")


class Gate:
    """Refuses requests whose token does not open their path."""

    def __init__(self, auth: Auth, admin: Auth | None):
        """`admin` opens what changes the server; None: every caller may change it."""
        self._auth = auth
        self._admin = admin

    def check(self, path: str, scope: Scope) -> None:
        """Raise ServingError unless the request's token opens `path`."""
        auth, admin = self._auth, self._admin
        if (not auth.enabled and admin is None) or _OPEN.fullmatch(path):
            return
        if path == "/metrics" and auth.open_metrics:
            return
        header = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                header = value
        if not auth.admits(header):
            raise ServingError(
                ServingCode.UNAUTHENTICATED,
                "the token is missing or wrong; send it as Authorization: Bearer TOKEN",
            )
        if admin and changes_server(path, scope["method"]) and not admin.admits(header):
            raise ServingError(ServingCode.PERMISSION_DENIED, f"{path} requires the admin token")


def path_of(scope: Scope) -> str:
    """The path as the routes know it, whatever a proxy shows it under."""
    path: str = scope["path"]
    return path.removeprefix(scope["root_path"]) if scope["root_path"] else path


def changes_server(path: str, method: str) -> bool:
    """Whether a call is the administrator's."""
    if path.startswith(_ADMIN):
        return True
    return method == "POST" and (path in _ADMIN_WRITES or path.endswith("/trace/setting"))
