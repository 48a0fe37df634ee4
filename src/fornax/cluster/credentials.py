"""What the agents of a run know each other by: a token and, beyond loopback, a certificate.

Both are made for one run by its controller and travel to the agents over the channels by which it
started them: they are on no command line, in no environment and in no file that stays.
"""

import dataclasses
import datetime
import hmac
import secrets
import socket
import ssl
import tempfile
from dataclasses import dataclass

from fornax.config.errors import ClusterError

__all__ = ["Credentials", "is_loopback", "own_address"]

_VALID = datetime.timedelta(days=365)
_SLACK = datetime.timedelta(days=1)  # clocks of hosts differ


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """A token, and the certificate and key of TLS, PEM; these empty on loopback."""

    token: str
    certificate: str = ""
    key: str = ""

    @classmethod
    def make(cls, address: str) -> "Credentials":
        """New ones for a run whose agents reach its controller at `address`.

        Raises:
          ClusterError: where they are on other machines and `cryptography` is not installed.
        """
        token = secrets.token_hex(32)
        return cls(token=token) if is_loopback(address) else cls(token=token, **_certificate())

    def __repr__(self) -> str:
        """Without secrets: it may end in a log."""
        return f"Credentials(tls={bool(self.key)})"

    def fields(self) -> dict[str, str]:
        """For a message; the constructor takes them back."""
        return dataclasses.asdict(self)

    def admit(self, given: object) -> bool:
        """Whether somebody showed the token; takes as long for any other of its length."""
        return hmac.compare_digest(str(given).encode(), self.token.encode())

    def accept(self, connection: socket.socket) -> socket.socket:
        """The listening side of a connection; with TLS the other end must have the certificate.

        Raises:
          OSError: when it has not.
        """
        if not self.key:
            return connection
        return self._context(ssl.PROTOCOL_TLS_SERVER).wrap_socket(connection, server_side=True)

    def dial(self, connection: socket.socket) -> socket.socket:
        """The connecting side; with TLS as `accept`.

        Raises:
          OSError: when the other end has another certificate.
        """
        if not self.key:
            return connection
        return self._context(ssl.PROTOCOL_TLS_CLIENT).wrap_socket(connection)

    def _context(self, side: int) -> ssl.SSLContext:
        """Both ends have the one certificate, and accept no other."""
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate is the run's, wherever its hosts are
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.certificate)
        with tempfile.NamedTemporaryFile("w") as file:  # mode 0600; the module reads files only
            file.write(self.key + self.certificate)
            file.flush()
            context.load_cert_chain(file.name)
        return context


def own_address(towards: str) -> str:
    """This machine's address, as others that reach `towards` reach it; loopback for loopback."""
    if is_loopback(towards):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    return address == "localhost" or address.startswith("127.")


def _certificate() -> dict[str, str]:
    """A certificate that signs itself, and its key on the curve P-256."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ModuleNotFoundError as error:
        raise ClusterError(
            "agents on several machines know each other by a certificate, and the package "
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
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return {"certificate": made.public_bytes(pem).decode(), "key": secret.decode()}
