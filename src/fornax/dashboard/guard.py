"""What every request passes first: the name it asks for, its token; and what every answer says.

A page of elsewhere may make a browser ask a server on this machine, under a name of its own that
leads here (DNS rebinding): so only this machine's own names are answered, unless a token is asked
for, which no other page knows. Nothing is remembered in cookies.
"""

import hmac
import json
import secrets
from collections.abc import Iterable
from urllib.parse import parse_qs, urlencode

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fornax.serving.access import Auth

__all__ = ["DATA_POLICY", "FILE_POLICY", "Guard", "Tickets", "error_body", "shell_policy"]

_LOCAL = frozenset(("127.0.0.1", "localhost", "[::1]"))
_OPEN = ("/static/", "/favicon.ico")
"""What holds no data, besides the shell."""
_TICKETED = ("/files", "/page")
_MOST_BODY = 64 << 10

DATA_POLICY = "default-src 'none'; frame-ancestors 'none'"
FILE_POLICY = (
    "sandbox allow-scripts; default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline' data:; frame-ancestors 'self'"
)
"""Of pages in run directories: they may run, and reach neither this server nor another."""
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)


def shell_policy(hashes: Iterable[str]) -> str:
    """The content policy of the page itself.

    Args:
      hashes: of the scripts in it, as `sha256-...`.
    """
    own = " ".join(f"'{each}'" for each in hashes)
    return (
        f"default-src 'none'; script-src 'self' {own}; style-src 'self'; img-src 'self' data: "
        "blob:; connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def error_body(status: int, message: str) -> bytes:
    """The JSON of an error."""
    return json.dumps({"error": {"message": message}}).encode()


class Tickets:
    """What opens one address each: a page that runs scripts can read its own, and must not find the
    token there."""

    def __init__(self) -> None:
        """Those of one start of the server."""
        self._key = secrets.token_bytes(32)

    def address(self, path: str, /, **query: str) -> str:
        """Where something is to be had without the token."""
        asked = f"{path}?{urlencode(query)}"
        return f"{asked}&ticket={self._ticket(asked)}"

    def admit(self, path: str, query: bytes) -> bool:
        """Whether an address has its own ticket."""
        asked, _, given = query.decode("latin-1").rpartition("&ticket=")
        return hmac.compare_digest(given.encode(), self._ticket(f"{path}?{asked}").encode())

    def _ticket(self, asked: str) -> str:
        return hmac.digest(self._key, asked.encode(), "sha256").hex()


class Guard:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, auth: Auth, tickets: Tickets) -> None:
        """A client with a token of `auth` may ask under any name; where it has none, everybody may
        under this machine's own."""
        self._app, self._auth, self._tickets = app, auth, tickets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _refuse(send, *refusal)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": _completed(message.get("headers", ()))}
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._auth.enabled and _name_of(host) not in _LOCAL:
            return 403, (
                f"this server answers to 127.0.0.1 and localhost, not to {host[:100]!r}; open it "
                "by that name, or start it with --host and --token-file"
            )
        path: str = scope["path"]
        if self._auth.enabled and path != "/" and not path.startswith(_OPEN):
            given = headers.get(b"authorization") or _of_query(scope["query_string"])
            ticket = path in _TICKETED and self._tickets.admit(path, scope["query_string"])
            if not ticket and not self._auth.admits(given):
                return 401, (
                    "the token is missing or wrong; open the address that the command printed, or "
                    "send Authorization: Bearer TOKEN"
                )
        if scope["method"] not in ("GET", "HEAD"):
            return _write_refusal(headers, host)
        return None


def _write_refusal(headers: dict[bytes, bytes], host: str) -> tuple[int, str] | None:
    """Why a request that changes something is refused."""
    origin = headers.get(b"origin")
    if origin is not None and origin.decode("latin-1").partition("://")[2] != host:
        return 403, "this request comes from a page of another origin"
    length = headers.get(b"content-length", b"")
    if not length.isdigit() or int(length) > _MOST_BODY:
        return 413, f"the body needs a content-length of at most {_MOST_BODY} bytes"
    return None


def _name_of(host: str) -> str:
    """A host without its port."""
    if host.startswith("["):
        return host[: host.find("]") + 1]
    return host.partition(":")[0].lower()


def _of_query(query: bytes) -> bytes | None:
    """The token of an address, as an `authorization` header says it."""
    found = _parsed(query).get("token")
    return None if not found else b"Bearer " + found[-1].encode("utf-8", "replace")


def _parsed(query: bytes) -> dict[str, list[str]]:
    try:
        return parse_qs(query.decode("latin-1"), max_num_fields=10_000)
    except ValueError:
        return {}


def _completed(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of an answer, and those that it does not set itself."""
    given = list(headers)
    names = {name.lower() for name, _ in given}
    usual = (
        *_HEADERS,
        (b"content-security-policy", DATA_POLICY.encode()),
        (b"cache-control", b"no-store"),
    )
    return [*given, *((name, value) for name, value in usual if name not in names)]


async def _refuse(send: Send, status: int, message: str) -> None:
    body = error_body(status, message)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
    ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    start = {"type": "http.response.start", "status": status, "headers": _completed(headers)}
    await send(start)
    await send({"type": "http.response.body", "body": body})
