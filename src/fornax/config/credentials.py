"""What the processes of a run know each other by: a token and, between machines, a certificate.

Both are made for one run by its launcher and travel over the channels by which processes were
started. They are on no command line, in no file system and in no environment, which children
inherit: a program that a worker starts does not have them.
"""

import contextlib
import dataclasses
import datetime
import functools
import hmac
import os
import secrets
import select
import socket
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from fornax.config.errors import ClusterError
from fornax.config.frames import LinkError

__all__ = [
    "HOST_NAME",
    "TOKEN_HEADER",
    "Credentials",
    "TlsError",
    "of_run",
    "set_of_run",
    "tell_refusal",
]

HOST_NAME = "fornax-run"
"""The name in every certificate, for clients that insist on comparing one, such as gRPC's."""
TOKEN_HEADER = "x-fornax-token"
"""The header of HTTP, and the metadatum of gRPC, that has the token."""
_VALID = datetime.timedelta(days=3650)  # no launch is longer; it knows one certificate, its own
_SLACK = datetime.timedelta(days=1)  # clocks of hosts differ
_WRITE = 1 << 20

T = TypeVar("T")


class TlsError(LinkError):
    """The other end has not the certificate of this run, or speaks no TLS."""


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """A token, and the certificate and key of TLS, PEM; these empty in a run on loopback."""

    token: str
    certificate: str = ""
    key: str = ""

    @classmethod
    def make(cls, *, tls: bool = False) -> "Credentials":
        """New ones for a run.

        Args:
          tls: whether its processes may be on several machines.

        Raises:
          ClusterError: where they may and `cryptography` is not installed.
        """
        token = secrets.token_hex(32)
        return cls(token=token, **_certificate()) if tls else cls(token=token)

    def __repr__(self) -> str:
        """Without secrets: it may end in a log."""
        return f"Credentials(tls={bool(self.key)})"

    def fields(self) -> dict[str, str]:
        """For a message; the constructor takes them back."""
        return dataclasses.asdict(self)

    def admit(self, given: object) -> bool:
        """Whether somebody showed the token; takes as long for any other of its length."""
        return hmac.compare_digest(str(given).encode(), self.token.encode())

    def context(self, *, server: bool) -> ssl.SSLContext | None:
        """How the listening or the connecting side speaks TLS in an event loop; None: it does not.

        Both ends show the certificate and accept no other.
        """
        return _context(self.certificate, self.key, server=server) if self.key else None

    def accept(self, connection: socket.socket) -> socket.socket:
        """The listening side of a connection.

        With TLS it takes the place of `connection`. The other end must have the certificate, else
        the first read or write raises `TlsError`. One thread may read while another writes.

        Raises:
          LinkError: when the other end is gone already.
        """
        return self._secured(connection, server=True)

    def dial(self, connection: socket.socket) -> socket.socket:
        """The connecting side; see `accept`."""
        return self._secured(connection, server=False)

    def _secured(self, connection: socket.socket, *, server: bool) -> socket.socket:
        context = self.context(server=server)
        if context is None:
            return connection
        try:
            return context.wrap_socket(
                connection, server_side=server, do_handshake_on_connect=False
            )
        except OSError as error:
            connection.close()
            raise LinkError(f"the other end is gone: {error}") from error


def tell_refusal(peer: socket.socket, error: TlsError) -> None:
    """Say in a listening process's log whose connection it refused."""
    with contextlib.suppress(OSError):
        print(f"refused {peer.getpeername()}: {error}", file=sys.stderr, flush=True)  # noqa: T201


_of_run: Credentials | None = None


def set_of_run(credentials: Credentials) -> None:
    """Have this process know what its launcher gave it."""
    global _of_run
    _of_run = credentials


def of_run() -> Credentials | None:
    """What this process was given by `fornax launch`; None where that did not start it."""
    return _of_run


@functools.lru_cache(maxsize=4)
def _context(certificate: str, key: str, *, server: bool) -> ssl.SSLContext:
    """Both ends have the one certificate, and accept no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is the run's, wherever its hosts are
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    if server:
        context.num_tickets = 0
    context.sslsocket_class = _Secured
    with _file_of(key + certificate) as path:
        context.load_cert_chain(path)
    return context


@contextlib.contextmanager
def _file_of(text: str) -> Iterator[str]:
    """A path for what reads files only: of memory on Linux, else of a file of mode 0600."""
    with contextlib.ExitStack() as stack:
        if hasattr(os, "memfd_create"):
            file = stack.enter_context(open(os.memfd_create("fornax-key"), "w"))
            path = f"/proc/self/fd/{file.fileno()}"
        else:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w"))
            path = file.name
        file.write(text)
        file.flush()
        yield path


class _Secured(ssl.SSLSocket):
    """TLS that one thread may read while another writes, or ends it.

    OpenSSL's state is for one thread at a time, and Python's own socket holds it while it waits for
    the network. Here each takes it for moments and waits without it; `shutdown` leaves it alone.
    """

    _seconds: float | None
    _using: threading.Lock
    _writing: threading.Lock

    def __new__(cls, *args: Any, **kwargs: Any) -> "_Secured":
        made = super().__new__(cls, *args, **kwargs)
        made._seconds, made._using, made._writing = None, threading.Lock(), threading.Lock()
        return made

    def settimeout(self, value: float | None, /) -> None:
        self._seconds = value
        super().setblocking(False)

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        return self._whenever_ready(functools.partial(super().recv_into, buffer, nbytes, flags))

    def sendall(self, data: Any, flags: int = 0) -> None:
        with self._writing, memoryview(data) as view, view.cast("B") as rest:
            at = 0
            while at < len(rest):
                part = rest[at : at + _WRITE]
                at += self._whenever_ready(functools.partial(super().send, part, flags))

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self, how)

    def close(self) -> None:
        with self._using:
            super().close()

    def _whenever_ready(self, act: Callable[[], T]) -> T:
        """What an attempt comes to that OpenSSL makes once it has read, or written, what it must.

        Raises:
          TlsError: see there.
          OSError: as of other sockets.
        """
        until = None if self._seconds is None else time.monotonic() + self._seconds
        while True:
            try:
                with self._using:
                    return act()
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            except ssl.SSLEOFError:
                raise
            except ssl.SSLError as error:
                raise TlsError(
                    "the other end does not have this run's certificate, or does not speak TLS "
                    f"({error.reason or error}); both must belong to the same fornax launch"
                ) from error
            self._wait(event, until)

    def _wait(self, event: int, until: float | None) -> None:
        poll = select.poll()
        if self.fileno() < 0:
            raise ConnectionAbortedError("the connection was closed here")
        poll.register(self.fileno(), event)
        left = None if until is None else max(0.0, until - time.monotonic()) * 1000
        if not poll.poll(left):
            raise TimeoutError("the other end says nothing")


def _certificate() -> dict[str, str]:
    """A certificate that signs itself, and its key on the curve P-256."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ModuleNotFoundError as error:
        raise ClusterError(
            "processes on several machines know each other by a certificate, and the package "
            "cryptography, which makes it, is not installed: pip install 'fornax-ai[cluster]'"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fornax run")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SLACK)
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return {"certificate": made.public_bytes(pem).decode(), "key": secret.decode()}
