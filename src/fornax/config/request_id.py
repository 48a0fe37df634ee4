"""The id of a request, one for its whole way: the client's where it is fit, else a new one.

Every server takes it from the header `X-Request-Id`, over gRPC a metadatum, returns it there, also
with errors, and passes it on to the replica or engine that answers.
"""

import re
import secrets

__all__ = ["HEADER", "request_id"]

HEADER = "x-request-id"
"""The header's name, and that of the metadatum of gRPC."""
_FIT = re.compile(r"[\x21-\x7e]{1,128}")


def request_id(given: str | bytes | None) -> str:
    """The id of a request.

    Args:
      given: what the client sent. It is kept where it is 1 to 128 printable characters of ASCII
        without spaces, as headers, logs and profiles need.

    Returns:
      `given`, or else 32 random hexadecimal digits.
    """
    text = given.decode("latin-1") if isinstance(given, bytes) else given
    return text if text and _FIT.fullmatch(text) else secrets.token_hex(16)
